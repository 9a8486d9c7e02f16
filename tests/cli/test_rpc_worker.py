"""``llamasup rpc-worker``, up to the service, and ``--rpc``.

tests/extended/real/test_rpc.py has a real rpc-server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamasup.cli import foreground
from llamasup.cli.app import app
from llamasup.core.http.address import TcpAddress
from llamasup.core.llama_server.rpc.worker_line import WorkerOptions
from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.service.rpc_worker import RpcWorkerOptions
from tests.e2e.driver import run_to_end

FILES = ("--cert", "/c.pem", "--key", "/c.key", "--client-ca", "/ca.pem")


def options_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> RpcWorkerOptions:
    """What the command gives to its service, which is not started."""
    found: list[RpcWorkerOptions] = []

    def serve(prepare: Callable[[], Any], *_: Any) -> int:
        found.extend(prepare().args)
        return 0

    monkeypatch.setattr(foreground, "serve_until_stopped", serve)
    result = CliRunner().invoke(app, ["rpc-worker", *words])
    assert result.exit_code == 0, result.output
    return found[0]


def test_defaults_are_loopback_and_the_port_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(monkeypatch)
    assert (options.host, options.port, options.tunnel) == ("127.0.0.1", 50_052, None)


def test_options_reach_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--host", "10.0.0.2", "--port", "7", "--threads", "3", "--device", "A", "--memory", "2GiB")
    options = options_of(monkeypatch, *words, "--cache")
    assert (options.host, options.port) == ("10.0.0.2", 7)
    assert options.worker == WorkerOptions(3, ("A",), 2 << 30, cache=True)


def test_localhost_is_an_address_because_rpc_server_knows_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(monkeypatch, "--host", "localhost").host == "127.0.0.1"


def test_tunnel_has_an_address_and_three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(monkeypatch, "--tunnel", "0.0.0.0:7000", *FILES)
    assert options.tunnel == TcpAddress("0.0.0.0", 7000)
    assert options.files == TunnelFiles("/ca.pem", "/c.pem", "/c.key")


def test_files_of_a_tunnel_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = options_of(monkeypatch, "--tunnel", "[::1]:7000", *FILES[:4], "--client-ca", "ca.pem")
    assert options.files is not None
    assert options.files.ca == str(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--tunnel", "0.0.0.0:7000"), "--tunnel also needs --cert and --key and --client-ca:"),
        (("--tunnel", "0.0.0.0:7000", *FILES[:4]), "--tunnel also needs --client-ca:"),
        (("--tunnel", "/run/worker.sock", *FILES), "/run/worker.sock is a socket file"),
        (("--tunnel", "7000", *FILES), "'7000' is not HOST:PORT"),
        (("--tunnel", "0.0.0.0:7000", *FILES, "--host", "10.0.0.2"), "--tunnel excludes --host and --port"),
        (("--tunnel", "0.0.0.0:7000", *FILES, "--port", "7"), "--tunnel excludes --host and --port"),
        (FILES[:2], "--cert would have no effect"),
        (("--memory", "much"), "'much' is not a size"),
    ],
)
def test_options_that_contradict_are_errors_of_usage(words: tuple[str, ...], why: str) -> None:
    done = run_to_end("rpc-worker", *words)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())


def test_worker_that_is_given_twice_is_an_error_of_usage() -> None:
    done = run_to_end("plan", "demo", "--rpc", "localhost:7", "--rpc", "127.0.0.1:7")
    assert done.returncode == 2
    assert "--rpc: 127.0.0.1:7 is given twice; give it once." in " ".join(done.stderr.split())
