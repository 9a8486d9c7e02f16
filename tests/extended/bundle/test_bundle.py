"""The bundle without Python serves, downloads, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import httpx
import psutil
import pytest

from tests.e2e.driver import adopted
from tests.e2e.terminal import PROMPT, Terminal
from tests.extended.bundle.program import Program
from tests.kit.hub import running_hub
from tests.kit.patience import PATIENCE_S
from tests.kit.tiny import tiny_decoder

KILLS = int(os.environ.get("LLAMASUP_BUNDLE_KILLS", "12"))
AT_A_TIME = 3


def answer_of(url: str) -> str:
    asked = {"prompt": "Once", "n_predict": 4}
    answer = httpx.post(f"{url}/completion", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_predicted"] == 4
    return answer.text


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """A client in the middle of a long stream."""
    body = {"prompt": "Once", "n_predict": 100_000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_raw())
        yield


def server_of(pid: int) -> psutil.Process:
    (server,) = psutil.Process(pid).children()
    return server


# --- serving -----------------------------------------------------------------------------------------


def test_bundle_serves_and_stops(bundle: Program, runtime: str, tiny_model: Path) -> None:
    with bundle.started("run", str(tiny_model), "--port", "0", "--runtime", runtime) as running:
        answer_of(running.url)
        shown = bundle.run("ps", "--json")
        assert [model["state"] for model in json.loads(shown.stdout)["models"]] == ["ready"]
        assert "<title>" in httpx.get(f"{running.url}/llamasup/", timeout=PATIENCE_S).text
        assert running.stop() == 0, running.stderr_text
    bundle.await_nothing_left()


def test_llama_server_gets_the_environment_of_the_user(
    bundle: Program, llama_server: str, tiny_model: Path
) -> None:
    """Not that of PyInstaller's start program: it would load the libraries of the bundle."""
    arguments = ("--port", "0", "--runtime", llama_server)
    with bundle.started("run", str(tiny_model), *arguments) as running:
        running.wait_for("ready")
        environ = server_of(running.pid).environ()
        assert running.stop() == 0, running.stderr_text
    assert environ["LD_LIBRARY_PATH"].split(":")[-1] == "/opt/of-the-user"
    assert str(bundle.folder) not in environ["LD_LIBRARY_PATH"]
    added = [name for name in environ if name.startswith(("_PYI", "LC_")) or name.endswith("_ORIG")]
    assert added == []


