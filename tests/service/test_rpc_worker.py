"""What ``llamasup rpc-worker`` refuses, and its plan. tests/real/test_rpc.py has a real rpc-server."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from llamasup.errors import PortInUse, RuntimeMissing, UnsafeBind, UsageInvalid
from llamasup.http.address import TcpAddress
from llamasup.llama_server.rpc.find import find_rpc_server
from llamasup.service.rpc_worker import RpcWorkerOptions, WorkerPlanner, check_listen
from tests.paths import FIXTURES


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
    with pytest.raises(RuntimeMissing, match="neither ggml-rpc-server nor rpc-server"):
        find_rpc_server(program, os.environ)


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
