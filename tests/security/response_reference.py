"""What h11 makes of a child's response, and whether the client can take what it was told for more."""

from __future__ import annotations

import re

import h11
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.observability.counters import RequestRecord
from tests.security.circuit import Outcome

__all__ = ["misread"]


class Response(Struct, frozen=True):
    """``whole``: its end was seen, and nothing behind it. ``refused``: why h11 would not read it, if so."""

    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    whole: bool = False
    refused: str = ""


def read(raw: bytes, method: bytes, *, ended: bool) -> Response:
    """The response to a request with ``method``. ``ended``: the connection closed behind ``raw``."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/a", headers=[("Host", "localhost")]))
    connection.send(h11.EndOfMessage())
    found = Response()
    try:
        connection.receive_data(raw)
        if ended:
            connection.receive_data(b"")
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                found = Response(event.status_code, tuple(event.headers))
            elif isinstance(event, h11.Data):
                found = Response(found.status, found.headers, found.body + event.data)
            elif isinstance(event, h11.EndOfMessage):
                left = connection.trailing_data[0]
                return Response(
                    found.status, found.headers, found.body, whole=not left, refused="more" if left else ""
                )
            elif not isinstance(event, h11.InformationalResponse):
                return found
    except h11.RemoteProtocolError as error:
        return Response(found.status, found.headers, found.body, refused=str(error))


_OURS = frozenset(
    b"content-length transfer-encoding connection x-request-id server-timing content-type retry-after"
    b" content-security-policy x-content-type-options".split()
)
# Accepted here and refused by h11; none of it is framing, and status lines are written afresh.
_LENIENT = (
    (rb"(?:^|\n)HTTP/1\.[01]  ", "several spaces in a status line"),
    (rb"(?:^|\n)HTTP/1\.[01] [0-9]{3}\r\n", "no space behind the status"),
    (rb"(?:^|\n)HTTP/1\.[01] [0-9]{3} [^\r\n]*[\x00-\x1f\x7f]", "control characters in a reason"),
    (rb"\n0{17}", "a chunk size behind more zeros than h11 reads: the same number, and passed on as it is"),
)


def _announces_a_body_that_may_not_be(response: Response, method: bytes) -> bool:
    if method != b"HEAD" and response.status not in (204, 304):
        return False
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in response.headers
    )


def misread(
    raw: bytes, method: bytes, outcome: Outcome, records: list[RequestRecord], *, closes: bool
) -> list[str]:
    """What is wrong with what the client was told, where the child answered ``method`` with ``raw``."""
    told = read(outcome.told, method, ended=outcome.closed)
    theirs = read(raw, method, ended=closes)
    if theirs.refused == "more" and _announces_a_body_that_may_not_be(theirs, method):
        theirs = replace(theirs, whole=True, refused="")  # it is dropped, with its connection
    if not records:
        return [f"waits for more of {theirs}"] if theirs.whole and theirs.refused == "" else []
    (record,) = records
    if record.outcome == "ok":
        lenient = not theirs.whole and any(re.search(words, raw) for words, _ in _LENIENT)
        if told.refused or not told.whole:
            return [] if lenient else [f"told {told}"]
        if not theirs.whole:
            return [] if lenient else [f"passed on what h11 refuses: {theirs} as {told}"]
        if (told.status, told.body) != (theirs.status, theirs.body):
            return [f"passed {theirs} on as {told}"]
        new = {field for field in told.headers if field[0] not in _OURS} - set(theirs.headers)
        return [f"made up {new}"] if new else []
    if told.whole and (told.status != 502 or told.refused):
        return [f"looks whole and is not: {told}"]
    return []
