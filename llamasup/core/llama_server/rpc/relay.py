"""A relay of raw bytes between two connections, with TLS at the far end (client) or the near one (worker).

Each end of a tunnel is a llamasup and has a certificate that the other end checks. A relay holds at most one
buffer in each direction: it reads no more before the other side has taken what was read. The files of the
certificates are read for each connection: a tunnel stays for months, and certificates are renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.core.system.storage.paths import irregular_file, why_unusable
from llamasup.errors import ConfigInvalid

MOST_RELAYS = 16
"""Connections of one tunnel at a time. A worker serves one; a llama-server that asks opens a second."""
CONNECT_TIMEOUT_S = 10.0
_STOP_S = 10.0
_ACCEPT_PAUSE_S = 1.0  # as asyncio's servers
_BUFFER_BYTES = 256 * 1024  # weights come in large pieces
# After a minute without an answer of the other machine, a connection has ended. Without keepalive, a machine
# that lost its power would block the worker for its other clients for ever.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

_CLOSED = (
    "it ends the connection at once: it does not accept this certificate, or its rpc-server does not run"
)
_CLOSED_BY_WORKER = "rpc-server ended the connection without an answer"

T = TypeVar("T")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Connects each connection to ``listening`` to a new one of ``connect``, until one of the two ends.

    ``files``: for the worker's end, which does a TLS handshake with each client. ``on_problem`` gets the
    reason why a connection could not be made, and an empty text when one was. (A server of asyncio reports no
    handshake that failed.) The caller closes ``listening``.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], Awaitable[Stream]],
        *,
        files: TunnelFiles | None = None,
        on_problem: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._listening = listening
        self._connect = connect
        self._files = files
        self._on_problem = on_problem
        self._pause: asyncio.TimerHandle | None = None
        self.open = 0
        """The connections now."""

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    async def run(self) -> None:
        """Serve until cancelled. The event loop needs ``add_reader`` (``RelayLoop``).

        Not with ``sock_accept``: a cancellation can lose the connection that it has just accepted.
        """
        self._listening.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            loop.add_reader(self._listening, self._accept_one, tasks)
            try:
                await asyncio.Event().wait()
            finally:
                loop.remove_reader(self._listening)
                if self._pause is not None:
                    self._pause.cancel()

    def _accept_one(self, tasks: asyncio.TaskGroup) -> None:
        try:
            accepted, address = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor or no memory left: an immediate retry would fail as well
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listening)
            again = (self._listening, self._accept_one, tasks)
            self._pause = loop.call_later(_ACCEPT_PAUSE_S, loop.add_reader, *again)
            return
        if self.open >= MOST_RELAYS:
            accepted.close()
            return
        self.open += 1
        task = tasks.create_task(self._serve(accepted, address[0]), name="rpc-relay")
        task.add_done_callback(lambda _: self._ended(accepted))

    def _ended(self, accepted: socket.socket) -> None:
        self.open -= 1
        accepted.close()  # also if the task was cancelled before it began

    async def _serve(self, accepted: socket.socket, client: str) -> None:
        try:
            reader, writer = await self._accept(accepted)
            try:
                await self._relay(reader, writer)
            finally:
                await _abort(writer)
        except ConfigInvalid as error:  # a file was replaced by one that cannot be used
            self._on_problem(error.message.rstrip("."))
        except (OSError, TimeoutError) as error:
            self._on_problem(f"the connection of {client} was refused: {_reason(error)}")

    async def _accept(self, accepted: socket.socket) -> Stream:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(  # with TLS, uvloop returns a protocol of its own
            lambda: protocol,
            accepted,
            ssl=None if self._files is None else server_context(self._files),
            ssl_handshake_timeout=None if self._files is None else CONNECT_TIMEOUT_S,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far_writer = await self._connect()
        except (OSError, TimeoutError) as error:
            self._on_problem(_reason(error))
            return
        self._on_problem("")
        _keep_alive(writer)
        _keep_alive(far_writer)
        back_began = asyncio.Event()
        there = asyncio.ensure_future(_copy(reader, far_writer))  # noqa: TID251 - both are owned right here
        back = asyncio.ensure_future(_receive(far_reader, writer, back_began))  # noqa: TID251
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            # What one side has sent before its end still arrives; RPC never closes only one direction.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.gather(far_writer.drain(), writer.drain())
        finally:
            if back.done() and not back_began.is_set():
                # In TLS 1.3 the other end refuses a certificate only now; asyncio sends it without an alert.
                # Before the near end is closed: llama-server may end with it, and the problem is asked for.
                self._on_problem(_CLOSED if self._files is None else _CLOSED_BY_WORKER)
            there.cancel()
            back.cancel()
            far_writer.close()
            writer.close()
            await asyncio.gather(there, back, return_exceptions=True)
            await _abort(far_writer)


async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, began: asyncio.Event) -> None:
    """The direction in which the answers come."""
    with contextlib.suppress(OSError):
        if first := await reader.read(_BUFFER_BYTES):
            began.set()
            writer.write(first)
    await _copy(reader, writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_BUFFER_BYTES):
            writer.write(piece)
            await writer.drain()


async def _abort(writer: asyncio.StreamWriter) -> None:
    """Close the socket now: its loop may be about to end."""
    with contextlib.suppress(AttributeError):  # Python 3.11.2, if it is closed with TLS
        writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is None:  # with TLS, it has ended meanwhile
        return
    with contextlib.suppress(OSError):  # it has ended
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: OSError | TimeoutError) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS fails: {(error.reason or str(error)).replace('_', ' ').lower()}"
        case TimeoutError():
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        case _:
            return f"it accepts no connection ({error.strerror or error})"


def server_context(files: TunnelFiles) -> ssl.SSLContext:
    """Return the TLS context for the end of the worker: every client needs a certificate of ``files.ca``.

    Raises ConfigInvalid.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, files)


def client_context(files: TunnelFiles) -> ssl.SSLContext:
    """Return the TLS context for the end of llama-server: the worker's certificate is of ``files.ca`` and
    names its host.

    Raises ConfigInvalid.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: TunnelFiles) -> ssl.SSLContext:
    if (irregular := irregular_file(files.ca, files.cert, files.key)) is not None:
        raise _unusable(f"{irregular!r}: it is not a regular file")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are llamasup
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=files.ca)
    except ssl.SSLError as error:
        raise _unusable(f"{files.ca!r}: it contains no PEM certificate") from error
    except OSError as error:
        raise _unusable(f"{files.ca!r}: {error.strerror}") from error
    try:
        # Without a password, OpenSSL would ask for it at the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:
        why = why_unusable(error, files.key, files.cert)
        raise _unusable(f"the certificate {files.cert!r} and the key {files.key!r}: {why}") from error
    return context


def _unusable(what: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"The tunnel of an RPC worker cannot use {what}.",
        remedy="Give PEM files: the CA of the other end, a certificate, and its unencrypted key.",
    )


class RelayLoop:
    """A thread with an event loop of its own for relays, from its creation to ``close``.

    Weights of many gigabytes pass through them, which would delay everything else in the main loop. And
    relays need ``add_reader``, which the main loop does not have on Windows. All methods may be called from
    any thread but the loop's.
    """

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._serve, name="rpc-tunnels", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` until it ends, or until its future or this loop is cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs, and wait for its end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def _serve(self) -> None:
        loop = self._loop
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()
