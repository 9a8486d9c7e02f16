"""What ``llamasup rpc-worker`` refuses, and its plan.

tests/extended/real/test_rpc.py has a real rpc-server.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from llamasup.core.http.address import TcpAddress
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.rpc.find import find_rpc_server
from llamasup.core.llama_server.rpc.relay import RelayLoop, client_context
from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.core.supervision.events import Bus, ServerExited
from llamasup.errors import BrokenRuntime, PortInUse, RuntimeMissing, UnsafeBind, UsageInvalid
from llamasup.service.rpc_worker import (
    RpcWorker,
    RpcWorkerOptions,
    WorkerPlanner,
    _renamed,
    check_listen,
)
from tests.kit.certificates import make_certificate
from tests.kit.paths import FIXTURES
from tests.kit.patience import PATIENCE_S


@pytest.fixture
def program(tmp_path: Path) -> str:
    """An rpc-server that only prints its help, next to a llama-server."""
    help_text = FIXTURES / "help" / "rpc-server-b11434.log"
    for name in ("ggml-rpc-server", "llama-server"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n/bin/cat '{help_text}' >&2\n")
        path.chmod(0o755)
    return str(tmp_path / "llama-server")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "worker.example.net"])
def test_address_that_is_not_private_is_refused(host: str) -> None:
    with pytest.raises(UnsafeBind) as refused:
        check_listen(RpcWorkerOptions(host=host))
    assert refused.value.exit_code == 78
    assert "--tunnel" in refused.value.remedy


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.2", "192.168.1.2"])
def test_private_address_is_accepted_if_it_is_named(host: str) -> None:
    check_listen(RpcWorkerOptions(host=host))


@pytest.mark.parametrize("options", [RpcWorkerOptions(host="fd00::1"), RpcWorkerOptions(port=0)])
def test_address_that_llama_cpp_cannot_use_is_refused(options: RpcWorkerOptions) -> None:
    with pytest.raises(UsageInvalid):
        check_listen(options)


def test_rpc_server_is_found_next_to_llama_server(program: str) -> None:
    assert find_rpc_server(program, os.environ).path.endswith("ggml-rpc-server")


def test_llama_server_without_one_has_a_remedy(tmp_path: Path, program: str) -> None:
    (tmp_path / "ggml-rpc-server").unlink()
    with pytest.raises(RuntimeMissing, match=f"nor rpc-server is next to {program}") as missing:
        find_rpc_server(program, os.environ)
    assert "GGML_RPC=ON" in missing.value.remedy


def test_rpc_server_is_found_on_path(tmp_path: Path, program: str) -> None:
    (tmp_path / "llama-server").unlink()
    for choice in (None, "auto", "ggml-rpc-server"):
        found = find_rpc_server(choice, {"PATH": str(tmp_path), "LLAMASUP_RUNTIME": "embedded"})
        assert found.path == str(tmp_path / "ggml-rpc-server")


def test_variable_names_the_rpc_server(tmp_path: Path, program: str) -> None:
    found = find_rpc_server(None, {"PATH": "/none", "LLAMASUP_RUNTIME": program})
    assert found.path == str(tmp_path / "ggml-rpc-server")


def test_machine_without_one_has_a_remedy() -> None:
    with pytest.raises(RuntimeMissing, match="next to llama-server or on PATH"):
        find_rpc_server(None, {"PATH": "/none"})


@pytest.mark.parametrize("name", ["missing-rpc-server", "./rpc-server", "./llama-server", "."])
def test_errors_are_about_an_rpc_server(
    name: str, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-server").unlink()
    with pytest.raises(RuntimeMissing) as missing:
        find_rpc_server(name, {"PATH": "/none"})
    assert "rpc-server" in missing.value.remedy
    assert "embedded" not in missing.value.remedy


def test_rpc_server_of_another_machine_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    broken = tmp_path / "rpc-server"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    with pytest.raises(BrokenRuntime, match="cannot be run on this machine") as found:
        find_rpc_server(str(broken), os.environ)
    assert "Get rpc-server for" in found.value.remedy


def test_plan_checks_the_port_that_rpc_server_would_only_ignore(
    tmp_path: Path, program: str, free_tcp_port: int
) -> None:
    found = find_rpc_server(program, os.environ)
    planner = WorkerPlanner(RpcWorkerOptions(port=free_tcp_port), found, tmp_path, os.environ)
    made = planner.plan(1)
    assert made.argv[:5] == (found.path, "--host", "127.0.0.1", "--port", str(free_tcp_port))
    assert made.address == TcpAddress("127.0.0.1", free_tcp_port)
    with socket.create_server(("127.0.0.1", free_tcp_port)), pytest.raises(PortInUse):
        planner.plan(2)


def test_events_are_about_rpc_server() -> None:
    hung = Diagnosis("hung_start", "llama-server hung.", "See its log (llamasup logs). Check.", (), False, 75)
    event = _renamed(ServerExited("rpc-worker", 1, None, hung, 0.0))
    assert isinstance(event, ServerExited)
    assert (event.diagnosis.message, event.diagnosis.remedy) == ("rpc-server hung.", "Check.")


class WithoutReaders(asyncio.SelectorEventLoop):
    """As the loop of Windows, which has no ``add_reader``."""

    def add_reader(self, *_: object) -> None:
        raise NotImplementedError


def test_tunnel_works_with_an_event_loop_without_readers(tmp_path: Path, program: str) -> None:
    cert, key = make_certificate(tmp_path, "both")
    files = TunnelFiles(cert, cert, key)
    options = RpcWorkerOptions(runtime=program, tunnel=TcpAddress("127.0.0.1", 0), files=files)
    service = RpcWorker(options, Bus())

    async def test() -> None:
        relays = RelayLoop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            accepting = asyncio.ensure_future(service._accept(listening, relays))  # noqa: TID251
            reader, writer = await asyncio.open_connection(
                *listening.getsockname(), ssl=client_context(files), server_hostname="localhost"
            )
            assert await reader.read() == b""  # there is no rpc-server behind it
            writer.close()
            accepting.cancel()
            await asyncio.wait([accepting])
            relays.close()

    with asyncio.Runner(loop_factory=WithoutReaders) as runner:
        runner.run(asyncio.wait_for(test(), PATIENCE_S))
