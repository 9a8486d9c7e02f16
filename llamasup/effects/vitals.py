"""How much memory a process holds and how much it has read. psutil, imported late (24 ms)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Vitals", "vitals"]


@dataclass(frozen=True, slots=True)
class Vitals:
    rss_bytes: int
    read_bytes: int
    """Bytes read by system calls; pages that a memory map brings in show in ``rss_bytes`` instead."""


def vitals(pid: int) -> Vitals | None:
    """None if the process is gone or may not be looked at."""
    import psutil

    try:
        process = psutil.Process(pid)
        rss_bytes = process.memory_info().rss
    except psutil.Error:
        return None
    try:
        read_bytes = process.io_counters().read_chars
    except (psutil.Error, AttributeError, NotImplementedError):
        read_bytes = 0  # not on macOS
    return Vitals(rss_bytes, read_bytes)
