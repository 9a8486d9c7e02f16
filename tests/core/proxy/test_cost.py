"""The cost of one request and of one streamed chunk, counted in calls, writes and system calls.

These counts are the same on every machine. They rise with each parser pass, task, clock or second write that
is added to the path of every token. The figures are what the proxy needs today. If it needs less, lower them.
To raise them, give a reason, and measure the figures in `docs/performance.md` again (P1, P2).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.core.proxy import Proxy, ProxyConfig, reader
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.exchange import Exchange
from llamasup.core.proxy.upstream import connection as upstream
from llamasup.core.proxy.upstream.connection import Upstream
from llamasup.core.proxy.upstream.pool import UpstreamPool
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.settings.model import NO_REPAIRS
from llamasup.service.answer_stages import ANSWER_STAGES
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.parsers import record_parser_input
from tests.core.proxy.rig import CHAT, answer, chunk, post
from tests.kit.backends import Unlisted
from tests.kit.upstream import CHUNK, PLAIN_BODY, plain_response, stream_head

# Calls of Python functions and of C functions, which are the same in Python 3.11 to 3.13. A request may have
# one C call more than it needs, so that a line can be written in another way; a chunk has no margin.
REQUEST_CALLS = (59, 50)
CHUNK_CALLS = (4, 3)  # one of them decides when the bytes are written
KEPT_CALLS = (2, 4)  # more, so that the stream can be continued: 0.2 µs in place of 7

REPEATS = 20
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"Tell me a story about a llama."}]}'
REQUEST = post(CHAT, BODY, b"Authorization: Bearer sesame", b"User-Agent: someone", b"Accept: */*")
STREAM_REQUEST = post(CHAT, BODY[:-1] + b',"stream":true}', b"Authorization: Bearer sesame")


SOCKET, _ = os.pipe()  # nothing arrives at it


class Socket:
    """A transport that accepts all bytes and is never full."""

    def write(self, piece: bytes) -> None: ...

    def abort(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return SOCKET if name == "socket" else ("127.0.0.1", 1)


_TINY = ResolvedModel(("tiny",))


class OneModel(Unlisted):
    """With everything that P1 requires: a key, routing by model, ids, metrics."""

    def __init__(self, *, continues_streams: bool) -> None:
        self.endpoint = Endpoint("tiny", 1, UnixAddress("/nowhere"))
        self.model = _TINY
        self.served = self
        self.queue = RequestQueue(
            lambda: (self.endpoint,), timeout_s=1.0, continues_streams=continues_streams
        )

    repairs = NO_REPAIRS

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        return self.endpoint.lease_if_free(infers=infers)

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Self:
        assert model == "tiny"
        return self


class Calls:
    """Counts calls by name, including those of the stand-ins of this module."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.c: Counter[str] = Counter()

    def count(self, work: Callable[[], None]) -> None:
        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                self.python[frame.f_code.co_name] += 1
            elif event == "c_call":
                self.c[argument.__name__] += 1

        outer = sys.getprofile()
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(outer)
        self.c["setprofile"] -= 1

    def per_repeat(self) -> tuple[int, int]:
        """Calls of Python and of C functions for each repeat."""
        return self.python.total() // REPEATS, self.c.total() // REPEATS

    def of(self, name: str) -> float:
        return (self.python[name] + self.c[name]) / REPEATS

    def __repr__(self) -> str:
        return f"{self.python.most_common()}\n{self.c.most_common()}"


