"""A tunnel: raw bytes in both directions, both ends closed, and certificates on both sides."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.llama_server.rpc.ask import Tunnels
from llamasup.core.llama_server.rpc.relay import (
    MOST_RELAYS,
    Relay,
    RelayLoop,
    Stream,
    client_context,
    server_context,
)
from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.core.settings.kinds import RpcWorker
from llamasup.core.system.process.platform import loop_factory
from llamasup.errors import ConfigInvalid
from tests.kit.certificates import make_certificate
from tests.kit.patience import PATIENCE_S, eventually

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """A certificate that is its own CA, and its key, for each end."""
    folder = tmp_path_factory.mktemp("ends")
    return {name: make_certificate(folder, name) for name in ("worker", "client", "stranger")}


def files(ca: Pair, own: Pair) -> TunnelFiles:
    return TunnelFiles(ca[0], *own)


@asynccontextmanager
async def echo() -> AsyncIterator[Callable[[], Awaitable[Stream]]]:
    """An echo in place of the rpc-server: the function that connects to it. It closes its ends."""
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with suppress(ConnectionResetError):
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    async def connect() -> Stream:
        return await asyncio.open_connection(*server.sockets[0].getsockname())

    try:
        yield connect
    finally:
        server.close()
        for writer in connections:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def far_end(tls: TunnelFiles, problems: list[str] | None = None) -> AsyncIterator[int]:
    """An echo behind the worker's end of a tunnel: its port. ``problems``: those that it reports."""
    on_problem = [].append if problems is None else problems.append
    async with echo() as connect, running(connect, files=tls, on_problem=on_problem) as relay:
        yield relay.port


@asynccontextmanager
async def running(connect: Callable[[], Awaitable[Stream]], **options: Any) -> AsyncIterator[Relay]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        relay = Relay(listening, connect, **options)
        task = asyncio.ensure_future(relay.run())  # noqa: TID251
        try:
            yield relay
            await ended(relay)
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
def tunnels() -> Iterator[Tunnels]:
    tunnels = Tunnels()
    yield tunnels
    tunnels.close()


async def ended(relay: Relay) -> None:
    await asyncio.to_thread(eventually, lambda: relay.open == 0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # as llamasup
        runner.run(bounded())


def test_bytes_pass_in_both_directions_and_both_ends_close(tunnels: Tunnels, ends: dict[str, Pair]) -> None:
    content = bytes(range(256)) * 20_000  # more than one buffer

    async def test() -> None:
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


def test_certificate_is_compared_with_the_name_in_the_settings(
    tunnels: Tunnels, ends: dict[str, Pair], tmp_path: Path
) -> None:
    named = make_certificate(tmp_path, "named", "DNS:localhost")

    async def test() -> None:
        mine = files(named, ends["client"])
        async with far_end(files(ends["client"], named)) as port:
            name = RpcWorker().parse(f"tls://LocalHost:{port}")
            assert await said(await asyncio.to_thread(tunnels.port, name, mine), b"hello") == b"hello"

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
    tunnels: Tunnels, ends: dict[str, Pair], ca: str, own: str, why: str
) -> None:
    async def test() -> None:
        mine = files(ends[ca], ends[own])
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


def test_absent_worker_is_the_problem_of_its_tunnel(
    tunnels: Tunnels, ends: dict[str, Pair], free_tcp_port: int
) -> None:
    async def test() -> None:
        mine = files(ends["worker"], ends["client"])
        name = f"tls://127.0.0.1:{free_tcp_port}"
        local = await asyncio.to_thread(tunnels.port, name, mine)
        _, writer = await asyncio.open_connection("127.0.0.1", local)
        await asyncio.to_thread(eventually, lambda: "accepts no connection" in tunnels.problem(name, mine))
        writer.close()

    run(test)


def test_connections_of_a_tunnel_are_limited() -> None:
    async def test() -> None:
        async with echo() as connect, running(connect) as relay:
            opened = []
            for _ in range(MOST_RELAYS):
                reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                opened.append(writer)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await said(relay.port, b"x")
            for each in opened:
                each.close()

    run(test)


