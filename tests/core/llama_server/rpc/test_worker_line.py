"""The command line of an rpc-server, in the flags of its build."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.help_text import Capabilities, parse_help
from llamasup.core.llama_server.rpc.worker_line import (
    WorkerOptions,
    check_memory,
    read_worker_help,
    worker_line,
)
from llamasup.core.system.hardware.facts import Hardware
from llamasup.errors import BrokenRuntime, DoesNotFit, UsageInvalid
from tests.core.planning.plans import GIB, NEW, capabilities, machine
from tests.kit.paths import FIXTURES

HELP = (FIXTURES / "help" / "rpc-server-b11434.log").read_text()
WITH_MEM = HELP + "  -m, --mem MEM                    backend memory size (in MB)\n"


def worker(text: str = HELP) -> Capabilities:
    return read_worker_help("/bin/rpc-server", parse_help(text))


def line(options: WorkerOptions, text: str = HELP, host: Hardware | None = None) -> tuple[str, ...]:
    return worker_line(("rpc-server",), worker(text), host or machine(), options, "127.0.0.1", 50052).argv


def test_plan_gives_the_address_and_every_core() -> None:
    assert line(WorkerOptions()) == (
        *("rpc-server", "--host", "127.0.0.1", "--port", "50052", "--threads", "8"),
    )


def test_settings_of_the_user_are_passed() -> None:
    argv = line(WorkerOptions(3, ("CUDA0", "CUDA1"), cache=True))
    assert argv[-5:] == ("--threads", "3", "--device", "CUDA0,CUDA1", "--cache")


CPU = WorkerOptions(devices=("CPU",))


def test_cpu_worker_of_a_build_with_a_limit_offers_the_free_memory_less_a_reserve() -> None:
    argv = line(CPU, WITH_MEM)
    assert argv[argv.index("--mem") + 1] == str((28 * GIB - int(3.2 * GIB)) >> 20)


@pytest.mark.parametrize(
    ("options", "text"),
    [(WorkerOptions(), WITH_MEM), (WorkerOptions(devices=("CPU", "CUDA0")), WITH_MEM), (CPU, HELP)],
)
def test_worker_that_may_have_a_gpu_gets_no_limit_of_the_host(options: WorkerOptions, text: str) -> None:
    made = worker_line(("rpc-server",), worker(text), machine(), options, "127.0.0.1", 50052)
    assert "--mem" not in made.argv
    assert made.limit_bytes is None


def test_limit_of_the_user_needs_a_build_that_has_one() -> None:
    assert "2048" in line(WorkerOptions(memory_bytes=2 * GIB), WITH_MEM)
    with pytest.raises(UsageInvalid, match=r"--memory is not supported: this rpc-server has no --mem"):
        line(WorkerOptions(memory_bytes=2 * GIB))


def test_more_memory_than_is_free_is_refused_only_at_the_first_start() -> None:
    much = WorkerOptions(memory_bytes=29 * GIB)
    with pytest.raises(UsageInvalid, match="more than the 28 GiB that are free"):
        check_memory(machine(), much)
    check_memory(machine(), WorkerOptions(memory_bytes=28 * GIB))
    check_memory(machine(), WorkerOptions())
    assert str(29 << 10) in line(much, WITH_MEM)


def test_no_limit_of_zero_is_passed_which_would_be_none() -> None:
    with pytest.raises(UsageInvalid, match="less than 1 MiB"):
        line(WorkerOptions(memory_bytes=0), WITH_MEM)
    full = machine(memory_available_bytes=GIB)
    with pytest.raises(DoesNotFit, match=r"no memory to offer: 1\.0 GiB are free"):
        line(CPU, WITH_MEM, full)
    assert "--mem" not in line(CPU, HELP, full)


@pytest.mark.parametrize("text", ["", "  -p, --port PORT        port\n"])
def test_other_program_is_no_rpc_server(text: str) -> None:
    with pytest.raises(BrokenRuntime, match="does not answer --help as an rpc-server does"):
        worker(text)


def test_llama_server_is_no_rpc_server() -> None:
    with pytest.raises(BrokenRuntime):
        read_worker_help("/bin/llama-server", capabilities(NEW).options)
