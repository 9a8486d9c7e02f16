"""Recognized heads have the same result as parsed ones, for requests and for responses."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from time import monotonic
from typing import Any

import pytest

from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import UnixAddress
from llamasup.core.http.head_cache import KnownHead, compile_head
from llamasup.core.http.heads import DEFAULT_RULES
from llamasup.core.proxy import ProxyConfig, reader
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.reader import RequestReader
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import Limits
from llamasup.core.proxy.upstream import connection as upstream
from llamasup.core.proxy.upstream.connection import Upstream
from llamasup.core.proxy.upstream.pool import Tasks, UpstreamPool
from llamasup.core.queueing.endpoint import Endpoint
from tests.core.proxy.parsers import record_parser_input
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, field, get, post, status

BODY = b'{"model":"tiny"}'
CHAT_POST = post(CHAT, BODY, b"Authorization: Bearer sesame", b"User-Agent: someone")
LATE_LENGTH = (
    get(CHAT, b"Authorization: Bearer sesame", b"cONTENT-lENGTH: 16", b"X: y", method=b"POST") + BODY
)
PLAIN_GET = get(b"/v1/models", b"Authorization: Bearer sesame")

REPEATED = {
    "a chat": CHAT_POST,
    "a length in the middle, oddly spelled": LATE_LENGTH,
    "no body": PLAIN_GET,
    "a body of nothing": post(CHAT, b"", b"Authorization: Bearer sesame"),
    "an id of its own": post(CHAT, BODY, b"Authorization: Bearer sesame", b"X-Request-Id: mine"),
    "a page": post(CHAT, BODY, b"Authorization: Bearer sesame", b"Origin: https://page.example"),
    "no key": post(CHAT, BODY),
    "a foreign host": CHAT_POST.replace(b"localhost", b"elsewhere.example"),
    "chunks": get(CHAT, b"Authorization: Bearer sesame", b"Transfer-Encoding: chunked", method=b"POST")
    + b"3\r\nabc\r\n0\r\n\r\n",
    "an expectation": CHAT_POST.replace(b"User-Agent: someone", b"Expect: 100-continue"),
    "an upgrade": CHAT_POST.replace(b"User-Agent: someone", b"Connection: Upgrade\r\nUpgrade: h2c"),
    "its last": CHAT_POST.replace(b"User-Agent: someone", b"Connection: close"),
    "HTTP/1.0": CHAT_POST.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a head of 5 KiB": CHAT_POST.replace(b"someone", b"s" * 5000),
}


def of_length(digits: bytes, body: bytes = b"") -> bytes:
    return CHAT_POST.replace(b"Content-Length: 16", b"Content-Length: " + digits)[: -len(BODY)] + body


FOLLOWING = REPEATED | {
    "another length": post(CHAT, BODY * 9, b"Authorization: Bearer sesame", b"User-Agent: someone"),
    "zeros before the length": of_length(b"00016", BODY),
    "a space behind the length": of_length(b"16 ", BODY),
    "no length": of_length(b""),
    "a length that is none": of_length(b"16a", BODY),
    "a negative length": of_length(b"-16", BODY),
    "other digits": of_length("١٦".encode(), BODY),
    "more than is taken": of_length(b"4097", b"x" * 4097),
    "more than is believed": of_length(b"99999999999999999999", BODY),
    "a second length": CHAT_POST.replace(b"User-Agent: someone", b"Content-Length: 15"),
    "a coding beside the length": CHAT_POST.replace(b"User-Agent: someone", b"Transfer-Encoding: chunked"),
    "a line end alone": CHAT_POST.replace(b"\r\nUser", b"\nUser"),
    "a folded line": CHAT_POST.replace(b"someone", b"some\r\n one"),
    "another key": CHAT_POST.replace(b"sesame", b"barley"),
    "one letter more": CHAT_POST.replace(b"someone", b"someone!"),
    "empty lines before it": b"\r\n\r\n" + CHAT_POST,
    "nonsense": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "the half of one": CHAT_POST[:70],
    "a head without end": CHAT_POST[:70] + b"x" * 9000,
}


TOLD = [name for name in Request.__struct_fields__ if name != "received_at"]


class RecordedReader:
    """A reader that records its results."""

    def __init__(self, *, remembers: bool) -> None:
        config = ProxyConfig(api_keys=("sesame",), origins=("https://page.example",))
        self.keys = Keys(config.key_file, config.api_keys, monotonic)
        limits = Limits(body_bytes=4096, head_bytes=8192)
        ids = count()
        self._remembers = remembers
        self.reader = RequestReader(
            limits, AccessPolicy(config, self.keys), "127.0.0.1", lambda: b"id-%d" % next(ids)
        )
        self.found: list[object] = []

    def feed(self, *pieces: bytes) -> None:
        """Read, and record the state after each read."""
        with pytest.MonkeyPatch.context() as patch:
            if not self._remembers:
                patch.setattr(reader, "compile_head", lambda read: None)
            for piece in pieces:
                self.reader.feed(piece)
                while self.reader.ready:
                    self.note(self.reader.ready.popleft())
                self.found.append((self.reader.begun, self.reader.length))
                if self.reader.partial is not None:
                    self.note(self.reader.partial)

    def note(self, request: Request) -> None:
        self.found.append({name: getattr(request, name) for name in TOLD})


def with_and_without(name: str, *pieces: bytes) -> None:
    with_it, without = RecordedReader(remembers=True), RecordedReader(remembers=False)
    with_it.feed(*pieces)
    without.feed(*pieces)
    assert with_it.found == without.found, name


@pytest.mark.parametrize("repeated", REPEATED.values(), ids=REPEATED)
def test_requests_after_known_head_parse_the_same(repeated: bytes) -> None:
    often = (repeated,) * 3
    for at in range(1, len(repeated), 7):
        with_and_without("itself", repeated, repeated[:at], repeated[at:], repeated[at:], repeated)
    for name, following in FOLLOWING.items():
        with_and_without(name, *often, following, repeated, following)
        with_and_without(name, *often, following + repeated, repeated + following + repeated)  # pipelined
        with_and_without(name, repeated, following + repeated, following, repeated, following)
        end = following.find(b"\r\n\r\n") + 4
        for at in (60, end - 1, end, end + 1):
            with_and_without(name, *often, following[:at], following[at:] + repeated[:at], repeated[at:])


def test_requests_after_known_head_parse_the_same_byte_by_byte() -> None:
    for name, following in FOLLOWING.items():
        bytewise = (following[at : at + 1] for at in range(min(len(following), 300)))
        with_and_without(name, CHAT_POST, CHAT_POST, CHAT_POST, *bytewise, CHAT_POST)


def test_request_head_is_known_after_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = record_parser_input(monkeypatch, reader, "HttpRequestParser")
    reading = RecordedReader(remembers=True)
    reading.feed(CHAT_POST, CHAT_POST)
    assert shown == [CHAT_POST, CHAT_POST]
    longer = post(CHAT, BODY * 100, b"Authorization: Bearer sesame", b"User-Agent: someone")
    reading.feed(CHAT_POST, longer, longer[:200], longer[200:])
    assert shown == [CHAT_POST, CHAT_POST]
    bodies = [request["body"] for request in reading.found if isinstance(request, dict) and request["body"]]
    assert bodies[-1] == BODY * 100
    assert len(bodies) == 5 + 1  # one arrived in part first, and then completely


def test_changed_keys_make_every_head_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = record_parser_input(monkeypatch, reader, "HttpRequestParser")
    reading = RecordedReader(remembers=True)
    reading.feed(CHAT_POST, CHAT_POST, CHAT_POST)
    assert len(shown) == 2
    reading.keys.epoch += 1
    reading.feed(CHAT_POST)
    assert len(shown) == 3


# --- llama-server's heads

PLAIN = answer(b'{"answer":1}', b"Keep-Alive: timeout=5, max=100")
CLOSING = answer(b"{}", b"Connection: close")
CREATED = PLAIN.replace(b"200 OK", b"201 Created")
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\ndata:1\r\n0\r\n\r\n"
)
ANSWERS = {
    "the same": PLAIN,
    "another length": answer(b"[" + b"1," * 900 + b"2]", b"Keep-Alive: timeout=5, max=100"),
    "another header": answer(b"{}", b"Keep-Alive: timeout=4, max=100"),
    "another status": PLAIN.replace(b"200 OK", b"404 No"),
    "the last one": CLOSING,
    "a stream": STREAM,
    "nothing": PLAIN.replace(b"200 OK", b"204 No Content").partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
    "more than its length": PLAIN + b"x",
    "two": PLAIN * 2,
    "one that comes early": b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN,
    "a second length": PLAIN.replace(b"Server: llama.cpp", b"Content-Length: 3"),
    "a coding beside the length": PLAIN.replace(b"Server: llama.cpp", b"Transfer-Encoding: chunked"),
    "a length that is none": PLAIN.replace(b"Length: 12", b"Length: 1x"),
    "zeros before the length": PLAIN.replace(b"Length: 12", b"Length: 0012"),
    "nonsense": b"nonsense\r\n\r\n",
}


SOCKET, _ = os.pipe()  # nothing arrives at it


class RecordedExchanges:
    """Replaces exchanges: records the calls of an upstream connection."""

    is_head = False
    is_replayable = True
    answered = False

    def __init__(self, *, remembers: bool) -> None:
        self.calls: list[object] = []
        self._remembers = remembers
        loop: Any = None
        endpoint, outbox = Endpoint("tiny", 1, UnixAddress("/nowhere")), Outbox(lambda callback: None)
        self._pool = UpstreamPool(endpoint, Tasks(loop), 1.0, DEFAULT_RULES, outbox)
        self.is_open = False

    def receive(self, *answers: tuple[bytes, ...]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self._remembers:
                patch.setattr(upstream, "compile_head", lambda read: None)
            for pieces in answers:
                connection = self._pool.take(0.0) if self.is_open else None
                if connection is None:
                    connection = Upstream(self._pool)
                    connection.connection_made(_Transport(self))
                    self.is_open = True
                connection.send(self, b"GET / HTTP/1.1\r\n\r\n", b"")  # type: ignore[arg-type]
                for piece in pieces:
                    if self.is_open:
                        connection.data_received(piece)
                if self.is_open and connection.exchange is not None:
                    connection.eof_received()

    def begin(self, connection: Upstream, framing: bytes | None, body: bytes) -> None:
        self.calls += [connection.status, connection.lines, framing, connection.streams_events, body]

    def relay(self, piece: bytes) -> None:
        self.calls.append(piece)

    def finished(self) -> None:
        self.calls.append("finished")

    def upstream_broke(self, reason: str, *, closed: bool = False) -> None:
        self.calls.append(f"broke, {closed}")

    def last_bytes(self) -> bytes:
        return b"".join(piece for piece in self.calls if isinstance(piece, bytes))[-8:]


class _Transport(asyncio.Transport):
    def __init__(self, exchanges: RecordedExchanges) -> None:
        super().__init__()
        self._exchanges = exchanges

    def write(self, data: Any) -> None:
        self._exchanges.calls.append("asked")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return SOCKET

    def is_closing(self) -> bool:
        return not self._exchanges.is_open

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        if self._exchanges.is_open:
            self._exchanges.is_open = False
            self._exchanges.calls.append("aborted")


@pytest.mark.parametrize(
    "repeated", [PLAIN, CREATED, CLOSING, STREAM], ids=["plain", "201", "last", "stream"]
)
def test_responses_after_known_head_parse_the_same(repeated: bytes) -> None:
    for name, following in ANSWERS.items():
        for at in (0, 1, 30, following.find(b"\r\n\r\n") + 4, len(following) - 1, len(following)):
            pieces = tuple(piece for piece in (following[:at], following[at:]) if piece)
            both = [RecordedExchanges(remembers=True), RecordedExchanges(remembers=False)]
            for exchanges in both:
                exchanges.receive((repeated,), (repeated,), (repeated,), pieces, (repeated,), pieces)
            assert both[0].calls == both[1].calls, name
            assert "finished" in both[0].calls


def test_head_of_two_answers_in_one_read_is_not_remembered() -> None:
    """The parser reads both at once: its state is that of the second, the bytes are those of the first."""
    for name, first in ANSWERS.items():
        exchanges = RecordedExchanges(remembers=True), RecordedExchanges(remembers=False)
        for side in exchanges:
            side.receive((PLAIN,), (PLAIN,), (first + PLAIN,), (first,), (first,), (PLAIN,))
        assert exchanges[0].calls == exchanges[1].calls, name


def test_response_head_is_known_after_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = record_parser_input(monkeypatch, upstream, "HttpResponseParser")
    exchanges = RecordedExchanges(remembers=True)
    exchanges.receive((PLAIN,), (PLAIN,))
    assert len(shown) == 2
    longer = ANSWERS["another length"]
    exchanges.receive((PLAIN,), (longer,), (longer[:300], longer[300:]))
    assert len(shown) == 2
    assert exchanges.calls.count("finished") == 5


# --- the heads themselves


def test_unusual_response_heads_are_not_remembered() -> None:
    assert compile_head(b"\r\n" + PLAIN_GET) is None
    assert compile_head(PLAIN_GET[:-1]) is None
    assert compile_head(post(CHAT, BODY, b"Cookie: " + b"x" * 4096)) is None
    assert compile_head(CHAT_POST.replace(b"Length: 16", b"Length: 16 ")) is None
    assert compile_head(CHAT_POST.replace(b"Length: 16", b"Length: 1234567890")) is None


def test_head_ends_with_its_empty_line() -> None:
    known = compile_head(CHAT_POST)
    assert isinstance(known, KnownHead)
    assert known.length_in(CHAT_POST) == b"16"
    assert CHAT_POST[known.bytes_beside_digits + 2 :] == BODY
    assert known.length_in(CHAT_POST[: -len(BODY) - 1]) is None
    assert known.length_in(b"") is None


def test_requests_with_known_head_have_own_ids_and_records(rig: Rig) -> None:
    client = rig.connect()
    child: Wire | None = None
    ids = set()
    for number in range(6):
        body = b"{%s}" % (b" " * number)
        client.send(post(CHAT, body))
        child = child or rig.accept()
        received = child.message()
        assert received[1] == body
        child.send(answer(b"%d" % number))
        head, answered = client.message()
        assert (status(head), answered) == (200, b"%d" % number)
        ids.add(field(head, b"x-request-id"))
        assert rig.record().bytes_in == len(body)
    assert len(ids) == 6
