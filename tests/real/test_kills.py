"""S14 with a real llama-server: after a kill of any process, nothing is left."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import Llamasup, adopted, await_removed, command, llamasup, seconds_until_gone


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """A client in the middle of a long stream."""
    body = {"prompt": "Once", "n_predict": 100_000, "stream": True, "ignore_eos": True}
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/completion", json=body) as answer:
        next(answer.iter_raw())
        yield


def only_folder(home: Path) -> Path:
    (folder,) = (home / "run" / "llamasup").iterdir()
    return folder


@pytest.mark.contract
@pytest.mark.parametrize("when", ["idle", "streaming"])
def test_server_ends_when_llamasup_is_killed(
    when: str, runtime: str, tiny_model: Path, own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", runtime) as running:
        url = running.url
        children = running.children()
        folder = only_folder(own_folders)
        if when == "streaming":
            with streaming(url):
                running.send_signal(signal.SIGKILL)
        else:
            running.send_signal(signal.SIGKILL)
        took_s = seconds_until_gone(children)
        running.end()
        await_removed(folder)
    print(f"{when}: gone after {took_s:.3f} s")


def test_server_behind_a_script_ends_when_llamasup_is_killed(
    llama_server: str, tiny_model: Path, own_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's signal reaches only the script, so the guardian has to end the server."""
    wrapper = tmp_path / "llama-server"
    wrapper.write_text(f'#!/bin/sh\n{shlex.quote(llama_server)} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(llama_server).parent))
    with llamasup(tiny_model, "--runtime", str(wrapper)) as running:
        running.wait_for("ready")
        children = running.children()
        assert len(children) == 2
        folder = only_folder(own_folders)
        running.send_signal(signal.SIGKILL)
        took_s = seconds_until_gone(children)
        running.end()
        await_removed(folder)
    print(f"behind a script: gone after {took_s:.3f} s")


@pytest.mark.parametrize("how", ["stdin", "pid"])
@pytest.mark.parametrize("when", ["idle", "streaming"])
def test_llamasup_and_its_server_end_when_the_parent_is_killed(
    how: str, when: str, runtime: str, tiny_model: Path, own_folders: Path
) -> None:
    parent = (
        "import os,subprocess,sys\n"
        "argv = [word.replace('PARENT', str(os.getpid())) for word in sys.argv[1:]]\n"
        f"subprocess.Popen(argv, stdin=subprocess.{'PIPE' if how == 'stdin' else 'DEVNULL'}).wait()\n"
    )
    tie = ["--sidecar"] if how == "stdin" else ["--port", "0", "--events", "jsonl", "--parent-pid", "PARENT"]
    process = subprocess.Popen(
        [sys.executable, "-c", parent, *command("run", str(tiny_model), "--runtime", runtime, *tie)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with adopted(process) as running:
        url = running.url
        family = running.children()
        if when == "streaming":
            with streaming(url):
                took_s = _kill(running, family)
        else:
            took_s = _kill(running, family)
        running.end()
        assert list((own_folders / "run" / "llamasup").iterdir()) == []
    print(f"{how}, {when}: gone after {took_s:.3f} s")


def _kill(running: Llamasup, family: list[psutil.Process]) -> float:
    running.send_signal(signal.SIGKILL)
    return seconds_until_gone(family)


@pytest.mark.contract
def test_client_of_a_killed_server_gets_cause_and_remedy(runtime: str, tiny_model: Path) -> None:
    body = {"prompt": "Once", "n_predict": 10_000_000, "stream": True, "ignore_eos": True}
    with (
        llamasup(tiny_model, "--runtime", runtime, "--", "--context-shift") as running,
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{running.url}/completion", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        for server in running.children():
            server.kill()
        rest: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):  # the stream has no last chunk
            rest.extend(lines)
            pytest.fail("the stream is complete")
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["cause"] == "killed"
        assert "SIGKILL" in error["message"]
