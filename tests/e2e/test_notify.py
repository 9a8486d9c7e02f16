"""``llamasup run`` under systemd: its notifications, the effect of SIGHUP, and sockets from systemd.

The service manager is a socket of the test; the real systemd is in tests/features/systemd.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import PATIENCE_S, llamasup, run_to_end, started
from tests.kit.patience import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux")


class Manager:
    """Receives the notifications of a service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(PATIENCE_S)

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "NOTIFY_SOCKET": str(self.path), **more}

    def until(self, wanted: str) -> list[str]:
        """Everything from now on, up to the message that holds this line or the beginning of one."""
        lines: list[str] = []
        while not any(line.startswith(wanted) for line in lines):
            lines += self._socket.recv(4096).decode().splitlines()
        self.messages += lines
        return lines

    def rest(self) -> list[str]:
        self._socket.setblocking(False)
        try:
            while True:
                self.messages += self._socket.recv(4096).decode().splitlines()
        except BlockingIOError:
            return self.messages

    def is_silent_for(self, seconds: float) -> bool:
        self._socket.settimeout(seconds)
        try:
            return not self._socket.recv(4096)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    yield (manager := Manager(tmp_path / "notify"))
    manager.close()


def test_ready_is_sent_after_the_first_token(
    manager: Manager, tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    server = fake_server("load_s=600", f"until={tmp_path / 'go'}")
    with llamasup(tiny_model, "--runtime", server, env=manager.environment()) as running:
        lines = manager.until("STATUS=loading")
        (tmp_path / "go").touch()
        lines += manager.until("READY=1")
        assert [line for line in lines if not line.startswith(("WATCHDOG", "EXTEND"))] == [
            "STATUS=starting llama-server for tiny",
            "STATUS=loading tiny",
            "STATUS=waiting for the first token of tiny",
            "READY=1",
            f"STATUS=serving tiny at {running.url}, 4 slots",
        ]
        assert "EXTEND_TIMEOUT_USEC=60000000" in lines
        # No child of the service may send notifications for it.
        for process in running.children():
            assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & process.environ().keys()
        assert running.stop() == 0
    assert manager.until("STOPPING=1")[-3:] == [
        "STOPPING=1",
        "EXTEND_TIMEOUT_USEC=45000000",
        "STATUS=stopping",
    ]


def test_ready_is_not_sent_without_a_token(
    manager: Manager, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    server = fake_server("status=500")
    with llamasup(tiny_model, "--runtime", server, env=manager.environment()) as running:
        running.wait_for("exit")
        assert running.stop() == 0
    assert "READY=1" not in manager.rest()


def test_sighup_restarts_the_model_and_is_reported_to_systemd(
    manager: Manager, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    environment = manager.environment()
    with llamasup(tiny_model, "--runtime", fake_server(), env=environment) as running:
        manager.until("READY=1")
        running.send_signal(signal.SIGHUP)
        lines = manager.until("READY=1")
        assert lines[0] == "RELOADING=1"
        assert lines[1].removeprefix("MONOTONIC_USEC=").isdecimal()
        assert running.wait_for("state", state="ready", generation=2)
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert running.stop() == 0
    assert "SIGHUP: restarting the model." in running.stderr_text


def test_crash_is_reported_in_the_status_and_the_service_stays_up(
    manager: Manager, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(), env=manager.environment()) as running:
        manager.until("READY=1")
        (server,) = [child for child in running.children() if "--host" in child.cmdline()]
        server.send_signal(signal.SIGSEGV)
        (trouble,) = [line for line in manager.until("STATUS=restarting") if line.startswith("STATUS=")]
        assert trouble.startswith("STATUS=restarting tiny after ")
        assert trouble.endswith(" (1 of 5)")
        lines = manager.until("STATUS=serving")
        assert "READY=1" not in lines
        assert running.stop() == 0


def test_watchdog_messages_stop_with_the_event_loop(
    manager: Manager, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    environment = manager.environment(WATCHDOG_USEC="100000")
    with llamasup(tiny_model, "--runtime", fake_server(), env=environment) as running:
        manager.until("READY=1")
        for _ in range(3):
            assert manager.until("WATCHDOG=1")
        process = psutil.Process(running.pid)
        process.suspend()
        eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        manager.rest()
        assert manager.is_silent_for(1.0)  # 20 beats
        process.resume()
        assert manager.until("WATCHDOG=1")
        assert running.stop() == 0


def test_service_with_many_models_stays_up(
    manager: Manager, tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    """READY=1 after the preloads; then models load and unload, and the config is reloaded."""
    (tmp_path / "models").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"models/{name}.gguf").write_bytes(tiny_model.read_bytes())
    config = tmp_path / "config.yaml"
    config.write_text("models_dir: models\nmodels: {a: {preload: true}, b: {drain_timeout: 10m}}\n")
    words = ("--config", str(config), "--port", "0", "--runtime", fake_server())
    with started("serve", *words, env=manager.environment()) as running:
        lines = [line for line in manager.until("STATUS=serving") if "=1" in line or "serving" in line]
        serving = f"STATUS=serving a, b at {running.url}"
        assert lines[-2:] == ["READY=1", serving]
        asked = {"model": "b", "prompt": "x", "n_predict": 1}
        assert httpx.post(f"{running.url}/completion", json=asked).status_code == 200
        lines = manager.until("STATUS=serving")
        assert lines == [f"{serving}; starting llama-server for b"]
        while lines[-1] != serving:
            lines += manager.until("STATUS=serving")
        assert "READY=1" not in lines

        config.write_text("models: {a: {}}\nunknown: 1\n")
        running.send_signal(signal.SIGHUP)
        lines = manager.until("STATUS=serving")
        assert lines[0] == "RELOADING=1"
        assert lines[-2] == "READY=1"
        assert lines[-1].startswith(f"{serving}; config rejected: {config} has 1 error.")
        assert f"{config}:2: unknown: unknown key" in lines[-1]
        config.write_text("models_dir: models\nmodels: {a: {}, b: {drain_timeout: 10m}}\n")
        running.send_signal(signal.SIGHUP)
        assert manager.until("STATUS=serving")[-2:] == ["READY=1", serving]
        assert running.stop() == 0
    # As long as the longest of them may take.
    assert "EXTEND_TIMEOUT_USEC=615000000" in manager.until("STATUS=stopping")


# --- socket activation ------------------------------------------------------------------------------

# Becomes llamasup, with the descriptors of its first argument as 3, 4, … and LISTEN_PID its own.
_ACTIVATE = """
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
for at, fd in enumerate(fds): os.dup2(fd, 100 + at)
for at in range(len(fds)): os.dup2(100 + at, 3 + at)
os.environ.update(LISTEN_FDS=str(len(fds)), LISTEN_PID=str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def activated(*sockets: socket.socket) -> list[str]:
    return [sys.executable, "-c", _ACTIVATE, ",".join(str(sock.fileno()) for sock in sockets)]


def test_llamasup_serves_on_the_socket_from_systemd(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        # A client may come first: systemd starts the service for it.
        with (
            socket.create_connection(("127.0.0.1", port)) as early,
            llamasup(
                tiny_model,
                *("--runtime", fake_server()),
                prefix=activated(sock),
                pass_fds=[sock.fileno()],
            ) as running,
        ):
            assert running.url == f"http://127.0.0.1:{port}"
            early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            early.settimeout(PATIENCE_S)
            assert early.recv(100).startswith(b"HTTP/1.1 200")
            assert running.stop() == 0


def test_socket_reachable_from_other_machines_needs_a_key(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    """X1: also for a socket that systemd has opened."""
    arguments = ("run", str(tiny_model), "--runtime", fake_server())
    with socket.create_server(("127.0.0.1", 0)) as inner, socket.create_server(("0.0.0.0", 0)) as outer:
        fds = [inner.fileno(), outer.fileno()]
        done = run_to_end(*arguments, prefix=activated(inner, outer), pass_fds=fds)
        assert done.returncode == 78
        assert "The socket on 0.0.0.0 can be reached from other machines" in done.stderr
        keys = tmp_path / "keys"
        keys.write_text("secret\n")
        with llamasup(
            tiny_model,
            *("--runtime", fake_server(), "--api-key-file", str(keys)),
            prefix=activated(inner, outer),
            pass_fds=fds,
        ) as running:
            port = outer.getsockname()[1]
            running.wait_for("ready")
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
            assert running.stop() == 0
