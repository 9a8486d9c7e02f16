"""Connections are reported on loops with ``add_reader``, and on those without (Windows)."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from llamasup.core.system.event_loops import AcceptWatch
from tests.kit.patience import PATIENCE_S


def without_readers(monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
    def missing(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(loop, "add_reader", missing)


@pytest.mark.parametrize("has_readers", [True, False])
def test_each_connection_is_reported_until_the_close(
    has_readers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        if not has_readers:
            without_readers(monkeypatch, loop)
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            incoming = AcceptWatch(listening, lambda: accepted.put_nowait(listening.accept()[0]))
            for _ in range(3):
                with socket.create_connection(listening.getsockname()):
                    (await asyncio.wait_for(accepted.get(), PATIENCE_S)).close()
            incoming.close()
            for thread in threading.enumerate():
                if thread.name == "incoming":
                    await asyncio.to_thread(thread.join, PATIENCE_S)
                    assert not thread.is_alive()
            assert accepted.empty()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(scenario())


def test_a_callback_that_fails_does_not_end_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        without_readers(monkeypatch, loop)
        failures: asyncio.Queue[object] = asyncio.Queue()
        loop.set_exception_handler(lambda _, context: failures.put_nowait(context["exception"]))

        with socket.create_server(("127.0.0.1", 0)) as listening:

            def accept() -> None:
                listening.accept()[0].close()
                raise ValueError("failed")

            incoming = AcceptWatch(listening, accept)
            for _ in range(2):
                with socket.create_connection(listening.getsockname()):
                    assert isinstance(await asyncio.wait_for(failures.get(), PATIENCE_S), ValueError)
            incoming.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(scenario())


def test_the_close_makes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        without_readers(monkeypatch, asyncio.get_running_loop())
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            incoming = AcceptWatch(listening, lambda: None)
            incoming.close()
            for thread in threading.enumerate():
                if thread.name == "incoming":
                    await asyncio.to_thread(thread.join, PATIENCE_S)
                    assert not thread.is_alive()
            with pytest.raises(BlockingIOError):
                listening.accept()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(scenario())
