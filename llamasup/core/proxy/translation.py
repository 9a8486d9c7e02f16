"""Protocols: one request of another API, and its answer, as an exchange sees them (``dialect.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.endpoint import Endpoint


class Answered(Struct, frozen=True):
    """How a response ended. ``complete``: the answer of llama-server could be translated to its end.
    ``framed``: the response has its last byte; otherwise the connection closes, so that it looks incomplete.
    """

    status: int
    complete: bool = True
    framed: bool = True


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
        """Called before each attempt to send the request to ``endpoint``. Returns the refusal if that server
        cannot serve it so.
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
        end: Callable[[], None],
    ) -> Callable[[bytes], None]:
        """llama-server's answer begins. Returns the function that takes its body, as framed by llama-server.

        ``write`` sends to the client. ``end`` is called once the response has ended with an error before the
        answer is complete: the server shall not go on.
        """
        ...

    def finish(self) -> Answered:
        """The answer is complete: send what is left."""
        ...

    def fail(self, error: bytes) -> None:
        """End a response that has begun with this error body: the connection closes after it."""
        ...
