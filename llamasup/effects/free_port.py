"""A loopback port for a child whose build has no Unix sockets."""

from __future__ import annotations

import socket

__all__ = ["free_loopback_port"]


def free_loopback_port() -> int:
    """A port that was free a moment ago; if somebody takes it first, the next start asks for another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
