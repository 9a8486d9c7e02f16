"""What h11, another reader of HTTP, makes of a client's bytes, beside what came of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import h11

from llamasup.core.observability.counters import RequestRecord
from tests.security.circuit import Outcome, Received

__all__ = ["Reading", "differences", "messages", "read", "reason_to_refuse"]

_PLENTY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """The whole requests, in order, and why reading ended: "" if h11 waits for more."""

    requests: tuple[Received, ...]
    refused: str


def read(raw: bytes) -> Reading:
    """Read ``raw`` as a server that answers all with 200 and keeps the connection as long as it may."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_PLENTY_BYTES)
    connection.receive_data(raw)
    found: list[Received] = []
    request, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                found.append(Received(request.method, request.target, tuple(request.headers), body))
                if request.method == b"CONNECT":
                    return Reading(tuple(found), "CONNECT")
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return Reading(tuple(found), "Connection: close")
                connection.start_next_cycle()
            else:
                return Reading(tuple(found), "")
    except h11.RemoteProtocolError as error:
        return Reading(tuple(found), str(error))


# --- the difference

_KEPT = frozenset(
    b"accept accept-encoding accept-language cache-control content-encoding content-language content-type "
    b"if-match if-modified-since if-none-match if-range if-unmodified-since last-event-id pragma range "
    b"traceparent tracestate user-agent".split()
)


def _forwarded(asked: Received) -> Received:
    """What of a client's request a child is to see, said once more and independently of ``llamasup.http``."""
    nominated = {
        word.strip()
        for name, value in asked.headers
        if name == b"connection"
        for word in value.lower().split(b",")
    }
    kept = [(b"host", b"localhost")]
    for name, value in asked.headers:
        if name in _KEPT and name not in nominated:
            kept.append((name, value))
    target = re.sub(rb"(?i)^https?://[^/?]*", b"", asked.target)
    if not target.startswith((b"/", b"*")):
        target = b"/" + target
    return Received(asked.method, target, (*kept, (b"authorization", b"Bearer own-key")), asked.body)


# Why llamasup may refuse what h11 accepts, by the words of the refusal. What is not here is a difference.
_REASONS = {
    r"is not served here": "methods that llama-server does not have, and other versions of HTTP",
    r"Invalid method encountered|Expected space after method|Pause on PRI": "no method of HTTP/1.1",
    r"Expected HTTP/|Invalid HTTP version|Expected SOURCE|after version|Expected dot": "no version of HTTP/1",
    r"[Uu]rl|request target|Expected space after|fragment": "targets with bytes that no URL has, and no path",
    r"exactly one Host|Host header|is not a name of this server": "X2",
    r"web pages from|Origin header": "X3",
    r"is closed$|^unknown spelling of a path": "X7",
    r"only expectation": "expectations that nobody knows",
    r"Content-Length|Transfer-Encoding": "X9: lengths and codings that readers differ on",
    r"CRLF|CR |LF": "X9: bare LF and CR",
    r"Unexpected whitespace|Invalid header|header value": "X9: folded lines, odd names and values",
    r"chunk": "X9: chunk sizes and extensions",
    r"Data after": "bytes behind the last request of a connection",
}


def reason_to_refuse(message: str) -> str | None:
    """Why a refusal in these words is meant to be; None if nobody has meant it."""
    return next((why for words, why in _REASONS.items() if re.search(words, message)), None)


def messages(told: bytes) -> list[str]:
    """The errors that a client was told, in order."""
    found = re.findall(rb'\{"error":\{.*?\}\}', told)
    return [json.loads(found_item)["error"]["message"] for found_item in found]


# What llamasup accepts and h11 does not. None of it is framing: the request line is written afresh.
_LENIENT = (
    (rb"(?:^|\n)[\r\n]+[A-Z]", "empty lines before a request (RFC 9112 §2.2 asks for it)"),
    (rb"(?:^|\n)[A-Z]+ +\S+ +HTTP/1", "several spaces in a request line (RFC 9112 §3 allows it)"),
    (rb"RTSP/1\.0\r", "a version of HTTP/1 by another name, read as HTTP/1.0 and answered once"),
)


def differences(raw: bytes, outcome: Outcome, records: list[RequestRecord]) -> list[str]:
    """What llamasup made of ``raw`` and h11 did not, or the other way round, unless it is meant."""
    reference = read(raw)
    said = messages(outcome.told)
    asked = list(outcome.asked)
    wrong: list[str] = []
    for index, record in enumerate(records):
        theirs = reference.requests[index] if index < len(reference.requests) else None
        if record.outcome == "refused":
            if record.method == "HEAD":
                message = f"{record.status} is closed"  # the body, which would say why, is left out
            else:
                message = said.pop(0) if said else "nothing was said"
            if theirs is not None and reason_to_refuse(message) is None:
                wrong.append(f"refused without a reason that is known: {message}")
            if outcome.closed and record is records[-1]:
                return wrong
            continue
        if record.outcome != "ok":
            wrong.append(f"became {record.outcome}")
            return wrong
        ours = asked.pop(0)
        if theirs is None:
            if not any(re.search(words, raw) for words, _ in _LENIENT):
                wrong.append(f"accepted what h11 refuses ({reference.refused}): {ours}")
            return wrong
        if ours != _forwarded(theirs):
            wrong.append(f"asked for {ours}, which is not {_forwarded(theirs)}")
    if asked:
        wrong.append(f"asked for more than was recorded: {asked}")
    if len(records) < len(reference.requests) and not outcome.closed:
        wrong.append(f"waits for more where h11 sees {reference.requests[len(records)]}")
    return wrong
