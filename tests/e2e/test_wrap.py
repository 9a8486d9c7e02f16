"""``llamasup wrap`` around command lines of all kinds, with a fake llama-server behind them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import Llamasup, adopted, command, run_to_end, started, wrapped
from tests.kit.paths import FIXTURES

OLD_HELP = FIXTURES / "help" / "0.2.90.txt"


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


def server_of(running: Llamasup) -> list[str]:
    """The command line of the fake llama-server."""
    (found,) = [line for child in running.children() if "--host" in (line := child.cmdline())]
    return found


def test_script_that_passes_its_arguments_on_is_wrapped(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    start = script(tmp_path / "start.sh", f'exec {fake_server()} -m {tiny_model} "$@"')
    with wrapped(start, "--port", "0", "--alias", "mine") as running:
        assert running.wait_for("ready")["models"] == ["mine"]
        assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
        assert running.stop() == 0


def test_script_that_does_not_pass_arguments_on_is_refused_with_a_remedy(tmp_path: Path) -> None:
    start = script(tmp_path / "start.sh", "echo starting", "exit 3")
    ended = run_to_end("wrap", "--", start, "--port", "0")
    assert ended.returncode == 69
    assert f"`{start} --help` does not answer as a llama-server does (exit code 3)" in ended.stderr
    assert '"$@"' in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("no-such-program",), 69, "The program 'no-such-program' does not exist."),
        (("/etc/passwd",), 69, "Cannot execute '/etc/passwd': Permission denied."),
        (("true",), 69, "`true --help` does not answer"),
        ((), 2, "COMMAND"),
    ],
)
def test_program_that_is_not_llama_server_is_refused(words: tuple[str, ...], code: int, said: str) -> None:
    ended = run_to_end("wrap", "--", *words)
    assert ended.returncode == code
    assert said in ended.stderr


def test_options_of_llamasup_end_where_the_command_begins(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """Without -- too: --no-warmup is llamasup's, --api-key is not."""
    words = (fake_server(), "-m", str(tiny_model), "--port", "0", "--api-key", "k")
    with started("wrap", "--no-warmup", *words) as running:
        assert httpx.get(f"{running.url}/props").status_code == 401
        key = {"Authorization": "Bearer k"}
        assert httpx.get(f"{running.url}/props", headers=key).status_code == 200
        assert "k" not in running.stderr_text.split()
        states = [event["state"] for event in running.events if event["event"] == "state"]
        assert "warming" not in states
        assert running.stop() == 0


