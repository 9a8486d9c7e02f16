"""A command does the same in a fork of the warm process as in a new interpreter (tests/e2e/forked.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.driver import PATIENCE_S, command
from tests.e2e.forked import forked_to_end


@pytest.mark.parametrize(
    "line",
    [
        *("", "no-such-command", "run missing.gguf", "serve --config bad.yaml", "wrap -- no-such-server"),
        *("list . --json", "pull nothing", "rm org/none --yes", "plan tiny.gguf --runtime missing"),
        *("config init --output -", "config check bad.yaml --json", "config schema"),
        *("key list --file none", "service print demo --port 70000", "ps --json", "doctor --port 70000"),
    ],
)
def test_forked_command_behaves_like_a_new_interpreter(
    line: str,
    tiny_model: Path,
    tmp_path: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.delenv("LLAMASUP_CONFIG", raising=False)
    (tmp_path / "tiny.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "bad.yaml").write_text("modles: {}\nlisten: 1\n")

    forked = forked_to_end(*line.split(), cwd=tmp_path)
    new = subprocess.run(
        command(*line.split()),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )

    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
    assert "Traceback" not in new.stderr
