"""A bundle without Python that was made under Wine. Skipped without one: to make it takes minutes there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.extended.windows.test_sidecar import KILLS, kill_parents
from tests.extended.windows.wine import Windows, complete, eventually, windows_path
from tests.kit.hub import running_hub
from tests.kit.tiny import tiny_decoder


@pytest.fixture
def llamasup() -> str:
    given = os.environ.get("LLAMASUP_WINDOWS_BUNDLE")
    if not given:
        pytest.skip("set LLAMASUP_WINDOWS_BUNDLE to the llamasup.exe of a bundle (CONTRIBUTING.md)")
    return windows_path(Path(given))


def test_bundle_serves_and_leaves_nothing(windows: Windows, llamasup: str) -> None:
    version = windows.program(llamasup, "--version", stdin="NUL")
    assert version.wait() == 0, version.errors
    run = windows.program(llamasup, "run", "demo", "--sidecar")
    ready = run.event("ready")
    assert complete(ready["url"])["content"]
    (child,) = windows.session.ask("servers", run.pid)
    windows.session.ask("terminate", child)
    assert run.event("exit")["cause"]
    assert complete(ready["url"])["content"]
    shown = windows.program(llamasup, "ps", "--json", stdin="NUL")
    assert '"demo"' in shown.output(), shown.errors
    run.close_stdin()
    assert run.wait() == 0, run.errors
    assert windows.processes() == []
    assert windows.left() == []


def test_terminated_bundle_leaves_nothing(windows: Windows, llamasup: str, tiny_model: Path) -> None:
    ready_file = windows.folder / "ready.json"
    run = windows.program(
        llamasup, "run", windows_path(tiny_model), "--sidecar", "--ready-file", windows_path(ready_file)
    )
    run.event("ready")
    run.terminate()
    run.wait()
    eventually(lambda: windows.processes() == [])
    eventually(lambda: windows.left() == [])


def test_kills_of_the_parent_leave_nothing(windows: Windows, llamasup: str, tiny_model: Path) -> None:
    kill_parents(windows, tiny_model, KILLS, llamasup)


def test_bundle_pulls_a_model(windows: Windows, llamasup: str) -> None:
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_decoder()}
        local = ("--endpoint", hub.url, "--allow-private", "--allow-http")
        folder = windows_path(windows.folder / "models")
        pull = windows.program(llamasup, "pull", "org/tiny-GGUF", "--folder", folder, *local, stdin="NUL")
        assert pull.wait() == 0, pull.errors
    (file,) = (windows.folder / "models").rglob("*.gguf")
    assert file.read_bytes() == tiny_decoder()
