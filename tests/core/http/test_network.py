"""The connections of httpcore to real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpcore
import pytest
import uvloop

from llamasup.core.http.network import AsyncioBackend

Run = Callable[[Coroutine[Any, Any, None]], None]

pytestmark = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        made.listen(0)
        yield made


def test_request_is_answered_over_tcp(run: Run) -> None:
    async def check() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\nbody")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        async with server, httpcore.AsyncConnectionPool(network_backend=AsyncioBackend()) as pool:
            response = await pool.request("POST", f"http://127.0.0.1:{port}/x", content=b"body")
            assert (response.status, response.content) == (200, b"ok")

    run(check())


def test_both_directions_over_a_unix_socket(run: Run, listener: socket.socket) -> None:
    async def check() -> None:
        stream = await AsyncioBackend().connect_unix_socket(listener.getsockname(), timeout=60)
        server, _ = listener.accept()
        with server:
            await stream.write(b"hello", timeout=60)
            assert await asyncio.to_thread(server.recv, 64) == b"hello"
            server.send(b"bye")
            assert await stream.read(64, timeout=60) == b"bye"
            await stream.aclose()
            assert await asyncio.to_thread(server.recv, 64) == b""

    run(check())


def test_connection_that_nobody_accepts_is_a_connect_error(run: Run, tmp_path: Path) -> None:
    async def check() -> None:
        with pytest.raises(httpcore.ConnectError):
            await AsyncioBackend().connect_unix_socket(str(tmp_path / "missing"), timeout=60)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            with pytest.raises(httpcore.ConnectError):
                await AsyncioBackend().connect_tcp("127.0.0.1", closed.getsockname()[1], timeout=60)

    run(check())


@pytest.mark.both_loops
def test_full_backlog_is_a_connect_error(run: Run, listener: socket.socket) -> None:
    """anyio repeats the attempt without a pause, and reports errors to the event loop if it is cancelled."""
    reported: list[dict[str, Any]] = []

    async def check() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        with pytest.raises(httpcore.ConnectError, match=r"unavailable|backlog"):
            await AsyncioBackend().connect_unix_socket(listener.getsockname(), timeout=60)
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                attempt = AsyncioBackend().connect_unix_socket(listener.getsockname(), timeout=60)
                task = group.create_task(attempt)
                await asyncio.sleep(0)
                task.cancel()

    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(listener.getsockname())
        run(check())
    assert reported == []


def test_peer_that_does_nothing_is_a_timeout(run: Run, listener: socket.socket) -> None:
    async def check() -> None:
        stream = await AsyncioBackend().connect_unix_socket(listener.getsockname())
        with pytest.raises(httpcore.ReadTimeout):
            await stream.read(64, timeout=0.01)
        with pytest.raises(httpcore.WriteTimeout):
            while True:
                await stream.write(bytes(1 << 20), timeout=0.01)
        await stream.aclose()

    run(check())


@pytest.mark.both_loops
def test_connection_that_is_reset_is_an_error(run: Run) -> None:
    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stream = await AsyncioBackend().connect_tcp("127.0.0.1", listener.getsockname()[1], timeout=60)
            server, _ = listener.accept()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            server.close()
            with pytest.raises(httpcore.ReadError):
                await stream.read(64, timeout=60)
            with pytest.raises(httpcore.WriteError):
                while True:
                    await stream.write(bytes(1 << 20), timeout=60)

    run(check())


@pytest.mark.both_loops
def test_slow_connection_is_a_timeout(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("llamasup.core.http.network.open_connection", never)

    async def check() -> None:
        with pytest.raises(httpcore.ConnectTimeout):
            await AsyncioBackend().connect_tcp("127.0.0.1", 1, timeout=0.01)

    run(check())
