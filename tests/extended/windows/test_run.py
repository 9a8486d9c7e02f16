"""llamasup on Windows, with each of the two runtimes as a real llama.cpp server, under Wine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import httpx
import pytest

from tests.extended.windows.wine import PATIENCE_S, Windows, complete, eventually, get, windows_path
from tests.kit.hub import running_hub

EVENTS = ("--port", "0", "--events", "jsonl")


def test_a_run_serves_is_controlled_and_leaves_nothing(
    windows: Windows, tiny_model: Path, runtime: str
) -> None:
    model = windows.folder / "Meine Modelle" / "tïny model.gguf"
    model.parent.mkdir()
    shutil.copy(tiny_model, model)
    ready = windows.folder / "ready.json"
    options = ("--alias", "tiny", "--runtime", runtime, "--ready-file", ready, "--stop-timeout", "60")
    run = windows.start("run", model, *EVENTS, *options)
    url = run.event("ready")["url"]
    assert json.loads(ready.read_text())["url"] == url
    assert complete(url)["content"]
    asked = {"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 4}
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"]
        with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as stream:
            *chunks, last = [line for line in stream.iter_lines() if line]
    assert len(chunks) > 1
    assert last == "data: [DONE]"
    assert 'llamasup_requests_total{code="200",model="tiny"' in get(f"{url}/metrics").text

    (served,) = json.loads(windows.control("ps", "--json"))["models"]
    assert (served["id"], served["state"], served["restarts"]) == ("tiny", "ready", 0)
    windows.control("restart", "tiny")
    assert complete(url)["content"]
    assert len(windows.control("logs", "tiny", "--lines", "5").splitlines()) == 5
    windows.control("stop")
    assert run.event("stopped")
    assert run.wait() == 0
    assert windows.left() == []
    eventually(lambda: windows.processes() == [])
    (log,) = windows.folder.glob("**/logs/tiny.log")
    assert "cleaning up before exit" in log.read_text()  # Ctrl-C reached it, so it was not killed


def test_a_crashed_server_is_restarted_and_the_request_answered(
    windows: Windows, tiny_model: Path, runtime: str
) -> None:
    run = windows.start("run", tiny_model, *EVENTS, "--runtime", runtime)
    ready = run.event("ready")
    (child,) = windows.session.ask("servers", run.pid)
    windows.session.ask("terminate", child)
    assert run.event("exit")["cause"]
    assert complete(ready["url"])["content"]
    windows.control("stop")
    assert run.wait() == 0


@pytest.mark.one_runtime
def test_the_end_of_standard_input_stops_a_sidecar(windows: Windows, tiny_model: Path, runtime: str) -> None:
    run = windows.start("run", tiny_model, "--sidecar", "--runtime", runtime)
    assert complete(run.event("ready")["url"])["content"]
    run.close_stdin()
    assert run.event("stopped")
    assert run.wait() == 0
    assert windows.left() == []


@pytest.mark.one_runtime
def test_the_end_of_the_parent_stops_it(windows: Windows, tiny_model: Path, runtime: str) -> None:
    parent = windows.python("-c", "import time; time.sleep(600)")
    run = windows.start("run", tiny_model, *EVENTS, "--runtime", runtime, "--parent-pid", str(parent.pid))
    run.event("ready")
    parent.terminate()
    assert run.event("stopped")
    assert run.wait() == 0


def test_a_terminated_llamasup_leaves_no_process_and_no_file(
    windows: Windows, tiny_model: Path, runtime: str
) -> None:
    """TerminateProcess, which Windows has for SIGKILL, with a stream open."""
    ready_file = windows.folder / "ready.json"
    run = windows.start("run", tiny_model, *EVENTS, "--runtime", runtime, "--ready-file", ready_file)
    ready = run.event("ready")
    with (
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as client,
        client.stream(
            "POST", ready["url"] + "/completion", json={"prompt": "a", "n_predict": 900, "stream": True}
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        run.terminate()
        with contextlib.suppress(httpx.HTTPError):
            for _ in lines:
                pass
    run.wait()
    eventually(lambda: windows.processes() == [])
    eventually(lambda: windows.left() == [])


@pytest.mark.one_runtime
def test_ctrl_c_stops_it(windows: Windows, tiny_model: Path, runtime: str) -> None:
    run = windows.start("run", tiny_model, *EVENTS, "--runtime", runtime)
    run.event("ready")
    run.ctrl_c()
    assert run.event("stopped")
    assert run.wait() == 0
    assert windows.left() == []


@pytest.mark.one_runtime
def test_two_instances_serve_at_the_same_time(windows: Windows, tiny_model: Path, runtime: str) -> None:
    runs = [windows.start("run", tiny_model, *EVENTS, "--runtime", runtime) for _ in range(2)]
    ready = [run.event("ready") for run in runs]

    # Where one of them is busy and answers too late, a warning takes the place of its models.
    eventually(lambda: all(f"--pid {each['pid']}  {each['url']}" in windows.control("ps") for each in ready))
    for each, run in zip(ready, runs, strict=True):
        windows.control("stop", "--pid", str(each["pid"]))
        assert run.wait() == 0


def test_folder_is_served_and_watched(windows: Windows, tiny_model: Path) -> None:
    models = windows.folder / "models"
    models.mkdir()
    shutil.copy(tiny_model, models / "one.gguf")
    keys = windows.folder / "keys"
    code, _, said = windows.run("key", "new", "app", "--file", keys)
    assert code == 0, said
    serve = windows.start(*("serve", "--models-dir", models, *EVENTS, "--api-key-file", keys))
    url = serve.event("ready")["url"]
    assert get(f"{url}/v1/models").status_code == 401
    windows.control("load", "one")

    windows.session.ask("open", windows_path(keys))
    code, _, said = windows.run("key", "new", "second", "--file", keys)
    assert code == 71
    assert "another program has held the file 'keys' open for 2 s" in said
    windows.session.ask("close_files")
    code, key, said = windows.run("key", "new", "second", "--file", keys)
    assert code == 0, said
    as_second = f"Bearer {key.strip()}"
    eventually(lambda: get(f"{url}/v1/models", authorization=as_second).status_code == 200)
    shutil.copy(tiny_model, models / "two.gguf")
    eventually(lambda: "two" in windows.control("ps", "--all", "--json"))
    windows.control("unload", "one")
    windows.control("reload")
    windows.control("stop")
    assert serve.wait() == 0
    assert windows.left() == []


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("run", "nothing.gguf"), 66, "nothing.gguf"),
        (("run", "demo", "--parallel", "x"), 2, "--parallel"),
        (("ps",), 69, "No llamasup is running on this machine for this user"),
        (("service", "install", "demo"), 71, "does not use systemd"),
        (("run", "demo", "--host", "0.0.0.0", "--port", "0"), 78, "API key"),
    ],
)
def test_bad_input_has_its_exit_code(
    windows: Windows, command: tuple[str, ...], code: int, says: str
) -> None:
    found, _, said = windows.run(*command)
    assert says in said
    assert found == code


@pytest.mark.one_runtime
def test_only_the_user_can_enter_the_run_folder(windows: Windows, tiny_model: Path, runtime: str) -> None:
    run = windows.start("run", tiny_model, "--sidecar", "--runtime", runtime)
    run.event("ready")
    (folder,) = windows.folder.glob(f"**/{run.pid}-????????")
    user, users = windows.session.ask("rights", windows_path(folder))
    assert set(users) <= {"SY", "BA", "OW", *user}
    content = json.loads((folder / "control.sock").read_text())
    assert get(f"http://127.0.0.1:{content['port']}/llamasup/v1/status").status_code == 401
    assert os.stat(folder).st_mode & 0o007 == 0  # noqa: PTH116
    run.close_stdin()
    assert run.wait() == 0


def test_plan_doctor_inspect_list_and_config(windows: Windows, tiny_model: Path, runtime: str) -> None:
    """Without ``--runtime``: a llama-server.exe on PATH is found, and else the embedded runtime."""
    folder, _, program = runtime.rpartition("\\")
    windows.env["PATH"] = folder
    plan = json.loads(windows.run("plan", tiny_model, "--json")[1])
    assert plan["runtime"]["kind"] == ("binary" if program == "llama-server.exe" else "embedded")
    assert plan["memory"]["fits"]
    assert json.loads(windows.run("inspect", tiny_model, "--json")[1])["class"] == "decoder"
    doctor = json.loads(windows.run("doctor", "--port", "0", "--json")[1])
    assert [check for check in doctor["checks"] if not check["ok"]] == []
    assert windows.run("list", tiny_model.parent)[0] == 0
    config = windows.folder / "config.yaml"
    config.write_text(f"models:\n  tiny:\n    path: 'Z:{tiny_model}'\n")
    assert windows.run("config", "check", config)[0] == 0


def test_models_of_a_hub_are_downloaded_by_pull_and_by_serve(windows: Windows, tiny_model: Path) -> None:
    models = windows.folder / "models"
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_model.read_bytes()}
        hub.repos["org/other-GGUF"] = {"other-Q4_K_M.gguf": tiny_model.read_bytes()}
        allowed = ("--endpoint", hub.url, "--allow-private", "--allow-http")
        code, _, said = windows.run("pull", "org/other-GGUF", "--folder", models, *allowed)
        assert code == 0, said
        assert (models / "org" / "other-GGUF" / "other-Q4_K_M.gguf").stat().st_size

        config = windows.folder / "config.yaml"
        config.write_text(
            "models:\n  tiny:\n    repo: org/tiny-GGUF\n"
            f"downloads:\n  folder: '{windows_path(models)}'\n  endpoint: {hub.url}\n"
            "  private_addresses: true\n"
        )
        serve = windows.start("serve", "--config", config, *EVENTS)
        url = serve.event("ready")["url"]
        asked = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        windows.control("stop")
        assert serve.wait() == 0
    assert list(models.glob("**/*.part*")) == []
