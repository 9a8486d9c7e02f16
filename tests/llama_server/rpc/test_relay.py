"""A tunnel: raw bytes in both directions, both ends closed, and certificates on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from llamasup.errors import ConfigInvalid
from llamasup.llama_server.rpc.relay import MOST_RELAYS, Relay, Stream, client_context, server_context
from llamasup.llama_server.rpc.tunnel import Tunnels
from llamasup.llama_server.rpc.workers import TunnelFiles
from tests.certificates import make_certificate
from tests.patience import PATIENCE_S, eventually

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """A certificate that is its own CA, and its key, for each end."""
    folder = tmp_path_factory.mktemp("ends")
    return {name: make_certificate(folder, name) for name in ("worker", "client", "stranger")}


def files(ca: Pair, own: Pair) -> TunnelFiles:
    return TunnelFiles(ca[0], *own)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65_536):
        writer.write(piece)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def far_end(tls: TunnelFiles) -> AsyncIterator[int]:
    """An echo behind the worker's end of a tunnel: its port."""
    inner = await asyncio.start_server(echo, "127.0.0.1", 0)

    async def connect() -> Stream:
        return await asyncio.open_connection(*inner.sockets[0].getsockname())

    relay = Relay(connect)
    outer = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=server_context(tls))
    try:
        yield outer.sockets[0].getsockname()[1]
    finally:
        outer.close()
        await ended(relay)
        inner.close()


async def ended(relay: Relay) -> None:
    await asyncio.to_thread(eventually, lambda: relay.open == 0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(bounded())


def test_bytes_pass_in_both_directions_and_both_ends_close(ends: dict[str, Pair]) -> None:
    content = bytes(range(256)) * 20_000  # more than one buffer

    async def test() -> None:
        tunnels = Tunnels()
        own = files(ends["worker"], ends["client"])
        async with far_end(files(ends["client"], ends["worker"])) as port:
            name = f"tls://127.0.0.1:{port}"
            local = await asyncio.to_thread(tunnels.port, name, own)
            assert tunnels.port(name, own) == local
            reader, writer = await asyncio.open_connection("127.0.0.1", local)
            sending = asyncio.ensure_future(_send(writer, content))  # noqa: TID251
            assert await reader.readexactly(len(content)) == content
            await sending
            writer.close()
            assert tunnels.problem(name, own) == ""

    run(test)


async def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(content)
    await writer.drain()


@pytest.mark.parametrize(
    ("ca", "own", "why"),
    [
        ("worker", "stranger", "it does not accept this certificate"),
        ("stranger", "client", "its certificate is not accepted: self-signed certificate"),
    ],
)
def test_unknown_certificate_is_refused_by_either_end(
    ends: dict[str, Pair], ca: str, own: str, why: str
) -> None:
    async def test() -> None:
        tunnels, mine = Tunnels(), files(ends[ca], ends[own])
        async with far_end(files(ends["client"], ends["worker"])) as port:
            name = f"tls://127.0.0.1:{port}"
            local = await asyncio.to_thread(tunnels.port, name, mine)
            reader, writer = await asyncio.open_connection("127.0.0.1", local)
            writer.write(b"hello")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            await asyncio.to_thread(eventually, lambda: why in tunnels.problem(name, mine))
            writer.close()

    run(test)


def test_absent_worker_is_the_problem_of_its_tunnel(ends: dict[str, Pair], free_tcp_port: int) -> None:
    async def test() -> None:
        tunnels, mine = Tunnels(), files(ends["worker"], ends["client"])
        name = f"tls://127.0.0.1:{free_tcp_port}"
        local = await asyncio.to_thread(tunnels.port, name, mine)
        _, writer = await asyncio.open_connection("127.0.0.1", local)
        await asyncio.to_thread(eventually, lambda: "accepts no connection" in tunnels.problem(name, mine))
        writer.close()

    run(test)


def test_connections_of_a_tunnel_are_limited() -> None:
    async def test() -> None:
        inner = await asyncio.start_server(echo, "127.0.0.1", 0)

        async def connect() -> Stream:
            return await asyncio.open_connection(*inner.sockets[0].getsockname())

        relay = Relay(connect)
        outer = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = outer.sockets[0].getsockname()
        opened = []
        for _ in range(MOST_RELAYS):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            opened.append(writer)
        reader, writer = await asyncio.open_connection(*address)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            writer.write(b"x")
            await reader.readexactly(1)
        for each in (*opened, writer):
            each.close()
        outer.close()
        await ended(relay)
        inner.close()

    run(test)


def test_file_that_is_no_certificate_is_named(tmp_path: Path, ends: dict[str, Pair]) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(ConfigInvalid, match=r"broken\.pem"):
        client_context(TunnelFiles(str(broken), *ends["client"]))
    with pytest.raises(ConfigInvalid, match="missing"):
        server_context(TunnelFiles(ends["client"][0], str(tmp_path / "missing.pem"), ends["client"][1]))
