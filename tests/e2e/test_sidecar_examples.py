"""The examples of docs/sidecar.md, run as they stand."""

from __future__ import annotations

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

from tests.e2e.driver import PATIENCE_S, await_removed, seconds_until_gone
from tests.kit.children import NewChildren
from tests.kit.paths import ROOT
from tests.kit.patience import eventually

EXAMPLES = ROOT / "examples" / "sidecar"
INTERPRETERS = {"parent.py": sys.executable, "parent.mjs": "node", "parent.sh": "sh"}
NEEDS = {"parent.mjs": ("node",), "parent.sh": ("curl",)}

examples = pytest.mark.parametrize("name", INTERPRETERS)


@pytest.fixture(autouse=True)
def use_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP", str(program))
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for a server on this machine


def example(name: str, model: Path) -> list[str]:
    for program in NEEDS.get(name, ()):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing")
    return [INTERPRETERS[name], str(EXAMPLES / name), str(model)]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, stdin=subprocess.DEVNULL
    )


def assert_nothing_left(home: Path, new_children: NewChildren) -> None:
    assert new_children() == []
    assert list((home / "run" / "llamasup").iterdir()) == []


def test_every_example_is_tested_and_in_the_docs() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == set(INTERPRETERS)
    docs = (ROOT / "docs" / "sidecar.md").read_text("utf-8")
    for name in INTERPRETERS:
        assert f"examples/sidecar/{name}" in docs


@examples
def test_example_sends_a_request_and_leaves_nothing_behind(
    name: str,
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_children: NewChildren,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    done = run(example(name, tiny_model))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "stopped" in done.stderr
    assert_nothing_left(own_folders, new_children)


@examples
def test_example_gets_an_answer_of_a_real_server(
    name: str,
    runtime: str,
    tiny_model: Path,
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_children: NewChildren,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", runtime)
    done = run(example(name, tiny_model))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 5
    assert_nothing_left(own_folders, new_children)


@examples
def test_example_reports_that_llamasup_could_not_start(
    name: str, tmp_path: Path, fake_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    done = run(example(name, tmp_path / "no-such.gguf"))
    assert done.returncode != 0
    assert "no-such.gguf" in done.stderr
    assert "llamasup ended" in done.stderr


@pytest.mark.parametrize("name", ["parent.py", "parent.mjs"])
def test_example_skips_lines_that_are_no_events(
    name: str,
    program: Path,
    tiny_model: Path,
    fake_server: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talkative = tmp_path / "talkative"
    lines = r"hello\n5\n{}\n\377\n"
    talkative.write_text(f"#!/bin/sh\nprintf '{lines}'\nexec {shlex.quote(str(program))} \"$@\"\n")
    talkative.chmod(0o755)
    monkeypatch.setenv("LLAMASUP", str(talkative))
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    done = run(example(name, tiny_model))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@examples
def test_everything_ends_when_an_example_is_killed(
    name: str,
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server("load_s=60"))
    with subprocess.Popen(
        example(name, tiny_model), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as parent:
        try:
            family = await_server(parent)
            (folder,) = (own_folders / "run" / "llamasup").iterdir()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        seconds_until_gone(family)
        await_removed(folder)


def await_server(parent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The descendants of ``parent`` once a llama-server is one of them."""
    family: list[psutil.Process] = []

    def is_there() -> bool:
        assert parent.poll() is None
        family[:] = psutil.Process(parent.pid).children(recursive=True)
        return any(map(_serves, family))

    eventually(is_there, "a llama-server")
    return family


def _serves(process: psutil.Process) -> bool:
    """Whether the process serves a model, and is not a probe of the capabilities."""
    try:
        return "--model" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