@pytest.mark.one_runtime
def test_model_that_a_request_names_is_downloaded(bundle: Program, runtime: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_decoder()}
        config.write_text(
            f"listen: 127.0.0.1:0\nruntime: {runtime}\nmodels: {{tiny: {{repo: org/tiny-GGUF}}}}\n"
            f"downloads: {{endpoint: '{hub.url}', private_addresses: true}}\n"
        )
        with bundle.started("serve", "--config", str(config)) as running:
            asked = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
            answer = httpx.post(f"{running.url}/v1/completions", json=asked, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert running.stop() == 0, running.stderr_text
    bundle.await_nothing_left()


def test_bundle_pulls_a_model(bundle: Program, tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_decoder()}
        local = ("--endpoint", hub.url, "--allow-private", "--allow-http")
        done = bundle.run("pull", "org/tiny-GGUF", "--folder", str(tmp_path), *local)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("*.gguf")
    assert file.read_bytes() == tiny_decoder()


@pytest.mark.one_runtime
def test_batch_starts_a_llamasup_from_the_bundle(
    bundle: Program, runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    asked.write_text(json.dumps(line) + "\n")
    done = bundle.run(
        *("batch", "run", str(asked), "-o", str(answers), "--model", str(tiny_model)),
        *("--", "--runtime", runtime),
    )
    assert done.returncode == 0, done.stderr
    assert len(answers.read_text().splitlines()) == 1
    bundle.await_nothing_left()


# --- kills -------------------------------------------------------------------------------------------


def test_kill_of_the_bundle_leaves_nothing(
    bundle: Program, runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    arguments = ("--port", "0", "--runtime", runtime, "--ready-file", str(ready_file))
    with bundle.started("run", str(tiny_model), *arguments) as running, streaming(running.url):
        assert ready_file.exists()
        running.send_signal(signal.SIGKILL)
        running.end()
        bundle.await_nothing_left()
        assert not ready_file.exists()


PARENT = """
import os, subprocess, sys
*command, how = sys.argv[1:]
if how == "stdin":
    command.append("--sidecar")
else:
    command += ["--port", "0", "--events", "jsonl", "--parent-pid", str(os.getpid())]
subprocess.Popen(command, stdin=subprocess.PIPE if how == "stdin" else subprocess.DEVNULL).wait()
"""


@pytest.mark.one_runtime
def test_kills_of_the_parent_leave_no_process_and_no_file(
    bundle: Program, runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    """By the end of standard input or by --parent-pid; at the first event, or when the model is ready."""

    def kill(number: int) -> Path:
        ready_file = tmp_path / f"{number}.json"
        how, event = ("stdin", "pid")[number % 2], ("state", "ready")[number // 2 % 2]
        words = [
            str(bundle.path),
            "run",
            str(tiny_model),
            "--runtime",
            runtime,
            "--ready-file",
            str(ready_file),
        ]
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *words, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=bundle.environment,
        )
        with adopted(parent) as running:
            running.wait_for(event)
            parent.kill()
            running.end()  # its pipes end when llamasup, too, has ended
        return ready_file

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ready_files = list(pool.map(kill, range(KILLS)))
    bundle.await_nothing_left()
    assert [file for file in ready_files if file.exists()] == []


# --- what is inside ----------------------------------------------------------------------------------


def test_each_command_of_the_bundle_is_complete(bundle: Program) -> None:
    """A module that is missing shows when a command is imported."""
    names = (
        *("run", "serve", "rpc-worker", "wrap", "list", "pull", "rm", "plan", "tune", "inspect", "doctor"),
        *("why", "top", "ps", "status", "load", "unload", "restart", "reload", "stop", "logs", "connect"),
        *("chat", "launch", "usage", "batch", "ui", "service", "key", "config", "help"),
    )
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        done = list(pool.map(lambda name: bundle.run(name, "--help"), names))
    assert {run.args[1]: run.stderr for run in done if run.returncode != 0} == {}


def test_chat_starts_a_model_in_a_terminal(bundle: Program) -> None:
    terminal = Terminal([str(bundle.path), "chat", "demo"], env=bundle.environment)
    try:
        terminal.shows(PROMPT)
        terminal.press("Hello.\r")
        terminal.shows(r"\d+ tokens")
        terminal.shows(PROMPT)
        terminal.press("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()
    bundle.await_nothing_left()


def test_report_of_doctor_has_the_versions_of_the_packages(bundle: Program, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    bundle.run("doctor", "--port", "0", "--report", str(report))
    text = report.read_text()
    assert "uvicorn" in text
    assert "not installed" not in text


def test_service_starts_the_program_of_the_bundle(bundle: Program) -> None:
    done = bundle.run("service", "print", "demo", "--user", "--runtime", "embedded")
    assert done.returncode == 0, done.stderr
    (start,) = [line for line in done.stdout.splitlines() if line.startswith("ExecStart=")]
    assert start.split()[:2] == [f"ExecStart={bundle.path}", "run"]


def libraries_of_the_system(bundle: Program) -> set[str]:
    inside = bundle.folder / "_internal"
    return {file.name for file in inside.glob("lib*.so*") if not file.name.startswith("libpython")}


def test_all_that_is_inside_is_in_the_sbom_with_its_license(bundle: Program) -> None:
    sbom = json.loads((bundle.folder / "sbom.json").read_text())
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", "llamasup")
    listed = {component["name"]: component for component in sbom["components"]}
    assert {"Python", "pyinstaller", "llama.cpp", "xllamacpp", "uvloop"} <= listed.keys()
    inside = bundle.folder / "_internal"
    assert libraries_of_the_system(bundle) <= listed.keys()
    packages = {folder.name.partition("-")[0] for folder in inside.glob("*.dist-info")}
    assert {package.replace("_", "-").lower() for package in packages} <= {
        name.replace("_", "-").lower() for name in listed
    }
    texts = bundle.folder / "licenses"
    assert {path.name.partition("-")[0] for path in texts.iterdir()} >= {"preact", "htm", "uplot"}
    assert {"preact", "htm", "uplot"} <= listed.keys()
    for folder in texts.iterdir():
        files = [folder] if folder.is_file() else list(folder.iterdir())
        assert files, folder
        assert all(file.stat().st_size > 10 for file in files)
    assert len(list(texts.iterdir())) >= len(packages) + 2
    assert not list(inside.glob("tests"))


def test_each_library_of_the_system_has_its_license_and_what_that_refers_to(bundle: Program) -> None:
    texts = bundle.folder / "licenses"
    sbom = json.loads((bundle.folder / "sbom.json").read_text())
    listed = {entry["name"]: entry.get("purl", "") for entry in sbom["components"]}
    libraries = libraries_of_the_system(bundle)
    assert libraries
    for library in libraries:  # its text has the name of its package, if it has one
        package = unquote(listed[library].rpartition("/")[2].partition("@")[0]) or library
        assert (texts / f"{package}.txt").stat().st_size > 100, library
    for path in texts.glob("*.txt"):
        for reference in re.findall(r"/usr/share/common-licenses/([\w.+-]*\w)", path.read_text()):
            assert (texts / "common-licenses" / reference).stat().st_size > 100


def test_bundle_without_the_embedded_runtime_uses_the_llama_server_of_the_application(
    without_embedded: Program, llama_server: str, tiny_model: Path
) -> None:
    bundle = without_embedded
    listed = json.loads((bundle.folder / "sbom.json").read_text())["components"]
    assert {"xllamacpp", "llama.cpp"}.isdisjoint(component["name"] for component in listed)
    refused = bundle.run("run", str(tiny_model), "--port", "0", "--runtime", "embedded")
    assert refused.returncode == 69
    assert "which this application does not have" in refused.stderr
    with bundle.started("run", str(tiny_model), "--port", "0", "--runtime", llama_server) as running:
        answer_of(running.url)
        assert running.stop() == 0, running.stderr_text
    bundle.await_nothing_left()