class Wired:
    """A proxy without sockets: the test calls its two protocols as a loop would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, continues_streams: bool = False) -> None:
        self._child: Upstream | None = None

        def connect(pool: UpstreamPool, exchange: Exchange) -> None:
            self._child = child = Upstream(pool)
            child.connection_made(cast("asyncio.Transport", Socket()))
            exchange.connected(child)

        monkeypatch.setattr(UpstreamPool, "connect", connect)
        self.records = 0
        backend = OneModel(continues_streams=continues_streams)
        config = ProxyConfig(api_keys=("sesame",))
        proxy = Proxy(backend, config, on_finished=self._finished, stages=ANSWER_STAGES)
        self.client = Downstream(proxy, AccessPolicy(proxy.config, proxy.keys))
        self.client.connection_made(cast("asyncio.Transport", Socket()))

    def _finished(self, record: object) -> None:
        self.records += 1

    @property
    def child(self) -> Upstream:
        assert self._child is not None
        return self._child


async def _requests(monkeypatch: pytest.MonkeyPatch) -> Calls:
    wired = Wired(monkeypatch)
    wired.client.data_received(REQUEST)
    child, response = wired.child, plain_response()
    child.data_received(response)

    def ask() -> None:
        for _ in range(REPEATS):
            wired.client.data_received(REQUEST)
            child.data_received(response)

    ask()  # heads become known, connections are made
    calls = Calls()
    calls.count(ask)
    assert wired.records == 1 + 2 * REPEATS
    return calls


async def _chunks(monkeypatch: pytest.MonkeyPatch, *, continues_streams: bool = False) -> Calls:
    wired = Wired(monkeypatch, continues_streams=continues_streams)
    wired.client.data_received(STREAM_REQUEST)
    child = wired.child
    child.data_received(stream_head())
    child.data_received(CHUNK)

    def stream() -> None:
        for _ in range(REPEATS):
            child.data_received(CHUNK)

    calls = Calls()
    calls.count(stream)
    return calls


def test_calls_for_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asyncio.run(_requests(monkeypatch))
    assert calls.of("write") == 2, calls  # to the child, and to the client
    assert calls.of("monotonic") <= 8, calls
    assert [calls.of(name) for name in LATER] == [0] * len(LATER), calls
    python, c = calls.per_repeat()
    assert python <= REQUEST_CALLS[0], calls
    assert c <= REQUEST_CALLS[1], calls


def test_calls_for_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asyncio.run(_chunks(monkeypatch))
    assert calls.of("write") == 1, calls
    assert calls.of("monotonic") == 0, calls
    assert [calls.of(name) for name in LATER] == [0] * len(LATER), calls
    python, c = calls.per_repeat()
    assert python <= CHUNK_CALLS[0], calls
    assert c <= CHUNK_CALLS[1], calls


def test_calls_for_one_chunk_of_a_kept_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asyncio.run(_chunks(monkeypatch, continues_streams=True))
    assert calls.of("write") == 1, calls
    python, c = calls.per_repeat()
    assert python <= CHUNK_CALLS[0] + KEPT_CALLS[0], calls
    assert c <= CHUNK_CALLS[1] + KEPT_CALLS[1], calls


def test_parser_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = record_parser_input(monkeypatch, reader, "HttpRequestParser")
    responses = record_parser_input(monkeypatch, upstream, "HttpResponseParser")
    asyncio.run(_requests(monkeypatch))
    assert len(requests) == len(responses) == 2  # of all repeats: later heads are known
    del responses[:]
    asyncio.run(_chunks(monkeypatch))
    assert responses == [stream_head(), *(1 + REPEATS) * [CHUNK]]


# Each of these wakes the loop again: a task, a callback, a timer.
LATER = ("create_task", "call_soon", "call_later", "call_at", "ensure_future", "create_future")


def io_of(thread: int) -> Counter[str]:
    """The calls of read() and write() by a thread, as counted by Linux. uvloop uses them on sockets."""
    lines = Path(f"/proc/self/task/{thread}/io").read_text().splitlines()
    return Counter({name: int(value) for name, value in (line.split(": ") for line in lines)})


@pytest.mark.parametrize("loop_name", ["uvloop"])
def test_system_calls(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(api_keys=("sesame",)))
    thread = rig.call(threading.get_native_id)
    try:
        io_of(thread)
    except OSError:
        pytest.skip("this system does not count the system calls of a thread")
    client = rig.send(REQUEST)
    child = rig.accept()
    spent: Counter[str] = Counter()
    for number in range(REPEATS + 1):
        before = io_of(thread)
        if number:
            client.send(REQUEST)
        child.message()
        child.send(answer(PLAIN_BODY))
        client.message()
        rig.record()
        if number:
            spent += io_of(thread) - before
    assert (spent["syscr"] / REPEATS, spent["syscw"] / REPEATS) == (2, 2)

    client.send(STREAM_REQUEST)
    child.message()
    child.send(stream_head() + chunk(b"data: 0\n\n"))
    client.until(b"data: 0\n\n\r\n")
    before = io_of(thread)
    for _ in range(REPEATS):
        child.send(chunk(b"data: 1\n\n"))
        client.until(b"data: 1\n\n\r\n")
    spent = io_of(thread) - before
    assert (spent["syscr"] / REPEATS, spent["syscw"] / REPEATS) == (1, 1)
