"""Security checks that need a process: addresses, environment of the child, and logs (X1, X5, X6, X13)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import Llamasup, llamasup, run_to_end

Serve = Callable[..., AbstractContextManager[Llamasup]]

PLANTED = {
    "HF_TOKEN": "planted-1",
    "LLAMA_ARG_CTX_SIZE": "planted-2",
    "LLAMA_API_KEY": "planted-3",
    "AWS_SECRET_ACCESS_KEY": "planted-4",
    "OPENAI_API_KEY": "planted-5",
    "NVIDIA_API_KEY": "planted-6",
    "SSH_AUTH_SOCK": "planted-7",
    "LD_AUDIT": "/planted-8",
    "GOOGLE_APPLICATION_CREDENTIALS": "planted-9",
    "LLAMASUP_API_KEY": "planted-10",
}


def listening(process: psutil.Process) -> set[str]:
    return {
        connection.laddr.ip
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.fixture
def serve(tiny_model: Path, fake_server: Callable[..., str]) -> Serve:
    return lambda *arguments, **options: llamasup(
        tiny_model, "--runtime", fake_server(), *arguments, **options
    )


@pytest.mark.check("X1", "127.0.0.1; llama-server has no port")
def test_only_this_machine_can_connect_by_default(serve: Serve) -> None:
    with serve() as running:
        running.wait_for("ready")
        assert listening(psutil.Process(running.pid)) == {"127.0.0.1"}
        assert [listening(child) for child in running.children()] == [set() for _ in running.children()]
        assert running.stop() == 0


@pytest.mark.check("X1", "exit code 78 before anything starts")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "localhost.localdomain."])
def test_address_reachable_from_other_machines_requires_a_key(
    tiny_model: Path, fake_server: Callable[..., str], host: str
) -> None:
    done = run_to_end("run", str(tiny_model), "--runtime", fake_server(), "--port", "0", "--host", host)
    assert done.returncode == 78, done.stderr
    assert "--api-key-file" in done.stderr
    assert done.stdout == ""


@pytest.mark.check("X1")
def test_only_the_user_can_switch_authentication_off(serve: Serve) -> None:
    with serve("--host", "0.0.0.0", "--insecure-no-auth") as running:
        running.wait_for("ready")
        assert listening(psutil.Process(running.pid)) == {"0.0.0.0"}
        assert running.stop() == 0


@pytest.mark.check("X5", "folders of mode 0700, removed after the run")
def test_only_its_owner_can_reach_the_socket_of_the_child(serve: Serve) -> None:
    with serve() as running:
        running.wait_for("ready")
        sockets = [
            Path(str(connection.laddr))
            for child in running.children()
            for connection in child.net_connections("unix")
        ]
        (path,) = {path for path in sockets if path.is_absolute()}
        for folder in (path.parent, path.parent.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.stat().st_uid == os.geteuid()
        assert running.stop() == 0
        assert not path.exists()


@pytest.mark.check("X5")
def test_no_command_line_contains_a_key(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("in-a-file\n")
    env = {**os.environ, "LLAMASUP_API_KEY": "in-the-environment"}
    with serve("--api-key-file", str(keys), env=env) as running:
        running.wait_for("ready")
        for process in (psutil.Process(running.pid), *running.children()):
            words = process.cmdline()
            assert not [word for word in words if "in-a-file" in word or "in-the-environment" in word]
            assert "--api-key" not in words
        assert running.stop() == 0


@pytest.mark.check("X6", "`/proc` shows only the allowlist")
def test_environment_of_the_child_is_an_allowlist(serve: Serve) -> None:
    with serve(env={**os.environ, **PLANTED}) as running:
        running.wait_for("ready")
        for child in running.children():
            environment = Path(f"/proc/{child.pid}/environ").read_bytes()
            assert b"planted" not in environment
            names = {line.partition(b"=")[0].decode() for line in environment.split(b"\0") if line}
            assert not names & set(PLANTED)
        assert running.stop() == 0


def seen_of(running: Llamasup, folder: Path) -> bytes:
    """All its output and files."""
    lines = [" ".join(path.cmdline()).encode() for path in (psutil.Process(running.pid), *running.children())]
    kept = everything_in(folder)
    assert running.stop() == 0
    return running.stderr_text.encode() + kept + everything_in(folder) + b"\n".join(lines)


@pytest.mark.check("X13", "at the highest log level")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_log_contains_a_prompt_a_key_or_a_query(
    serve: Serve, own_folders: Path, tmp_path: Path, log_format: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    words: tuple[str, ...] = ("--log-level", "debug", "--log-format", log_format, "--api-key-file", str(keys))
    words += ("--access-log", str(tmp_path / "access"), "--slow-request", "0.000001")
    with serve(*words) as running:
        key = {"Authorization": "Bearer the-key"}
        body = {
            "prompt": "the-prompt",
            "messages": [{"role": "user", "content": "the-prompt"}],
            "stream": True,
        }
        for path in ("/completion", "/v1/chat/completions", "/tools", "/slots/0"):
            httpx.post(f"{running.url}{path}?q=the-query", json=body, headers=key)
        httpx.post(f"{running.url}/completion", json=body, headers={"X-Api-Key": "the-wrong-key"})
        httpx.get(
            f"{running.url}/props?api_key=the-key", headers={"Host": "evil", "Origin": "http://the-page"}
        )
        httpx.get(f"{running.url}/metrics?q=the-query", headers=key)
        seen = seen_of(running, own_folders / "state") + (tmp_path / "access").read_bytes()
    assert b"/completion" in seen
    for secret in (b"the-key", b"the-prompt", b"the-query", b"the-wrong-key"):
        assert secret not in seen
