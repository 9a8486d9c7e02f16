"""Protocols: one request of another API, and its answer, as an exchange sees them (``dialect.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from llamasup.http.heads import HttpError
from llamasup.queueing.endpoint import Endpoint

__all__ = ["ResponseForm", "Translation"]


class ResponseForm(Struct, frozen=True):
    """How the response to a client is framed. ``lines``: the header lines of llamasup. ``load_s``: how long
    the request waited for a load.
    """

    lines: bytes
    http_1_0: bool = False
    close: bool = False
    load_s: float = 0.0


class Translation(Protocol):
    """One request of another API, and its answer."""

    def admit(self, endpoint: Endpoint) -> HttpError | None:
        """Called before the request is sent to ``endpoint``; again if it is sent again. Returns the refusal
        if that server cannot serve it as asked.
        """
        ...

    @property
    def has_begun(self) -> bool:
        """Whether a byte of the response has been sent."""
        ...

    def begin(
        self,
        write: Callable[[bytes], None],
        status: int,
        form: ResponseForm,
        *,
        is_chunked: bool,
        streams_events: bool,
    ) -> Callable[[bytes], None]:
        """llama-server's answer begins. Returns the function that takes its body, as framed by llama-server.

        ``write`` sends to the client.
        """
        ...

    def finish(self) -> int:
        """The answer is complete: send what is left. Returns the status of the response."""
        ...

    def fail(self, error: HttpError) -> None:
        """End a response that has begun: the connection closes after it."""
        ...
