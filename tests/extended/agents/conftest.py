"""A llamasup with a model for each program, which plays the script of this program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from tests.e2e.driver import Llamasup, run_to_end, started
from tests.extended.agents.install import bin_folder
from tests.extended.agents.programs import DONE, NOTES, OPEN_WEBUI, PROGRAMS, TASK, Program
from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.scripted import Call, scripted
from tests.real.remains import folders_of, processes_of

CLIENTS = Path(os.environ.get("LLAMASUP_CLIENTS", ROOT / ".build" / "clients"))
RESULTS = CLIENTS / "results"
"""What each program did, for the table of docs/agents.md."""
SMALL = 2048
"""Tokens of a context in which no agent's first prompt fits."""
ENDLESS = 200_000
_NO_PROXY = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ")


class Served(Struct, frozen=True):
    running: Llamasup
    url: str
    home: Path

    def requests(self, model: str) -> list[dict[str, Any]]:
        """Return the finished requests to a model from the access log."""
        lines = (self.home / "access.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["model"] == model]

    def is_generating(self, model: str) -> bool:
        answer = httpx.get(f"{self.url}/slots", params={"model": model}, timeout=PATIENCE_S)
        return answer.is_success and any(slot["is_processing"] for slot in answer.json())  # once it is loaded


class Finished(Struct, frozen=True):
    exit_code: int
    output: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a").resolve()  # short: sockets lie below it


@pytest.fixture(scope="module")
def served(home: Path, llama_server: str) -> Iterator[Served]:
    config: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "http": {"access_log": str(home / "access.jsonl")},
        "runtime": llama_server,
        "defaults": {"ctx_size": 98_304, "parallel": 1},
        "models": {"small": {"ctx_size": SMALL}, "endless": {}},
    }
    files = {"small": scripted([], DONE), "endless": scripted([], DONE, endless=True)}
    for program in (*PROGRAMS, OPEN_WEBUI):
        (home / program.name).mkdir()
        config["models"][program.name] = {}
        calls = calls_of(program, home / program.name)
        files[program.name] = scripted(calls, program.text, is_strict=True)
    for name, content in files.items():
        path = home / f"{name}.gguf"
        path.write_bytes(content)
        config["models"][name]["path"] = str(path)
    (home / "config.yaml").write_text(json.dumps(config))  # which is YAML
    env = {**os.environ, **folders_of(home)}
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        running.wait_for("ready")
        yield Served(running, running.url, home)
        assert running.stop() == 0


def calls_of(program: Program, folder: Path) -> list[Call]:
    """Return the calls of the script, with the paths of ``folder``."""
    text = json.dumps([call.arguments for call in program.calls]).replace("{folder}", str(folder))
    arguments = json.loads(text)
    return [Call(call.name, given) for call, given in zip(program.calls, arguments, strict=True)]


Run = Callable[..., Finished]


@pytest.fixture
def run(served: Served, tmp_path: Path) -> Iterator[Run]:
    """Run a program with a home of its own, in which ``llamasup connect`` has set it up.

    Cline leaves a process behind.
    """

    def run(
        program: Program, model: str, *, url: str = "", until: Callable[[], object] | None = None
    ) -> Finished:
        folder, user = served.home / program.name, tmp_path / "home"
        user.mkdir()
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").write_text(NOTES)
        bins = bin_folder(CLIENTS, program)
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env |= {"HOME": str(user), "TMPDIR": str(tmp_path), **_NO_PROXY}
        env["PATH"] = f"{bins}{os.pathsep}{env['PATH']}"
        to = url or served.url
        env |= connect(program, model, to, {**os.environ, **env, **folders_of(served.home)})
        env |= {name: value.format(home=user) for name, value in program.environment.items()}
        words = {"folder": folder, "model": model, "task": TASK, "url": to, "here": Path(__file__).parent}

        def finish(command: tuple[str, ...], until: Callable[[], object] | None = None) -> Finished:
            filled = [word.format(**words) for word in command]
            return _finish(filled, env, folder, tmp_path / "out", until)

        if program.setup:
            done = finish(program.setup)
            assert done.exit_code == 0, done.output
        return finish(program.command, until)

    yield run
    for pid in processes_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def connect(program: Program, model: str, url: str, env: Mapping[str, str]) -> dict[str, str]:
    """Write the settings of the program. Returns the variables that it needs."""
    words = ("connect", program.client, "--model", model, "--url", url, "--json")
    shown = run_to_end(*words, env=env)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    if found["file"] is not None:
        written = run_to_end(*words, "--write", env=env)
        assert written.returncode == 0, written.stderr
    environment: dict[str, str] = found["environment"]
    return environment


def _finish(
    words: list[str], env: dict[str, str], folder: Path, output: Path, until: Callable[[], object] | None
) -> Finished:
    """Run to the end; or, with ``until``, until it holds and Ctrl-C has ended the program."""
    words[0] = next(
        str(path) for each in env["PATH"].split(os.pathsep) if (path := Path(each, words[0])).exists()
    )
    with output.open("wb") as file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, **streams)
        try:
            if until is not None:
                eventually(lambda: until() or process.poll() is not None, "the request of the program")
                assert process.poll() is None, output.read_text(errors="replace")
                os.killpg(process.pid, signal.SIGINT)
            process.wait(3 * PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Finished(process.returncode, output.read_text(errors="replace"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep what a program did, or why it failed, for the table of the docs."""
    report = yield
    callspec = getattr(item, "callspec", None)
    if callspec is not None and call.when == "call" and "program" in callspec.params:
        RESULTS.mkdir(parents=True, exist_ok=True)
        kept = {"passed": report.passed, **dict(item.user_properties)}
        if report.failed and call.excinfo is not None:
            kept["reason"] = str(call.excinfo.value).splitlines()[0]
        name = f"{callspec.params['program'].name}.{item.function.__name__}.json"  # type: ignore[attr-defined]
        (RESULTS / name).write_text(json.dumps(kept))
    return report
