"""Clients with open requests during a fault, and how their requests ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

import httpx

__all__ = ["Client", "Ending"]

PATIENCE_S = 120.0
# One for all clients: its creation takes 30 ms and would distort the times. Connections are not reused.
_HTTP = httpx.Client(
    timeout=PATIENCE_S,
    verify=False,  # noqa: S501 - there is no TLS
    trust_env=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)


class Ending(Enum):
    """How a request ended. Only the last two break a promise."""

    ANSWERED = "answered"
    ERROR_EVENT = "cut with an error event"
    RESET = "reset in mid-answer"  # without SSE: a cut answer never looks complete
    CUT = "cut without an error event"
    LOST = "lost without a byte"


class Client(threading.Thread):
    """Sends one ``/completion`` and stores the response. Times are monotonic, in seconds."""

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        self.began_s = time.monotonic()
        self.first_byte_s = 0.0
        self.ended_s = 0.0
        self.status: int | None = None
        self.error = ""
        self._url = url
        self._body = body
        self._received = bytearray()
        self._whole = False
        self._body_began = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with _HTTP.stream("POST", f"{self._url}/completion", json=self._body) as response:
                self.first_byte_s = time.monotonic()
                self.status = response.status_code
                for piece in response.iter_raw():
                    self._received += piece
                    self._body_began.set()
            self._whole = True
        except httpx.HTTPError as error:
            self.error = repr(error)
        finally:
            self.ended_s = time.monotonic()
            self._body_began.set()

    def wait_for_body(self) -> bool:
        """Wait until a byte of the body has arrived (True), or the response has ended (False)."""
        assert self._body_began.wait(PATIENCE_S)
        return bool(self._received) and not self.ended_s

    @property
    def has_response(self) -> bool:
        return self.status is not None

    def ending(self) -> Ending:
        """Wait for the end of the response and classify it."""
        self.join(PATIENCE_S)
        if self.status != 200 or not self.ended_s:
            return Ending.LOST
        if not self._body.get("stream"):
            return Ending.ANSWERED if self._whole else Ending.RESET
        last = bytes(self._received).rstrip().rpartition(b"\n\n")[2]
        event = _event(last)
        if self._whole:  # HTTP marks the response as complete, so the stream must be complete
            return Ending.ANSWERED if event.get("stop") is True else Ending.CUT
        return Ending.ERROR_EVENT if event.get("error") else Ending.CUT

    def __str__(self) -> str:
        return f"{self.status} {self.error} …{bytes(self._received[-200:])!r}"


def _event(block: bytes) -> Mapping[str, Any]:
    _, found, text = block.rpartition(b"data: ")
    try:
        event = json.loads(text) if found else {}
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
