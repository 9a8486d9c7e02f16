"""Ports for servers that have to be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_DICE = random.SystemRandom()  # the usual one is seeded alike in every process that runs tests
_FIRST = 10_000
_LINUX = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """One that nobody has, and that nobody is given who asks for any: it stays free until it is used."""
    while True:
        port = _DICE.randrange(_FIRST, _handed_out_from())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _handed_out_from() -> int:
    """The first of the ports that the system gives to who asks for any."""
    try:
        first = int(_LINUX.read_text().split()[0])
    except OSError:
        return 49_152  # everywhere else
    return first if first > _FIRST else 65_536
