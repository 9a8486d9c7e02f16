"""An HTTP connection of a soak client, with a configurable speed, and the classification of its answers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import httptools

__all__ = ["Answer", "Outcome", "Wire", "complete_text", "events_of", "outcome_of", "received_text"]

PATIENCE_S = 120.0
"""A request may wait this long for its model (S9). A longer wait counts as lost."""
SMALL_BUFFER_BYTES = 4096


class Outcome(StrEnum):
    """How a request ended. Only the last one breaks a promise."""

    RIGHT = "right answer"
    REFUSED = "refused as expected"
    ABANDONED = "left by the client"
    CUT = "ended by an error"
    LOST = "lost"


@dataclass(slots=True)
class Answer:
    """One response. ``whole``: HTTP marked its end. ``timed_out``: its end did not arrive in time."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False
    timed_out: bool = False

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        """The parsed body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error(self) -> Mapping[str, Any]:
        """The error of a complete error response; otherwise empty."""
        parsed = self.json
        error = parsed.get("error") if isinstance(parsed, dict) else None
        return error if self.whole and isinstance(error, dict) and error.get("message") else {}

    def __str__(self) -> str:
        end = "whole" if self.whole else "late" if self.timed_out else "broken off"
        return f"{self.status or 'no answer'}, {end}, {len(self.body)} bytes …{bytes(self.body[-160:])!r}"


class Wire:
    """One connection. ``small``: with a small receive buffer, so that a slow reader blocks the sender."""

    def __init__(self, port: int, *, small: bool = False) -> None:
        self._port = port
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        if small:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        self._parser = httptools.HttpResponseParser(self)
        self._now = Answer()
        self._inject_fault: deque[Answer] = deque()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.get_running_loop().sock_connect(self._sock, ("127.0.0.1", self._port))
        except BaseException:
            self._sock.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    async def send(self, message: bytes) -> None:
        """Send the message, or as much as the server accepts: an early refusal still has a response."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.get_running_loop().sock_sendall(self._sock, message)
        except ConnectionError:
            pass

    async def answer(self, *, step: int = 65_536, pause_s: float = 0.0) -> Answer:
        """The next answer, ``step`` bytes at a time with a pause before each."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not self._inject_fault:
                    if pause_s:
                        await asyncio.sleep(pause_s)
                    received = await self._receive(step)
                    if not received:
                        return self._now
                    self._parser.feed_data(received)
        except TimeoutError:
            self._now.timed_out = True
            return self._now
        return self._inject_fault.popleft()

    async def read(self, max_bytes: int) -> int:
        """Read up to ``max_bytes`` bytes. Returns their number."""
        count = 0
        while count < max_bytes:
            received = await self._receive(min(max_bytes - count, 65_536))
            if not received:
                break
            count += len(received)
        return count

    def reset(self) -> None:
        """Close with a RST, like a client that crashes."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    async def _receive(self, max_bytes: int) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._sock, max_bytes)
        except ConnectionError:
            return b""

    # --- callbacks of httptools

    def on_message_begin(self) -> None:
        self._now = Answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._now.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._now.body += body

    def on_message_complete(self) -> None:
        self._now.whole = True
        self._inject_fault.append(self._now)
        self._now = Answer()


def outcome_of(answer: Answer, correct: bool) -> Outcome:
    """``correct``: whether a complete answer has the expected content.

    A started answer may be cut if the client can detect it: by an error event in a stream, otherwise by a
    missing end in HTTP. A client without a byte must not notice the fault (S10, S12).
    """
    if answer.whole:
        return Outcome.RIGHT if answer.status == 200 and correct else Outcome.LOST
    if answer.timed_out or answer.status != 200:
        return Outcome.LOST
    if answer.is_stream:
        last = deque(events_of(answer.body), maxlen=1)
        return Outcome.CUT if last and last[0].get("error") else Outcome.LOST
    return Outcome.CUT


def complete_text(answer: Answer) -> str:
    """The text of a complete answer of any of the three APIs; ``""`` for a stream without its end."""
    if not answer.is_stream:
        return received_text(answer)
    events = list(events_of(answer.body))
    ended = answer.body.endswith(b"data: [DONE]\n\n") or (bool(events) and events[-1].get("stop") is True)
    return received_text(answer) if ended else ""


def received_text(answer: Answer) -> str:
    """The text received so far."""
    if answer.is_stream:
        return "".join(map(_text, events_of(answer.body)))
    parsed = answer.json
    return _text(parsed) if isinstance(parsed, dict) else ""


def _text(message: Mapping[str, Any]) -> str:
    if "content" in message:
        return str(message["content"])
    text = ""
    for choice in message.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        text += part.get("content") or part.get("text") or ""
    return text


def events_of(body: bytes | bytearray) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a stream."""
    for block in bytes(body).split(b"\n\n"):
        _, found, text = block.rpartition(b"data: ")
        if found and text != b"[DONE]":
            try:
                event = json.loads(text)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
