"""The command line of an RPC worker, with a reason for each flag (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs, Reason
from llamasup.core.llama_server.help_text import Capabilities, Option
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.text import memory_text
from llamasup.errors import BrokenRuntime, DoesNotFit, UsageInvalid

_RESERVE_SHARE = 0.1
_RESERVE_BYTES = 1 << 30
_MIB = 1 << 20
_MEMORY = ("--mem", "-m")  # builds until 2025 have it


class WorkerOptions(Struct, frozen=True):
    """The user's own choices. ``memory_bytes`` None: llamasup chooses."""

    threads: int | None = None
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cache: bool = False


class WorkerLine(Struct, frozen=True):
    """The command line of a worker.

    ``limit_bytes``: the memory that the worker offers; None: all memory of its devices.
    """

    argv: tuple[str, ...]
    reasons: tuple[Reason, ...]
    limit_bytes: int | None


def read_worker_help(path: str, options: tuple[Option, ...], lines: Sequence[str] = ()) -> Capabilities:
    """Read what an ``rpc-server`` accepts. Raises BrokenRuntime for another program."""
    found = Capabilities("", options, (), program="rpc-server")
    if not found.knows("--host") or not found.knows("--port") or found.knows("--ctx-size"):
        raise BrokenRuntime(
            f"{path} does not answer --help as an rpc-server does.",
            remedy="Give the path of llama.cpp's rpc-server with --runtime.",
            lines=tuple(lines)[-4:],
        )
    return found


def check_memory(machine: Hardware, options: WorkerOptions) -> None:
    """Raise UsageInvalid if the user offers more than is free. A later start keeps the user's choice."""
    asked, free = options.memory_bytes, machine.memory_available_bytes
    if asked is not None and asked > free:
        raise UsageInvalid(
            f"--memory {memory_text(asked)} is more than the {memory_text(free)} that are free.",
            remedy="Give less, or free memory.",
        )


def worker_line(
    command: tuple[str, ...],
    capabilities: Capabilities,
    machine: Hardware,
    options: WorkerOptions,
    host: str,
    port: int,
) -> WorkerLine:
    """Return the command line and its reasons. Raises UsageInvalid, and DoesNotFit if no memory is free."""
    line = CommandLine(command, capabilities, ExtraArgs())
    line.give("--host", host, "where clients connect", essential=True)
    line.give("--port", port, "where clients connect", essential=True)
    if options.threads is not None:
        line.give("--threads", options.threads, "set with --threads", asked="--threads")
    else:
        why = "one for each core that this process may use; rpc-server takes half of them by itself"
        line.give("--threads", machine.physical_cores, why)
    if options.devices:
        line.give("--device", ",".join(options.devices), "set with --device", asked="--device")
    limit = _limit_bytes(capabilities, machine, options)
    if limit is not None:
        asked = None if options.memory_bytes is None else "--memory"
        why = "set with --memory" if asked else "the free memory less a reserve"
        line.give(_MEMORY, limit // _MIB, why, asked=asked)
    elif capabilities.knows(*_MEMORY):
        line.leave_out(_MEMORY[0], "it would limit a GPU by the memory of the host")
    if options.cache:
        line.give("--cache", None, "set with --cache", asked="--cache")
    return WorkerLine(line.argv, line.reasons, limit)


def _limit_bytes(capabilities: Capabilities, machine: Hardware, options: WorkerOptions) -> int | None:
    """The memory to offer; None: all memory of the devices.

    rpc-server reads 0 as no limit. The limit is that of any device, also of a GPU, so it is chosen only for
    the CPU.
    """
    if options.memory_bytes is not None:
        if options.memory_bytes < _MIB:
            raise UsageInvalid(
                f"--memory {memory_text(options.memory_bytes)} is less than 1 MiB.", remedy="Give more."
            )
        return options.memory_bytes
    if options.devices != ("CPU",) or not capabilities.knows(*_MEMORY):
        return None
    reserve = max(_RESERVE_BYTES, int(machine.memory_total_bytes * _RESERVE_SHARE))
    free = machine.memory_available_bytes
    if free - reserve < _MIB:
        raise DoesNotFit(
            f"This machine has no memory to offer: {memory_text(free)} are free, and {memory_text(reserve)} "
            "stay reserved.",
            remedy="Free memory, or give the size yourself with --memory.",
        )
    return free - reserve
