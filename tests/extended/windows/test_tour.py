"""The tour of docs/get-started.md, and other commands, under Wine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx

from tests.extended.windows.wine import PATIENCE_S, Windows, eventually, get, windows_path
from tests.kit.certificates import make_certificate
from tests.kit.tour import SHELL, blocks, commands_of

EVENTS = ("--port", "0", "--events", "jsonl")


def test_tour_of_the_docs(windows: Windows) -> None:
    run = windows.start("run", "demo", *EVENTS)
    port = str(run.event("ready")["port"])
    tried = 0
    for block in (block for block in SHELL if not block.startswith("llamasup run")):
        for command in commands_of(block.replace("8080", port)):
            tried += 1
            words = re.split(r" \|", command)[0].split()
            if words[0] == "llamasup":
                code, shown, said = windows.run(*words[1:])
                assert code == 0 or "||" in command, (command, said)
            else:
                shown = linux("bash", "-euo", "pipefail", "-c", command)
            assert shown.strip(), command
            assert '"error"' not in shown, command
    assert tried == 7

    (block,) = blocks("python")
    assert len(linux(sys.executable, "-c", block.replace("8080", port)).split()) > 5

    follow = windows.start("logs", "-f")
    assert follow.lines.get(timeout=PATIENCE_S)
    (status,) = json.loads(windows.control("status", "--json"))["models"]
    assert status["id"] == "demo"
    page = windows.control("ui", "--print").strip()
    assert httpx.get(page, timeout=PATIENCE_S, trust_env=False, follow_redirects=True).status_code == 200
    windows.control("stop")
    assert run.wait() == 0
    follow.wait()
    assert windows.left() == []


def test_python_block_of_the_tour(windows: Windows) -> None:
    (block,) = blocks("py")
    program = windows.python("-c", block, stdin="NUL")
    assert program.wait() == 0, program.errors
    assert program.output().startswith("http://127.0.0.1:"), program.errors
    eventually(lambda: windows.processes() == [])
    assert windows.left() == []


def test_own_command_line_is_wrapped(windows: Windows, tiny_model: Path, runtime: str) -> None:
    embedded = (windows.session.python, "-m", "llamasup.embedded")
    server = embedded if runtime == "embedded" else (runtime,)
    wrap = windows.start("wrap", *EVENTS[2:], "--", *server, "-m", tiny_model, "--port", "0")
    url = wrap.event("ready")["url"]
    assert get(f"{url}/props").json()["model_path"] == windows_path(tiny_model)
    wrap.ctrl_c()
    assert wrap.wait() == 0, wrap.errors
    assert windows.left() == []


def test_keys_tls_and_the_access_log(windows: Windows, tiny_model: Path) -> None:
    keys, log = windows.folder / "keys", windows.folder / "access.log"
    code, key, said = windows.run("key", "new", "phone", "--file", keys, "--rpm", "60")
    assert code == 0, said
    chain, private = map(Path, make_certificate(windows.folder, "server"))
    tls = ("--tls-cert", chain, "--tls-key", private)
    run = windows.start("run", tiny_model, *EVENTS, "--api-key-file", keys, *tls, "--access-log", log)
    url = run.event("ready")["url"]
    assert url.startswith("https://")
    with httpx.Client(verify=False, timeout=PATIENCE_S, trust_env=False) as client:  # noqa: S501
        asked = {"prompt": "Once", "max_tokens": 4}
        assert client.post(f"{url}/v1/completions", json=asked).status_code == 401
        client.headers["authorization"] = f"Bearer {key.strip()}"
        assert client.post(f"{url}/v1/completions", json=asked).status_code == 200
    run.close_stdin()  # without --sidecar, this is no reason to stop
    windows.control("stop")
    assert run.wait() == 0
    lines = map(json.loads, log.read_text().splitlines())
    assert [line["client"] for line in lines if line["status"] == 200] == ["key:phone"]


def test_front_serves_the_model_of_another_node(windows: Windows, tiny_model: Path) -> None:
    keys, own_key, config = (windows.folder / name for name in ("keys", "front.key", "front.yaml"))
    code, key, said = windows.run("key", "new", "front", "--rights", "inference,node", "--file", keys)
    assert code == 0, said
    own_key.write_text(key)
    node = windows.start("run", tiny_model, "--alias", "tiny", *EVENTS, "--api-key-file", keys)
    url = node.event("ready")["url"]
    config.write_text(f"peers: {{desk: {{url: '{url}', key_file: '{windows_path(own_key)}'}}}}\n")
    front = windows.start("serve", "--config", config, *EVENTS)
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
    answer = httpx.post(
        f"{front.event('ready')['url']}/v1/completions", json=asked, timeout=PATIENCE_S, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert "desk" in windows.control("status", "--pid", str(front.pid))
    assert "tiny" in windows.control("top", "--pid", str(node.pid))
    for each in (front, node):
        windows.control("stop", "--pid", str(each.pid))
        assert each.wait() == 0, each.errors
    assert windows.left() == []


def test_tune_measures_and_leaves_nothing(windows: Windows, tiny_model: Path) -> None:
    for minutes in ("0.2", "1", "4"):  # too short for one comparison on a busy machine
        tune = windows.start("tune", tiny_model, "--minutes", minutes, "--json", stdin="NUL")
        if (code := tune.wait()) != 75:
            break
    assert code == 0, tune.errors
    assert json.loads(tune.output())["default"]
    eventually(lambda: windows.processes() == [])
    assert windows.left() == []


def test_unknown_path_with_a_large_body_gets_the_answer_of_llama_server(
    windows: Windows, tiny_model: Path
) -> None:
    """llama-server refuses the head, and closes the connection without reading the body."""
    run = windows.start("run", tiny_model, *EVENTS)
    url = run.event("ready")["url"]
    answer = httpx.post(f"{url}/unknown", content=bytes(8 << 20), timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 404, answer.text
    run.ctrl_c()
    assert run.wait() == 0


def linux(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
