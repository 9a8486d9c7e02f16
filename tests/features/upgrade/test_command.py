"""``llamasup upgrade``: its requests, and what it prints."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.cli import target as chosen
from llamasup.core.control.client import ControlAddress
from llamasup.errors import BuildRefused, LlamasupError
from llamasup.features.upgrade import command
from tests.core.control.fake import FakeControlTarget, served

ANY_LLAMASUP: Mapping[str, Any] = {"pid": None, "url": None, "api_key_file": None}
OLD, NEW = {"path": "/old/llama-server", "version": "b1"}, {"path": "/new/llama-server", "version": ""}
NO_PROOF = {"requests": 0, "speed": None, "text": None, "memory_bytes": None}
CHANGED: Mapping[str, Any] = {
    "id": "tiny",
    "flags": [
        {"flag": "--metrics", "before": "", "after": None},
        {"flag": "--threads", "before": "4", "after": "8"},
        {"flag": "--jinja", "before": None, "after": ""},
    ],
    "needs_before": {"ram": 1 << 30, "CUDA0": 1 << 20},
    "needs_after": {"ram": 2 << 30, "CUDA0": 1 << 20},
    "problem": None,
}
SAME: Mapping[str, Any] = {"id": "bge", "flags": [], "needs_before": {}, "needs_after": {}, "problem": None}
WITHOUT: Mapping[str, Any] = {**SAME, "id": "qwen", "problem": {"message": "It has no --keep", "remedy": ""}}
REPORT: Mapping[str, Any] = {
    "state": "none",
    "runtime": NEW,
    "before": OLD,
    "model": None,
    "reason": "",
    "remedy": "",
    "proof": NO_PROOF,
    "models": [CHANGED, SAME, WITHOUT],
}


class Upgraded(FakeControlTarget):
    """With this answer to all questions about upgrades."""

    def __init__(self, report: Mapping[str, Any], error: LlamasupError | None = None) -> None:
        super().__init__()
        self.report = report
        self.error = error

    def upgrade_status(self) -> Mapping[str, Any]:
        return self.report

    async def upgrade(self, runtime: str, *, dry_run: bool = False) -> Mapping[str, Any]:
        await super().upgrade(runtime, dry_run=dry_run)
        return self.report


@pytest.fixture
def upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(fake: FakeControlTarget, **options: Any) -> int:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))

        async def main() -> int:
            async with served(fake, folder) as (_, path):
                monkeypatch.setattr(chosen, "find_target", lambda **_: ControlAddress(socket=path))
                call = {"runtime": None, "dry_run": False, "json": False, **ANY_LLAMASUP, **options}
                return int(await asyncio.to_thread(lambda: command.upgrade(None, **call)))

        return asyncio.run(main())

    return run


Captured = pytest.CaptureFixture[str]


def test_dry_run_shows_what_would_change(upgrade: Any, capfd: Captured) -> None:
    fake = Upgraded(REPORT)
    assert upgrade(fake, runtime="/new/llama-server", dry_run=True) == BuildRefused.exit_code == 69
    assert fake.requests == [("preview", "/new/llama-server")]
    printed = capfd.readouterr()
    assert "'qwen' has no plan with it" in printed.err
    assert printed.out.splitlines() == [
        "from   /old/llama-server (b1)",
        "to     /new/llama-server",
        "tiny: its flags change",
        "  - --metrics",
        "  --threads 8 instead of 4",
        "  + --jinja",
        "  ram: 1.0 GiB before, 2.0 GiB after",
        "bge: no change of its flags",
        "qwen: It has no --keep",
    ]


def test_upgrade_says_that_the_next_start_needs_the_build(upgrade: Any, capfd: Captured) -> None:
    proof = {**REPORT["proof"], "requests": 100}
    fake = Upgraded({**REPORT, "state": "watching", "reason": "it has answered 100 requests", "proof": proof})
    assert upgrade(fake, runtime="/new/llama-server") == 0
    assert fake.requests == [("upgrade", "/new/llama-server")]
    printed = capfd.readouterr().err
    assert "All models run the build /new/llama-server" in printed
    assert "Proven: it has answered 100 requests" in printed
    assert "write it into the config" in printed


def test_build_without_a_proof_is_said_to_be_unproven(upgrade: Any, capfd: Captured) -> None:
    why = "without a proof, because the old build is gone"
    fake = Upgraded({**REPORT, "state": "kept", "before": None, "reason": why})
    assert upgrade(fake, runtime="/new/llama-server") == 0
    assert f"Not proven: {why}" in capfd.readouterr().err
    assert upgrade(fake) == 0
    assert capfd.readouterr().out.startswith("to     /new/llama-server")


@pytest.mark.parametrize("dry_run", [True, False])
def test_answer_as_json(upgrade: Any, capfd: Captured, dry_run: bool) -> None:
    report = {**REPORT, "models": [CHANGED, SAME]}
    assert upgrade(Upgraded(report), runtime="/new/llama-server", dry_run=dry_run, json=True) == 0
    assert json.loads(capfd.readouterr().out) == report


def test_report_of_a_build_that_would_be_refused_is_printed_as_json(upgrade: Any, capfd: Captured) -> None:
    assert upgrade(Upgraded(REPORT), runtime="/new/llama-server", dry_run=True, json=True) == 69
    assert json.loads(capfd.readouterr().out) == REPORT


def test_refused_build_is_an_error(upgrade: Any, capfd: Captured) -> None:
    error = BuildRefused("The build is refused: it is slow.", remedy="Use another build.")
    assert upgrade(Upgraded(REPORT, error), runtime="/new/llama-server") == BuildRefused.exit_code == 69
    assert "it is slow" in capfd.readouterr().err


def test_last_upgrade_is_shown_without_a_build(upgrade: Any, capfd: Captured) -> None:
    proof = {"requests": 100, "speed": 0.98, "text": 1.0, "memory_bytes": 5}
    report = {
        **REPORT,
        "state": "kept",
        "model": "tiny",
        "proof": proof,
        "reason": "all is well",
        "models": [],
    }
    assert upgrade(Upgraded(report)) == 0
    assert capfd.readouterr().out.splitlines()[2:] == [
        "state  all models run the build",
        "proof  tiny: 100 requests, 98% of the speed, 100% of the text",
        "why    all is well",
    ]
    assert upgrade(Upgraded({**report, "proof": {**NO_PROOF, "requests": 1}})) == 0
    assert "proof  tiny: 1 request" in capfd.readouterr().out.splitlines()
    assert upgrade(Upgraded({**REPORT, "runtime": None}), json=False) == 0
    assert capfd.readouterr().out == "There was no upgrade since llamasup started.\n"


def test_dry_run_needs_a_build(upgrade: Any, capfd: Captured) -> None:
    assert upgrade(FakeControlTarget(), dry_run=True) == 2
    assert "--dry-run needs a build" in capfd.readouterr().err


def test_path_of_the_build_is_that_of_this_folder(
    upgrade: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llamasup may run in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-server").touch()
    for runtime, sent in (
        ("llama-server", str(tmp_path / "llama-server")),
        ("./new/llama-server", str(tmp_path / "new/llama-server")),
        ("embedded", "embedded"),
    ):
        fake = Upgraded({**REPORT, "state": "watching"})
        assert upgrade(fake, runtime=runtime) == 0
        assert fake.requests == [("upgrade", sent)]
