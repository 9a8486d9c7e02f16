"""The command line of an RPC worker, with a reason for each flag, and the memory that it offers (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from llamasup.errors import BrokenRuntime, UsageInvalid
from llamasup.llama_server.argv_builder import CommandLine, ExtraArgs, Reason
from llamasup.llama_server.help_text import Capabilities, Option
from llamasup.system.hardware.facts import Hardware
from llamasup.system.text import memory_text

__all__ = ["WorkerOptions", "offered_bytes", "read_worker_help", "worker_line"]

_RESERVE_SHARE = 0.1
_RESERVE_BYTES = 1 << 30
_MIB = 1 << 20
_MEMORY = ("--mem", "-m")  # until 2025


class WorkerOptions(Struct, frozen=True):
    """The user's own choices. ``memory_bytes`` None: planned."""

    threads: int | None = None
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cache: bool = False


def read_worker_help(path: str, options: tuple[Option, ...], lines: Sequence[str] = ()) -> Capabilities:
    """What an ``rpc-server`` accepts. Raises BrokenRuntime for another program."""
    found = Capabilities("", options, ())
    if not found.knows("--host") or not found.knows("--port") or found.knows("--ctx-size"):
        raise BrokenRuntime(
            f"{path} does not answer --help as an rpc-server does.",
            remedy="Give the folder or the path of llama.cpp's rpc-server with --runtime.",
            lines=tuple(lines)[-4:],
        )
    return found


def offered_bytes(machine: Hardware, asked_bytes: int | None) -> int:
    """The memory of the host for the layers of others: what is free, less a reserve of 10 %, at least 1 GiB.

    Raises UsageInvalid if ``asked_bytes`` is more than is free.
    """
    free = machine.memory_available_bytes
    if asked_bytes is not None:
        if asked_bytes > free:
            raise UsageInvalid(
                f"--memory {memory_text(asked_bytes)} is more than the {memory_text(free)} that are free.",
                remedy="Give less, or free memory.",
            )
        return asked_bytes
    return max(0, free - max(_RESERVE_BYTES, int(machine.memory_total_bytes * _RESERVE_SHARE)))


def worker_line(
    command: tuple[str, ...],
    capabilities: Capabilities,
    machine: Hardware,
    options: WorkerOptions,
    host: str,
    port: int,
) -> tuple[tuple[str, ...], tuple[Reason, ...]]:
    """The command line and its reasons. Raises UsageInvalid."""
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
    bytes_ = offered_bytes(machine, options.memory_bytes)
    if options.memory_bytes is not None or not options.devices:
        asked = None if options.memory_bytes is None else "--memory"
        line.give(_MEMORY, bytes_ // _MIB, "the free memory less a reserve", asked=asked, otherwise=_ALL)
    if options.cache:
        line.give("--cache", None, "set with --cache", asked="--cache")
    return line.argv, line.reasons


_ALL = "this build has no limit, and offers all memory of its devices"