@pytest.mark.check("X5", "random key in a file of mode 0600")
def test_build_without_unix_sockets_listens_on_loopback_with_a_secret_key(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    start = script(
        tmp_path / "llama-server",
        f'[ "$1" = --help ] && exec cat {OLD_HELP}',
        f'exec {fake_server()} "$@"',
    )
    with wrapped(start, "-m", str(tiny_model), "--port", "0") as running:
        running.wait_for("ready")
        line = server_of(running)
        port = line[line.index("--port") + 1]
        key_file = line[line.index("--api-key-file") + 1]
        assert Path(key_file).stat().st_mode & 0o777 == 0o600
        assert line[line.index("--host") + 1] == "127.0.0.1"
        assert httpx.get(f"http://127.0.0.1:{port}/props").status_code == 401
        wrong = {"Authorization": "Bearer not-asked-for"}
        assert httpx.get(f"{running.url}/props", headers=wrong).status_code == 200
        assert running.stop() == 0


def test_build_without_unix_sockets_uses_the_keys_of_the_user(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nk1\n")
    start = script(
        tmp_path / "llama-server",
        f'[ "$1" = --help ] && exec cat {OLD_HELP}',
        f'exec {fake_server()} "$@"',
    )
    with wrapped(start, "-m", str(tiny_model), "--port", "0", "--api-key-file", str(keys)) as running:
        running.wait_for("ready")
        assert server_of(running).count("--api-key-file") == 1
        assert httpx.get(f"{running.url}/props").status_code == 401
        key = {"Authorization": "Bearer k1"}
        assert httpx.get(f"{running.url}/props", headers=key).status_code == 200
        assert running.stop() == 0


def test_port_in_use_is_reported_by_llamasup(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with wrapped(fake_server(), "-m", str(tiny_model), "--port", "0") as running:
        port = str(running.wait_for("ready")["port"])
        ended = run_to_end("wrap", "--", fake_server(), "-m", str(tiny_model), "--port", port)
        assert ended.returncode == 71
        assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
        assert running.stop() == 0


@pytest.mark.extended
def test_crash_loop_ends_with_75_and_not_with_the_exit_code_of_the_child(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    line = (fake_server("signal=start:SIGSEGV"), "-m", str(tiny_model), "--port", "0")
    ended = run_to_end("wrap", "--", *line)
    assert ended.returncode == 75
    assert "Gave up" in ended.stderr


def test_permanent_crash_ends_with_the_signal_as_in_a_shell(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    line = (fake_server("signal=load:SIGILL"), "-m", str(tiny_model), "--port", "0")
    ended = run_to_end("wrap", "--", *line)
    assert ended.returncode == 128 + 4
    assert "another processor" in ended.stderr


def test_model_without_a_warm_up_request_is_served_once_healthy(fake_server: Callable[..., str]) -> None:
    """A model that llama-server itself downloads: its class is still unknown."""
    with wrapped(fake_server("status=500"), "-m", "/dev/null", "-hf", "org/repo", "--port", "0") as running:
        assert running.wait_for("ready")["models"] == ["repo"]
        states = [event["state"] for event in running.events if event["event"] == "state"]
        assert "warming" not in states
        assert running.stop() == 0


def test_ready_file_and_event_contain_the_unix_socket(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    path, ready_file = tmp_path / "front.sock", tmp_path / "ready.json"
    line = (fake_server(), "-m", str(tiny_model), "--host", str(path))
    with wrapped(*line, options=["--ready-file", str(ready_file)]) as running:
        ready = running.wait_for("ready")
        assert (ready["host"], ready["port"]) == (str(path), None)
        assert ready_file.exists()
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/health").status_code == 200
        assert running.stop() == 0
        assert f"is ready at {path} after" in running.stderr_text
    assert not path.exists()
    assert not ready_file.exists()


def test_wrapped_sidecar_ends_when_the_parent_closes_the_pipe(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    line = (fake_server(), "-m", str(tiny_model), "--port", "0")
    process = subprocess.Popen(
        command("wrap", "--sidecar", "--", *line),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with adopted(process) as running:
        running.wait_for("ready")
        assert process.stdin is not None
        process.stdin.close()
        assert running.end() == 0


def loading_url(running: Llamasup, port: int) -> str:
    running.wait_for("state", state="loading")
    return f"http://127.0.0.1:{port}"


def test_llama_server_answers_during_the_first_load(
    tiny_model: Path, fake_server: Callable[..., str], free_tcp_port: int, tmp_path: Path
) -> None:
    """With 503, at once; later generations are waited for."""
    go = tmp_path / "go"
    words = (fake_server("load_s=600", f"until={go}"), "-m", str(tiny_model), "--port", str(free_tcp_port))
    with wrapped(*words) as running:
        url = loading_url(running, free_tcp_port)
        for _ in range(3):
            answer = httpx.post(f"{url}/completion", json={"prompt": "x"})
            assert (answer.status_code, answer.headers["server"]) == (503, "llama.cpp")
            message = {"message": "Loading model", "type": "unavailable_error", "code": 503}
            assert answer.json() == {"error": message}
        go.touch()
        running.wait_for("ready")
        go.unlink()
        running.children()[0].kill()
        running.wait_for("exit", signal="SIGKILL")
        running.wait_for("state", state="loading", generation=2)
        with ThreadPoolExecutor() as clients:
            waited = clients.submit(httpx.post, f"{url}/completion", json={"prompt": "x"})
            go.touch()
            assert waited.result().status_code == 200
        assert running.stop() == 0


def test_requested_wait_timeout_covers_the_first_load(
    tiny_model: Path, fake_server: Callable[..., str], free_tcp_port: int, tmp_path: Path
) -> None:
    server = fake_server("load_s=600", f"until={tmp_path / 'go'}")
    words = (server, "-m", str(tiny_model), "--port", str(free_tcp_port))
    with wrapped(*words, options=("--wait-timeout", "60")) as running, ThreadPoolExecutor() as clients:
        url = loading_url(running, free_tcp_port)
        waited = clients.submit(httpx.post, f"{url}/completion", json={"prompt": "x"})
        (tmp_path / "go").touch()
        assert waited.result().status_code == 200
        assert running.stop() == 0


def test_server_log_goes_to_stderr_unless_a_file_is_requested(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    words = (fake_server(), "-m", str(tiny_model), "--port", "0")
    with wrapped(*words) as running:
        running.wait_for("ready")
        assert running.stop() == 0
        assert " I srv  llama_server: model loaded\n" in running.stderr_text
    with wrapped(*words, options=("--server-log", "file")) as running:
        running.wait_for("ready")
        assert running.stop() == 0
        assert "llama_server:" not in running.stderr_text
    ended = run_to_end("wrap", "--server-log", "nowhere", "--", *words)
    assert (ended.returncode, "'nowhere' is not stderr or file" in ended.stderr) == (2, True)


def test_unknown_key_of_a_script_prevents_only_the_warm_up(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    start = script(tmp_path / "start.sh", f'exec {fake_server()} "$@" --api-key hidden')
    with wrapped(start, "-m", str(tiny_model), "--port", "0") as running:
        assert httpx.get(f"{running.url}/props").status_code == 401
        key = {"Authorization": "Bearer hidden"}
        assert httpx.get(f"{running.url}/props", headers=key).status_code == 200
        assert running.stop() == 0
        assert "requires an API key that llamasup does not know" in running.stderr_text
        assert "hidden" not in running.stderr_text
