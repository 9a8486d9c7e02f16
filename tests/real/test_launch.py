"""``llamasup launch``: a stand-in for Claude Code runs with a real llama-server, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.driver import PATIENCE_S, command, llamasup
from tests.kit.patience import eventually
from tests.real.remains import folders_of, remains_of

KEY = "sk-of-launch"
CLIENT = f"""#!{sys.executable}
import json, os, signal, sys, urllib.request
signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
found = os.environ
request = urllib.request.Request(
    found["ANTHROPIC_BASE_URL"] + "/v1/messages",
    json.dumps({{"model": found["ANTHROPIC_MODEL"], "max_tokens": 4,
                 "messages": [{{"role": "user", "content": "hi"}}]}}).encode(),
    {{"content-type": "application/json", "authorization": "Bearer " + found["ANTHROPIC_AUTH_TOKEN"]}},
)
answer = json.load(urllib.request.urlopen(request))
settings = json.load(open(sys.argv[2]))
seen = {{"arguments": sys.argv[1:], "environment": dict(found), "answer": answer, "settings": settings}}
with open(found["SEEN"] + ".part", "w") as file:
    json.dump(seen, file)
os.rename(found["SEEN"] + ".part", found["SEEN"])
if "--wait" in sys.argv:
    while True:
        signal.pause()
sys.exit(7)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    client = tmp_path / "bin" / "claude"
    client.write_text(CLIENT)
    client.chmod(0o755)
    return tmp_path


def environment(home: Path, llama_server: str, **more: str) -> dict[str, str]:
    path = f"{home / 'bin'}:{Path(llama_server).parent}"
    base = {name: value for name, value in os.environ.items() if not name.startswith("LLAMASUP_API")}
    return {
        **base,
        **folders_of(home),
        "HOME": str(home),
        "PATH": path,
        "SEEN": str(home / "seen.json"),
        **more,
    }


@contextmanager
def launched(env: Mapping[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    """``llamasup launch claude …`` as the leader of its own session, as in a terminal of its own."""
    process = subprocess.Popen(
        command("launch", "claude", *words),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)


def seen_by_client(env: Mapping[str, str], process: subprocess.Popen[str]) -> dict[str, Any]:
    path = Path(env["SEEN"])
    eventually(lambda: path.exists() or process.poll() is not None, "the client's request")
    assert path.exists(), process.stderr and process.stderr.read()
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


def command_lines() -> str:
    return "\n".join(" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


def test_client_gets_its_settings_and_its_exit_code_is_returned(
    home: Path, tiny_model: Path, llama_server: str
) -> None:
    env = environment(home, llama_server, LLAMASUP_API_KEY=KEY)
    own = home / ".claude" / "settings.json"
    own.parent.mkdir()
    own.write_text('{"theme": "dark"}')
    model = home / 'a "strange" $(name).gguf'
    model.symlink_to(tiny_model)
    with launched(env, str(model), "--ctx-size", "4096", "--", "--wait", "a b") as process:
        seen = seen_by_client(env, process)
        shown = command_lines()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 5
        assert "begins with a prompt of about" in ((process.stderr and process.stderr.read()) or "")
    assert KEY not in shown
    assert seen["arguments"][0] == "--settings"
    assert seen["arguments"][2:] == ["--wait", "a b"]
    assert seen["answer"]["usage"]["output_tokens"] == 4
    assert seen["settings"]["env"]["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert seen["settings"]["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert seen["environment"].items() >= seen["settings"]["env"].items()
    assert own.read_text() == '{"theme": "dark"}'
    assert not Path(seen["arguments"][1]).exists()
    assert remains_of(home, home / "no-ready-file") == ()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signal_for_the_command_ends_client_and_server(
    home: Path, tiny_model: Path, llama_server: str, number: signal.Signals, code: int
) -> None:
    env = environment(home, llama_server)
    with launched(env, str(tiny_model), "--", "--wait") as process:
        seen_by_client(env, process)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code
    assert remains_of(home, home / "no-ready-file") == ()


def test_running_llamasup_is_used_and_stays(home: Path, tiny_model: Path, llama_server: str) -> None:
    env = environment(home, llama_server)
    with llamasup(tiny_model, "--runtime", llama_server, env=env) as running:
        url = running.url
        for words in ((), ("tiny",)):
            with launched(env, *words) as process:
                assert seen_by_client(env, process)["environment"]["ANTHROPIC_BASE_URL"] == url
                assert process.wait(PATIENCE_S) == 7
        assert running.stop() == 0


def test_second_launch_does_not_use_the_server_of_the_first(
    home: Path, tiny_model: Path, llama_server: str
) -> None:
    env = environment(home, llama_server)
    with launched(env, str(tiny_model), "--", "--wait") as first:
        url = seen_by_client(env, first)["environment"]["ANTHROPIC_BASE_URL"]
        with launched(env) as without_model:
            assert without_model.wait(PATIENCE_S) == 69
        with launched(env, str(tiny_model)) as second:
            assert seen_by_client(env, second)["environment"]["ANTHROPIC_BASE_URL"] != url
            assert second.wait(PATIENCE_S) == 7
        assert first.poll() is None


def test_death_of_llamasup_is_reported_after_the_client(
    home: Path, tiny_model: Path, llama_server: str
) -> None:
    env = environment(home, llama_server)
    with launched(env, str(tiny_model), "--", "--wait") as process:
        seen_by_client(env, process)
        (server,) = (each for each in psutil.Process(process.pid).children() if "--sidecar" in each.cmdline())
        server.kill()
        server.wait(PATIENCE_S)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 5
        assert process.stderr is not None
        assert "While the client ran: llamasup ended." in process.stderr.read()


def test_errors_of_a_start_are_those_of_run(home: Path, llama_server: str) -> None:
    env = environment(home, llama_server)
    with launched(env, str(home / "missing.gguf")) as process:
        assert process.wait(PATIENCE_S) == 66
        assert process.stderr is not None
        assert "missing.gguf" in process.stderr.read()
    (home / "bin" / "claude").unlink()
    with launched(env, "x.gguf") as process:
        assert process.wait(PATIENCE_S) == 69
        assert process.stderr is not None
        assert "npm install -g @anthropic-ai/claude-code" in process.stderr.read()
    assert not Path(env["SEEN"]).exists()
    assert remains_of(home, home / "no-ready-file") == ()
