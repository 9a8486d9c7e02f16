"""A relay of raw bytes between two connections, and the TLS contexts of the two ends of a tunnel.

Each end of a tunnel is a llamasup and has a certificate that the other end checks. A relay holds at most one
buffer in each direction: it reads no more before the other side has taken what was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

from llamasup.errors import ConfigInvalid
from llamasup.llama_server.rpc.workers import TunnelFiles

__all__ = ["MOST_RELAYS", "Relay", "client_context", "server_context"]

MOST_RELAYS = 16
"""Connections of one tunnel at a time. A worker serves one; a llama-server that asks opens a second."""
CONNECT_TIMEOUT_S = 10.0
_BUFFER_BYTES = 256 * 1024  # weights come in large pieces

_CLOSED = (
    "it ends the connection at once: it does not accept this certificate, or its rpc-server does not run"
)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Connects each accepted connection to a new one of ``connect``, until one of the two ends.

    ``on_problem`` gets the reason why a connection could not be made, and an empty text when one was.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Stream]], on_problem: Callable[[str], None] = lambda _: None
    ) -> None:
        self._connect = connect
        self._on_problem = on_problem
        self.open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """For ``asyncio.start_server``. Ends both connections in any case."""
        if self.open >= MOST_RELAYS:
            writer.transport.abort()
            return
        self.open += 1
        try:
            await self._relay(reader, writer)
        finally:
            self.open -= 1
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far_writer = await self._connect()
        except (OSError, TimeoutError) as error:
            self._on_problem(_reason(error))
            return
        back_began = asyncio.Event()
        there = asyncio.ensure_future(_copy(reader, far_writer))  # noqa: TID251 - both are owned right here
        back = asyncio.ensure_future(self._receive(far_reader, writer, back_began))  # noqa: TID251
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            # What one side has sent before its end still arrives; RPC never closes only one direction.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.gather(far_writer.drain(), writer.drain())
        finally:
            there.cancel()
            back.cancel()
            far_writer.close()
            writer.close()
            await asyncio.gather(there, back, return_exceptions=True)
            if far_reader.at_eof() and not back_began.is_set():
                # In TLS 1.3 the other end refuses a certificate only now; asyncio sends it without an alert.
                self._on_problem(_CLOSED)
            far_writer.transport.abort()

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, began: asyncio.Event
    ) -> None:
        """The direction in which the answers come."""
        with contextlib.suppress(OSError):
            if first := await reader.read(_BUFFER_BYTES):
                began.set()
                self._on_problem("")
                writer.write(first)
        await _copy(reader, writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_BUFFER_BYTES):
            writer.write(piece)
            await writer.drain()


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
    """For the end of the worker: every client needs a certificate of ``files.ca``. Raises ConfigInvalid."""
    return _context(ssl.PROTOCOL_TLS_SERVER, files)


def client_context(files: TunnelFiles) -> ssl.SSLContext:
    """For the end of llama-server: the worker's certificate is of ``files.ca`` and names its host.

    Raises ConfigInvalid.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: TunnelFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are llamasup
    context.verify_mode = ssl.CERT_REQUIRED
    used = files.ca
    try:
        context.load_verify_locations(cafile=files.ca)
        used = files.cert
        # Without a password, OpenSSL would ask for it at the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:
        why = (error.reason or error) if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigInvalid(
            f"The tunnel of an RPC worker cannot use {used!r}: {why}.",
            remedy="Give PEM files: the CA of the other end, a certificate, and its unencrypted key.",
        ) from error
    return context
