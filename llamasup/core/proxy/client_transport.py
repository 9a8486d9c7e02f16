"""The transport of one client: its phase and deadlines, what is paused, and its end.

It knows no request. ``Downstream`` serves the requests that arrive on it. The sweep of the proxy checks the
times of the phases, so no phase has a timer of its own.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any, Final, cast

from msgspec import Struct

from llamasup.core.proxy.context import ProxyContext
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import Limits

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with timeout 0: close() drops unsent bytes and sends a reset


class Phase(Enum):
    NEW = "new"
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    PAUSED = "paused"
    BUSY = "busy"
    CLOSING = "closing"


# Looking up a member of an Enum is a call of a Python function in Python 3.11.
NEW: Final = Phase.NEW
IDLE: Final = Phase.IDLE
HEAD: Final = Phase.HEAD
BODY: Final = Phase.BODY
PAUSED: Final = Phase.PAUSED
BUSY: Final = Phase.BUSY
CLOSING: Final = Phase.CLOSING


class PhaseRule(Struct, frozen=True):
    """``limit``: the field of ``Limits`` with the longest time in seconds; empty: it may last for ever.

    ``part``: the part of the request that was too slow, for the 408; empty: the connection is closed.
    """

    meaning: str
    limit: str = ""
    part: str = ""


PHASES: Final[Mapping[Phase, PhaseRule]] = MappingProxyType(
    {
        NEW: PhaseRule("accepted, and no byte has arrived", "head_s"),
        IDLE: PhaseRule("between two requests", "keepalive_s"),
        HEAD: PhaseRule("from the first byte of a head to its last", "head_s", part="head"),
        BODY: PhaseRule(
            "waiting for the next piece of a body; a slow body gets less time", "body_idle_s", part="body"
        ),
        PAUSED: PhaseRule("the client is not read, because llama-server does not take the body"),
        BUSY: PhaseRule("a request waits, or is served; it has limits of its own"),
        CLOSING: PhaseRule("the last response is written, and the client reads it", "linger_s"),
    }
)


def longest_s(phase: Phase, limits: Limits) -> float:
    """Returns how long a connection may stay in this phase, in seconds."""
    limit = PHASES[phase].limit
    return float(getattr(limits, limit)) if limit else float("inf")


class ClientTransport(asyncio.Protocol):
    """``needs_key``: whether clients have to send an API key."""

    transport: asyncio.Transport
    send: Callable[[bytes], None]

    def __init__(self, proxy: ProxyContext, *, needs_key: bool) -> None:
        self.proxy = proxy
        self._outbox = proxy.outbox
        self.paused = False  # the write buffer is full
        self._idle: OrderedDict[Any, None] = proxy.clients.idle
        self._idle_of_client: OrderedDict[Any, None] = self._idle
        self._unauthenticated = needs_key  # until the client sends a valid key
        self._reading = True
        self._closing = False
        self._phase = NEW
        self._since = 0.0  # when the phase began; of a body: when its last piece came, or should have come
        self._body_since = 0.0  # when the current body began, plus the time of pauses; 0: no body
        self._body_base = 0  # the bytes of the body that had arrived by then
        self._unsent = 0
        self._unsent_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses
        self.send = partial(self._outbox.put, self.transport)  # in C: one Python call less for each chunk
        self.transport.set_write_buffer_limits(high=self.proxy.limits.write_buffer_bytes)
        self._since = monotonic()

    # --- reading

    def _pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    def _become_idle(self, now: float) -> None:
        if not self._unauthenticated:
            self._idle[self] = self._idle_of_client[self] = None
        self._phase = IDLE
        self._since = now

    # --- a body

    def _await_body(self, request: Request) -> None:
        """Wait for the next piece, with a timeout for each piece and a minimum rate for the whole body."""
        now, limits = monotonic(), self.proxy.limits
        if not self._body_since:
            self._body_since = now
            self._body_base = request.body_bytes
        self._phase = BODY
        earned_s = (request.body_bytes - self._body_base) / limits.body_rate_bytes
        self._since = min(now, self._body_since + earned_s)

    def pause_upload(self) -> None:
        self._phase = PAUSED
        self._pause_reading()

    def resume_body(self, request: Request, paused_s: float = 0.0) -> None:
        if self._body_since:
            self._body_since += paused_s
        self._await_body(request)
        self._resume_reading()

    # --- the end

    def keeps_alive(self, request: Request) -> bool:
        return request.keep_alive and not self.proxy.draining

    def close(self, *, linger: bool = False) -> None:
        if self._closing:
            return
        self._closing = True
        self._phase = CLOSING
        self._since = monotonic()
        self._outbox.flush()
        if not linger:
            self.transport.close()
            return
        if self.transport.can_write_eof():  # not with TLS, where only the sweep closes
            self.transport.write_eof()
        self._resume_reading()

    def _reset(self) -> None:
        """Reset the connection. After a close, a body without length or chunks would look complete."""
        self._outbox.flush()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def close_if_idle(self) -> None:
        """Close the connection if no request runs: for a drain, or to make room for a new connection."""
        if self._phase in (IDLE, NEW) and not self._closing:
            self.close()

    def _late_part(self, now: float) -> str:
        """Check the timeouts of writing, of idling and of the end. Returns the part of a request that took
        too long to arrive, or an empty text.
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.paused or self._closing):
            if unsent != self._unsent:
                self._unsent = unsent
                self._unsent_since = now
            elif now - self._unsent_since >= self.proxy.limits.send_stall_s:
                self.transport.abort()
        elif now - self._since < longest_s(self._phase, self.proxy.limits):
            pass
        elif self._closing:
            if self.transport.is_closing():
                self.transport.abort()
            else:
                self.transport.close()  # the linger time has passed
        elif part := PHASES[self._phase].part:
            return part
        else:
            self.close()
        return ""
