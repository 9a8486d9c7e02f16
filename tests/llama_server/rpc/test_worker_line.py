"""The command line of an rpc-server, in the flags of its build."""

from __future__ import annotations

import pytest

from llamasup.errors import BrokenRuntime, UsageInvalid
from llamasup.llama_server.help_text import Capabilities, parse_help
from llamasup.llama_server.rpc.worker_line import (
    WorkerOptions,
    offered_bytes,
    read_worker_help,
    worker_line,
)
from tests.paths import FIXTURES
from tests.planning.plans import GIB, NEW, capabilities, machine

HELP = (FIXTURES / "help" / "rpc-server-b11434.log").read_text()
WITH_MEM = HELP + "  -m, --mem MEM                    backend memory size (in MB)\n"


def worker(text: str = HELP) -> Capabilities:
    return read_worker_help("/bin/rpc-server", parse_help(text))


def line(options: WorkerOptions, text: str = HELP) -> tuple[str, ...]:
    return worker_line(("rpc-server",), worker(text), machine(), options, "127.0.0.1", 50052)[0]


def test_plan_gives_the_address_and_every_core() -> None:
    assert line(WorkerOptions()) == (
        *("rpc-server", "--host", "127.0.0.1", "--port", "50052", "--threads", "8"),
    )


def test_settings_of_the_user_are_passed() -> None:
    argv = line(WorkerOptions(3, ("CUDA0", "CUDA1"), cache=True))
    assert argv[-5:] == ("--threads", "3", "--device", "CUDA0,CUDA1", "--cache")


def test_build_with_a_limit_gets_the_free_memory_less_a_reserve() -> None:
    argv = line(WorkerOptions(), WITH_MEM)
    assert argv[argv.index("--mem") + 1] == str((28 * GIB - int(3.2 * GIB)) >> 20)


def test_limit_of_the_user_needs_a_build_that_has_one() -> None:
    assert "2048" in line(WorkerOptions(memory_bytes=2 * GIB), WITH_MEM)
    with pytest.raises(UsageInvalid, match="--memory is not supported"):
        line(WorkerOptions(memory_bytes=2 * GIB))


def test_more_memory_than_is_free_is_refused() -> None:
    with pytest.raises(UsageInvalid, match="more than the 28 GiB that are free"):
        offered_bytes(machine(), 29 * GIB)


def test_full_machine_offers_nothing() -> None:
    assert offered_bytes(machine(memory_available_bytes=GIB), None) == 0


@pytest.mark.parametrize("text", ["", "  -p, --port PORT        port\n"])
def test_other_program_is_no_rpc_server(text: str) -> None:
    with pytest.raises(BrokenRuntime, match="does not answer --help as an rpc-server does"):
        worker(text)


def test_llama_server_is_no_rpc_server() -> None:
    with pytest.raises(BrokenRuntime):
        read_worker_help("/bin/llama-server", capabilities(NEW).options)