async def said(local: int, content: bytes) -> bytes:
    """What a new connection to the local end of a tunnel gets back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", local)
    try:
        writer.write(content)
        return await reader.readexactly(len(content))
    finally:
        writer.close()


def test_worker_reports_a_client_without_its_certificate(tunnels: Tunnels, ends: dict[str, Pair]) -> None:
    problems: list[str] = []

    async def test() -> None:
        mine = files(ends["worker"], ends["stranger"])
        async with far_end(files(ends["client"], ends["worker"]), problems) as port:
            local = await asyncio.to_thread(tunnels.port, f"tls://127.0.0.1:{port}", mine)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await said(local, b"hello")
            await asyncio.to_thread(eventually, lambda: problems)

    run(test)
    assert "the connection of 127.0.0.1 was refused: its certificate is not accepted" in problems[0]


def test_renewed_certificates_are_used_without_a_restart(
    tunnels: Tunnels, ends: dict[str, Pair], tmp_path: Path
) -> None:
    own = tmp_path / "own.pem", tmp_path / "own.key"

    def use(pair: Pair) -> None:
        for path, content in zip(own, pair, strict=True):
            path.write_bytes(Path(content).read_bytes())

    async def test() -> None:
        mine = TunnelFiles(ends["worker"][0], *map(str, own))
        async with far_end(files(ends["client"], ends["worker"])) as port:
            name = f"tls://127.0.0.1:{port}"
            local = await asyncio.to_thread(tunnels.port, name, mine)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await said(local, b"hello")
            use(ends["client"])
            assert await said(local, b"hello") == b"hello"
            assert tunnels.problem(name, mine) == ""
            own[0].write_text("no certificate")
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await said(local, b"hello")
            await asyncio.to_thread(eventually, lambda: "no PEM certificate" in tunnels.problem(name, mine))

    use(ends["stranger"])
    run(test)


def test_worker_reports_its_own_file_that_became_unusable(
    tunnels: Tunnels, ends: dict[str, Pair], tmp_path: Path
) -> None:
    ca, problems = tmp_path / "ca.pem", list[str]()

    async def test() -> None:
        mine = files(ends["worker"], ends["client"])
        async with far_end(TunnelFiles(str(ca), *ends["worker"]), problems) as port:
            local = await asyncio.to_thread(tunnels.port, f"tls://127.0.0.1:{port}", mine)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await said(local, b"hello")
            await asyncio.to_thread(eventually, lambda: problems)

    run(test)
    assert "ca.pem" in problems[0]


def test_both_connections_of_a_relay_are_kept_alive() -> None:
    """Else a machine that lost its power would block the worker for ever."""
    seen: list[tuple[int, int]] = []

    def note(writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        idle = getattr(socket, "TCP_KEEPIDLE", None)
        idle_s = 30 if idle is None else connection.getsockopt(socket.IPPROTO_TCP, idle)
        seen.append((connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), idle_s))

    async def test() -> None:
        fars: list[asyncio.StreamWriter] = []

        def on_accept(relay: Relay) -> None:
            accept = relay._accept

            async def noted(accepted: socket.socket) -> Stream:
                near = await accept(accepted)
                fars.append(near[1])
                return near

            relay._accept = noted  # type: ignore[method-assign]

        async with echo() as to_echo:

            async def connect() -> Stream:
                far = await to_echo()
                fars.append(far[1])
                return far

            async with running(connect) as relay:
                on_accept(relay)
                reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                for each in fars:
                    note(each)
                writer.close()

    run(test)
    assert seen == [(1, 30), (1, 30)]


def test_client_that_disconnects_early_does_not_end_the_tunnel(ends: dict[str, Pair]) -> None:
    async def test() -> None:
        nears: list[asyncio.StreamWriter] = []
        async with echo() as to_echo:

            async def connect() -> Stream:
                if len(nears) == 1:
                    first = nears[0]
                    await asyncio.to_thread(eventually, lambda: first.get_extra_info("socket") is None)
                return await to_echo()

            async with running(connect, files=files(ends["client"], ends["worker"])) as relay:
                accept = relay._accept

                async def noted(accepted: socket.socket) -> Stream:
                    near = await accept(accepted)
                    nears.append(near[1])
                    return near

                relay._accept = noted  # type: ignore[method-assign]
                context = client_context(files(ends["worker"], ends["client"]))
                for content in (b"", b"hello"):
                    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port, ssl=context)
                    writer.write(content)
                    assert await reader.readexactly(len(content)) == content
                    writer.close()
                    await asyncio.to_thread(eventually, lambda: relay.open == 0)

    run(test)


def test_closed_tunnels_leave_no_thread_and_no_port(ends: dict[str, Pair]) -> None:
    tunnels, mine = Tunnels(), files(ends["worker"], ends["client"])
    tunnels.close()  # without a tunnel
    before = set(threading.enumerate())  # a thread of an earlier test may end
    local = tunnels.port("tls://127.0.0.1:9", mine)
    with socket.create_connection(("127.0.0.1", local)):
        tunnels.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", local))
    assert tunnels.problem("tls://127.0.0.1:9", mine) == ""
    assert tunnels.port("tls://127.0.0.1:9", mine)
    tunnels.close()


def test_loop_of_relays_ends_with_and_without_work() -> None:
    before = set(threading.enumerate())  # a thread of an earlier test may end
    idle, busy = RelayLoop(), RelayLoop()
    endless = busy.start(asyncio.Event().wait())
    idle.close()
    busy.close()
    assert endless.cancelled()
    assert set(threading.enumerate()) <= before


def test_file_that_is_no_certificate_is_named(tmp_path: Path, ends: dict[str, Pair]) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(ConfigInvalid, match=r"broken\.pem"):
        client_context(TunnelFiles(str(broken), *ends["client"]))
    with pytest.raises(ConfigInvalid, match="missing"):
        server_context(TunnelFiles(ends["client"][0], str(tmp_path / "missing.pem"), ends["client"][1]))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigInvalid, match="it is not a regular file"):
        server_context(TunnelFiles(str(pipe), *ends["worker"]))
    with pytest.raises(ConfigInvalid, match="the key belongs to another certificate"):
        server_context(TunnelFiles(ends["client"][0], ends["worker"][0], ends["client"][1]))
    with pytest.raises(ConfigInvalid, match="No such file"):
        server_context(TunnelFiles(str(tmp_path / "missing.pem"), *ends["worker"]))
