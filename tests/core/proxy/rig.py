"""A proxy in its own event loop, between a client and a child that both send raw bytes.

Both are blocking sockets in the test's thread, so that a test reads as a transcript: the client sends, the
child receives, the child answers, the client receives. Every wait has a limit, and no test sleeps.
"""

from __future__ import annotations

import asyncio
import json
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import uvloop

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ListedModel, ResolvedModel, resolved
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.pool.catalog.v1_models import entry_of
from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.proxy import Proxy, ProxyConfig, bind
from llamasup.core.proxy.context import Dialect
from llamasup.core.proxy.listeners.tls import TlsContext
from llamasup.core.queueing.endpoint import UNLIMITED, Endpoint, Lease
from llamasup.core.queueing.request_queue import MAX_WAITING, RequestQueue
from llamasup.core.settings.model import NO_REPAIRS
from llamasup.service.answer_stages import ANSWER_STAGES
from tests.kit.backends import Unlisted
from tests.kit.patience import PATIENCE_S as PATIENCE_S
from tests.kit.patience import eventually as eventually

Result = TypeVar("Result")


class Wire:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self._read = b""

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.sock.sendall(piece)

    def receive(self, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        while len(self._read) < size:
            more = self.sock.recv(1 << 16)
            assert more, f"closed after {self._read!r}"
            self._read += more
        found, self._read = self._read[:size], self._read[size:]
        return found

    def until(self, end: bytes) -> bytes:
        """Everything up to and including ``end``."""
        while (at := self._read.find(end)) < 0:
            more = self.sock.recv(1 << 16)
            assert more, f"closed before {end!r}, after {self._read!r}"
            self._read += more
        return self.receive(at + len(end))

    def rest(self) -> bytes:
        """Everything until the other side closes; a reset raises."""
        while more := self.sock.recv(1 << 16):
            self._read += more
        found, self._read = self._read, b""
        return found

    def sees_the_end(self) -> bool:
        """Whether the other side closes or resets, without another byte."""
        try:
            return self.rest() == b""
        except ConnectionResetError:
            return self._read == b""

    def is_quiet(self) -> bool:
        """Whether no byte has arrived so far."""
        self.sock.setblocking(False)
        try:
            return not self._read and not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.sock.settimeout(PATIENCE_S)

    def head(self) -> bytes:
        return self.until(b"\r\n\r\n")

    def message(self) -> tuple[bytes, bytes]:
        """A head, and the body that its Content-Length announces."""
        head = self.head()
        return head, self.receive(int(field(head, b"content-length") or b"0"))

    def close(self) -> None:
        self.sock.close()


def field(head: bytes, name: bytes) -> bytes | None:
    """The value of a header, by its name in lower case; None if it is missing."""
    for line in head.split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip()
    return None


def status(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


class Clock:
    """The machine's clock, which a test can set forward. The next sweep of the proxy uses it."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def pass_s(self, seconds: float) -> None:
        self._ahead_s += seconds

    def pass_until_readable(self, wire: Wire, step_s: float) -> None:
        """Let time pass, step by step, until the other side of a connection sends a byte or closes."""
        while not select.select([wire.sock], [], [], 0.02)[0]:
            self.pass_s(step_s)


class OneModel(Unlisted):
    """A backend with one model, whose generation a test can end and replace."""

    def __init__(self, endpoint: Endpoint, wait_timeout_s: float, max_queued: int) -> None:
        self.endpoint = endpoint
        self.unavailable: HttpError | None = None
        self.waiting = RequestQueue(
            lambda: self.unavailable or (self.endpoint,), timeout_s=wait_timeout_s, max_waiting=max_queued
        )
        endpoint.on_permit_free = self.waiting.permit_freed
        self.requested_models: list[str | None] = []
        self.infos: dict[str, ModelInfo] = {}
        """The list of models, by id."""

    @property
    def model(self) -> ResolvedModel:
        return ResolvedModel((self.endpoint.model,))

    @property
    def served(self) -> Self:
        return self

    @property
    def queue(self) -> RequestQueue:
        return self.waiting

    repairs = NO_REPAIRS

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        return self.unavailable or self.endpoint.lease_if_free(infers=infers)

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        return (ListedModel(resolved(info.spec), partial(entry_of, info)) for info in self.infos.values())

    def listed(self) -> ListedModel:
        return next(self.models(), ListedModel(self.model, lambda model: {"id": model.id}))

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Self:
        self.requested_models.append(model)
        return self

    def readiness(self) -> HttpError | None:
        return self.unavailable


class Rig:
    def __init__(
        self,
        folder: Path,
        loop_name: str,
        config: ProxyConfig,
        *,
        control: bool = False,
        api_key: str | None = None,
        sockets: Sequence[socket.socket] | None = None,
        tls: TlsContext | None = None,
        trusted: bool = False,
        child_path: str | None = None,
        wait_timeout_s: float = PATIENCE_S,
        max_concurrent: int = UNLIMITED,
        max_queued: int = MAX_WAITING,
        dialect: Dialect | None = None,
    ) -> None:
        """``child_path``: the socket of a real server; without it, the test plays the child. ``dialect``:
        another API of the listener.
        """
        self._loop = uvloop.new_event_loop() if loop_name == "uvloop" else asyncio.new_event_loop()
        self._loop_errors: list[str] = []
        self._loop.set_exception_handler(lambda _, context: self._loop_errors.append(repr(context)))
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()
        self._open: list[Wire] = []
        self._records: queue.Queue[RequestRecord] = queue.Queue()
        self._child_path = child_path or str(folder / "child.sock")
        self._child = socket.socket() if child_path else self.listen(self._child_path)
        self.endpoint = Endpoint(
            "tiny", 1, UnixAddress(self._child_path), api_key, max_concurrent=max_concurrent
        )
        self.backend = OneModel(self.endpoint, wait_timeout_s, max_queued)
        self._control: socket.socket | None = None
        control_endpoint = None
        if control:
            self._control = self.listen(str(folder / "control.sock"))
            address = UnixAddress(str(folder / "control.sock"))
            control_endpoint = Endpoint("control", 1, address, mark=b"x-llamasup-through-proxy: 1\r\n")
        own = list(sockets) if sockets is not None else bind("127.0.0.1", 0)
        self.address: Any = own[0].getsockname()
        self._family = own[0].family

        async def start() -> Proxy:
            proxy = Proxy(
                self.backend,
                config,
                control=control_endpoint,
                on_finished=self._records.put,
                stages=ANSWER_STAGES,
            )
            await proxy.start(own, trusted=trusted, tls=tls, dialect=dialect)
            return proxy

        self.proxy = asyncio.run_coroutine_threadsafe(start(), self._loop).result(PATIENCE_S)

    # --- the client

    def connect(self, *, receive_buffer: int | None = None, source: str | None = None) -> Wire:
        """``source``: the address of the client, for tests with several clients."""
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        wire = self.keep(Wire(sock))
        if source is not None:
            sock.bind((source, 0))
        sock.connect(self.address)
        return wire

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request that llamasup answers itself; returns the head and the body."""
        return self.send(request).message()

    def send(self, *pieces: bytes, source: str | None = None) -> Wire:
        """A new client that has sent these bytes."""
        client = self.connect(source=source)
        client.send(*pieces)
        return client

    def begin(self, request: bytes) -> tuple[Wire, Wire]:
        """A client that has sent ``request``, and the child that has received it."""
        client, child = self.send(request), self.accept()
        child.message()
        return client, child

    # --- the child

    def accept(self) -> Wire:
        """The proxy's next connection to the child."""
        return self.keep(Wire(self._child.accept()[0]))

    def accept_control(self) -> Wire:
        assert self._control is not None
        return self.keep(Wire(self._control.accept()[0]))

    def stop_listening(self) -> None:
        self._child.close()

    def listen_again(self) -> None:
        """Listen at the same path, like a new child."""
        Path(self._child_path).unlink()
        self._child = self.listen(self._child_path)

    # --- the proxy

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the proxy's loop."""

        async def calling() -> Result:
            return function()

        return self.complete(calling())

    def complete(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the proxy's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def record(self) -> RequestRecord:
        """The next finished request's record."""
        return self._records.get(timeout=PATIENCE_S)

    def in_flight(self) -> int:
        return self.call(lambda: self.endpoint.in_flight)

    def close_proxy(self) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.aclose(), self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self.close_proxy()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        for wire in self._open:
            wire.close()
        self._child.close()
        if self._control is not None:
            self._control.close()
        assert not self._loop_errors, f"raised in a callback of the loop: {self._loop_errors}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def keep(self, wire: Wire) -> Wire:
        """Close this at the end of the rig."""
        self._open.append(wire)
        return wire

    @staticmethod
    def listen(path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        sock.listen(64)
        sock.settimeout(PATIENCE_S)
        return sock


def get(path: bytes = b"/props", *lines: bytes, method: bytes = b"GET") -> bytes:
    """A request without a body."""
    return b"\r\n".join((method + b" " + path + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""))


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    length = b"Content-Length: %d" % len(body)
    return get(path, length, *lines, method=b"POST") + body


def answer(body: bytes = b'{"ok":1}', *lines: bytes, code: bytes = b"200 OK") -> bytes:
    """A response as llama-server writes them."""
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join((b"HTTP/1.1 " + code, b"Server: llama.cpp", *lines, length, b"", body))


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
)
CHAT = b"/v1/chat/completions"
EVENT = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n')


def error_of(client: Wire, code: int) -> dict[str, object]:
    """The error object of the next response, which has this status."""
    head, body = client.message()
    assert status(head) == code, body
    return dict(json.loads(body)["error"])


def streaming(
    rig: Rig, path: bytes = CHAT, *, request: bytes | None = None, receive_buffer: int | None = None
) -> tuple[Wire, Wire]:
    """A client and a child in the middle of a stream, after its first event."""
    client = rig.connect(receive_buffer=receive_buffer)
    client.send(request or post(path, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    return client, child
