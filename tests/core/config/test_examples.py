"""configs/: every example is read, and is valid on a machine that has the files it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.service.config_check import environment_issues
from tests.kit.configs import load, read
from tests.kit.paths import ROOT

CONFIGS = ROOT / "configs"
EXAMPLES = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment with everything that the examples need."""
    (tmp_path / "models").mkdir()
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    keys.chmod(0o600)
    return {
        "HOME": str(tmp_path),
        "LLAMASUP_MODELS": str(tmp_path / "models"),
        "LLAMASUP_KEYS": str(keys),
        "LLAMASUP_PORT": "0",
        "LLAMASUP_ADDRESS": "0.0.0.0:0",
    }


def test_examples_cover_each_use() -> None:
    assert [path.stem for path in EXAMPLES] == ["cpu-only", "folder", "sidecar", "single", "team", "two-gpus"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_valid_on_a_machine_with_its_files(path: Path, machine: dict[str, str]) -> None:
    reading, issues = read(path, machine)

    assert issues == ()
    assert environment_issues(reading, machine, devices_of=lambda *_: ["CUDA0", "CUDA1"]) == ()
    assert reading.config.port == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_read_without_environment_variables(path: Path, tmp_path: Path) -> None:
    """``serve --config configs/X.yaml`` then reports the missing files."""
    load(path, {"HOME": str(tmp_path / "missing")})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_shows_its_command(path: Path) -> None:
    lines = path.read_text().splitlines()

    assert len(lines) <= 35
    assert lines[0].startswith("# ")
    assert any(f"--config configs/{path.name}" in line for line in lines[:4])


def test_team_example_needs_a_key_file(machine: dict[str, str]) -> None:
    reading, _ = read(CONFIGS / "team.yaml", machine)
    assert reading.config.hosts == ("0.0.0.0",)

    (Path(machine["HOME"]) / "keys").unlink()
    assert [issue.key for issue in environment_issues(reading, machine)] == ["auth.api_key_file"]
