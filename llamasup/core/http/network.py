"""The connections of httpcore, over asyncio's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import httpcore

from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.http.connection import open_connection


class AsyncioBackend(httpcore.AsyncNetworkBackend):
    """Connects without anyio, which httpcore uses otherwise, and without options of sockets.

    If the backlog of a Unix socket is full, anyio's ``connect_unix`` tries again without a pause. A cancelled
    one, or a cancelled read, may leave a callback behind that raises InvalidStateError in the event loop
    (anyio 4.16).
    """

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await _connect(TcpAddress(host, port), timeout)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await _connect(UnixAddress(path), timeout)


async def _connect(address: Address, timeout_s: float | None) -> _Stream:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await open_connection(address, lambda: protocol)
    except TimeoutError as error:
        raise httpcore.ConnectTimeout(f"no connection within {timeout_s} s") from error
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    return _Stream(reader, writer)


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(f"nothing to read within {timeout} s") from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._writer.transport.is_closing():
            raise httpcore.WriteError("the connection is closed")  # uvloop would raise RuntimeError
        self._writer.write(buffer)
        try:
            async with asyncio.timeout(timeout):
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore.WriteTimeout(f"nothing written within {timeout} s") from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()
