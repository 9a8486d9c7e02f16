"""examples/electron, run by Node with a double of Electron: a download of Electron itself needs GitHub."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.children import NewChildren
from tests.e2e.driver import await_removed, seconds_until_gone
from tests.e2e.test_sidecar_examples import assert_nothing_left, run
from tests.paths import ROOT
from tests.patience import PATIENCE_S, eventually

EXAMPLE = ROOT / "examples" / "electron"

ELECTRON = """
import { EventEmitter } from "node:events";
const handlers = {};
class App extends EventEmitter {
  isPackaged = false;
  whenReady = async () => {};
  quit() {
    let isPrevented = false;
    this.emit("before-quit", { preventDefault: () => (isPrevented = true) });
    if (!isPrevented) process.exit();
  }
}
export const app = new App();
export const dialog = { showErrorBox: (title, text) => console.error(`${title}: ${text}`) };
export const ipcMain = { handle: (name, handler) => (handlers[name] = handler) };
export class BrowserWindow {
  async loadFile(name) {
    if (process.env.ASK === undefined) return;
    const texts = [];
    const event = { sender: { send: (_channel, text) => texts.push(text) } };
    await handlers.chat(event, [{ role: "user", content: process.env.ASK }]);
    console.log(JSON.stringify({ name, texts }));
    app.emit("window-all-closed");
  }
}
"""
"""As much of Electron as the main process uses. Its window asks once, and closes."""


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of the example's main process."""
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "electron-example"))
    module = folder / "node_modules" / "electron"
    module.mkdir(parents=True)
    (module / "package.json").write_text('{"type": "module", "exports": "./index.js"}')
    (module / "index.js").write_text(ELECTRON)
    monkeypatch.setenv("LLAMASUP", shlex.join([sys.executable, "-m", "llamasup"]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    main = json.loads((folder / "package.json").read_text())["main"]
    return ["node", str(folder / main)]


@pytest.mark.real
def test_application_shows_the_answer_and_ends_with_everything(
    runtime: str,
    application: list[str],
    tiny_model: Path,
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_children: NewChildren,
) -> None:
    for name, value in {"RUNTIME": runtime, "MODEL": str(tiny_model)}.items():
        monkeypatch.setenv(f"LLAMASUP_{name}", value)
    monkeypatch.setenv("ASK", "Once upon a time")
    done = run(application)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["name"] == "index.html"
    assert len(shown["texts"]) > 1
    assert_nothing_left(own_folders, new_children)


def test_application_says_that_the_model_could_not_be_started(
    application: list[str],
    tmp_path: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.setenv("LLAMASUP_MODEL", str(tmp_path / "no-such.gguf"))
    done = run(application)
    assert done.returncode == 0, done.stderr
    assert "no-such.gguf" in done.stderr
    assert "The model could not be started: llamasup ended with 66" in done.stderr


def test_everything_ends_with_an_application_that_is_killed(
    application: list[str],
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))
    with subprocess.Popen(application, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as parent:
        try:
            folders = own_folders / "run" / "llamasup"
            eventually(lambda: folders.exists() and any(folders.glob("*/control.sock")))
            family = psutil.Process(parent.pid).children(recursive=True)
            (folder,) = folders.iterdir()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        seconds_until_gone(family)
        await_removed(folder)


def test_scripts_of_the_page_can_be_parsed(application: list[str]) -> None:
    for path in (Path(application[1]).with_name(name) for name in ("preload.cjs", "page.js")):
        subprocess.run(["node", "--check", str(path)], check=True, timeout=PATIENCE_S)


def test_example_is_in_the_docs_and_packages_the_bundle() -> None:
    assert "examples/electron" in (ROOT / "docs" / "sidecar.md").read_text("utf-8")
    package = json.loads((EXAMPLE / "package.json").read_text("utf-8"))
    (resource,) = package["build"]["extraResources"]
    assert (EXAMPLE / resource["from"]).resolve() == ROOT / "dist" / "llamasup"
    assert resource["to"] == "llamasup"  # as main.mjs looks for it
