"""What the proxy can be told. The defaults are the promises (X1–X9)."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamasup.core.http import OWN_RULES, HeadRules

__all__ = ["Limits", "ProxyConfig"]

MIB = 1 << 20
KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Limits:
    """How much and how long one connection may ask of us (X8). A sweep every ``sweep_s`` keeps the times."""

    body_bytes: int = 32 * MIB
    head_bytes: int = 64 * KIB
    headers: int = 100
    head_s: float = 10.0  # from the first byte of a head to its end
    body_idle_s: float = 30.0
    keepalive_s: float = 75.0
    send_stall_s: float = 60.0  # a client that takes no byte at all for this long is gone
    write_buffer_bytes: int = 64 * KIB  # above it the upstream is paused
    pipelined_bytes: int = 64 * KIB  # held while a request is in flight; above it the client is paused
    linger_s: float = 2.0  # after a refusal in mid-body, so that the client reads it before the reset
    connect_s: float = 5.0
    sweep_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """``hosts``: names accepted in Host beside the loopback ones and the bound address. ``origins``: web
    pages that may call, as ``https://name[:port]``. ``admin_keys`` may do what ``api_keys`` may, and control.
    ``open_paths`` lifts X7 for these paths. ``route_by_model``: read ``model`` in the body for the backend.
    ``rules``: what is left for llama-server to judge. If all (``transparent``), the door stands open: of the
    rest here only the limits count.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    open_paths: frozenset[str] = frozenset()
    route_by_model: bool = True
    rules: HeadRules = OWN_RULES
    limits: Limits = field(default_factory=Limits)
