"""examples/electron, run by Node with a double of Electron: a download of Electron itself needs GitHub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.driver import await_guardian, await_removed, seconds_until_gone
from tests.e2e.test_sidecar_examples import assert_nothing_left, await_server, run
from tests.kit.children import NewChildren, end_all
from tests.kit.paths import ROOT

EXAMPLE = ROOT / "examples" / "electron"
DOUBLE = Path(__file__).with_name("electron_double.mjs")
OF_PRELOAD = "module.exports = globalThis.electronOfPreload;"


@pytest.fixture
def application(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of the example's main process."""
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "electron-example"))
    module = folder / "node_modules" / "electron"
    module.mkdir(parents=True)
    exports = {"import": "./index.mjs", "require": "./preload.cjs"}
    (module / "package.json").write_text(json.dumps({"exports": exports}))
    shutil.copy(DOUBLE, module / "index.mjs")
    (module / "preload.cjs").write_text(OF_PRELOAD)
    monkeypatch.setenv("LLAMASUP", str(program))
    monkeypatch.chdir(folder)
    return ["node", json.loads((folder / "package.json").read_text())["main"]]


@pytest.fixture
def real_model(runtime: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", runtime)
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))


@pytest.mark.usefixtures("real_model")
def test_page_shows_answers_and_the_application_ends_with_everything(
    application: list[str], own_folders: Path, monkeypatch: pytest.MonkeyPatch, new_children: NewChildren
) -> None:
    monkeypatch.setenv("ASK", json.dumps(["Once upon a time", "And then?"]))
    done = run(application)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    window = json.loads(done.stdout.removeprefix("text\n"))
    first, second = window["shown"].removeprefix("\n> Once upon a time\n").split("\n> And then?\n")
    assert first
    assert second
    assert window["pieces"] > 10
    assert window["isClosed"]  # to other pages
    assert_nothing_left(own_folders, new_children)


def test_everything_ends_with_an_application_that_is_killed_within_an_answer(
    application: list[str],
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer never ends, so it cannot close by itself before."""
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server("stall_after=2"))
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))
    monkeypatch.setenv("ASK", json.dumps(["Once upon a time"]))
    with subprocess.Popen(
        application, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"text\n"
            family = psutil.Process(parent.pid).children(recursive=True)
            assert len(family) >= 2  # llamasup and llama-server
            (folder,) = (own_folders / "run" / "llamasup").iterdir()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        seconds_until_gone(family)
        await_removed(folder)


def test_everything_ends_with_an_application_that_is_killed_while_the_model_loads(
    application: list[str],
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server("load_s=60"))
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))
    with subprocess.Popen(application, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as parent:
        try:
            family = await_server(parent)
            (folder,) = (own_folders / "run" / "llamasup").iterdir()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        seconds_until_gone(family)
        await_removed(folder)


def test_user_sees_why_the_model_could_not_be_started(
    application: list[str], tmp_path: Path, fake_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.setenv("LLAMASUP_MODEL", str(tmp_path / "no-such.gguf"))
    done = run(application)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("The model is not available: llamasup ended with 66\n")
    assert "no-such.gguf" in done.stderr


def test_user_sees_that_llamasup_was_killed(
    application: list[str],
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(application, stdin=subprocess.DEVNULL, stderr=errors)
    try:
        await_server(process)
        await_guardian(next((own_folders / "run" / "llamasup").iterdir()))
        psutil.Process(process.pid).children()[0].kill()
        assert process.wait() == 0
    finally:
        end_all(process)
    said = (tmp_path / "errors").read_text()
    assert said.startswith("The model is not available: llamasup ended with SIGKILL\n")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo hello; printf \'{"event":"sta\'; exit 3', "llamasup ended with 3"),
        ("kill -KILL $$", "llamasup ended with SIGKILL"),
    ],
)
def test_application_ends_with_a_program_whose_lines_are_no_events(
    script: str, reason: str, application: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("LLAMASUP", str(program))
    done = run(application)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"The model is not available: {reason}\n\n"


@pytest.mark.parametrize("program", ["", "/no/such/program"])
def test_user_sees_that_the_program_cannot_be_started(
    program: str, application: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASUP", program)
    done = run(application)
    assert done.returncode == 0, done.stderr
    assert "could not be started" in done.stderr


def test_conversation_goes_on_after_an_answer_that_failed(application: list[str], tmp_path: Path) -> None:
    """Templates that demand turns would refuse two questions in a row."""
    script = """
import { readFileSync } from "node:fs";
import { setImmediate } from "node:timers/promises";
import { runInThisContext } from "node:vm";
const elements = {}, seen = [];
globalThis.document = {
  getElementById: (id) => (elements[id] ??= Object.assign(new EventTarget(), { textContent: "", value: "" })),
};
let show;
globalThis.model = {
  onText: (listener) => (show = listener),
  chat: async (messages) => {
    seen.push({ roles: messages.map(({ role }) => role), isDisabled: elements.ask.disabled });
    if (seen.length === 1) throw new Error("no answer");
    show("text");
  },
};
runInThisContext(readFileSync("page.js", "utf8"));
for (let i = 0; i < 3; i++) {
  elements.form.dispatchEvent(new Event("submit"));
  while (elements.ask.disabled) await setImmediate();
}
console.log(JSON.stringify(seen));
"""
    path = tmp_path / "page-test.mjs"
    path.write_text(script)
    done = run(["node", str(path)])
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [each["roles"] for each in seen] == [["user"], ["user"], ["user", "assistant", "user"]]
    assert all(each["isDisabled"] for each in seen)


def test_example_is_in_the_docs_and_packages_the_bundle() -> None:
    assert "examples/electron" in (ROOT / "docs" / "sidecar.md").read_text("utf-8")
    package = json.loads((EXAMPLE / "package.json").read_text("utf-8"))
    (resource,) = package["build"]["extraResources"]
    assert (EXAMPLE / resource["from"]).resolve() == ROOT / "dist" / "llamasup"
    assert resource["to"] == "llamasup"  # as main.mjs looks for it
