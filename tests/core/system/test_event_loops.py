"""Pipes are read as streams, on loops that can wait for them, and on those that cannot (Windows)."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from llamasup.core.system.event_loops import pipe_reader
from llamasup.core.system.native import native
from tests.kit.patience import PATIENCE_S


@pytest.fixture(params=[True, False], autouse=True)
def loop_reads_pipes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(native, "loop_reads_pipes", request.param)
    return bool(request.param)


def test_lines_arrive_until_the_writer_ends() -> None:
    async def scenario() -> None:
        read_fd, write_fd = os.pipe()
        async with pipe_reader(read_fd, 1 << 20) as reader:
            os.write(write_fd, b"one\ntw")
            assert await asyncio.wait_for(reader.readline(), PATIENCE_S) == b"one\n"
            os.write(write_fd, b"o\nrest")
            os.close(write_fd)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b"two\nrest"
        await threads_end()

    asyncio.run(scenario())


def test_writer_waits_for_a_reader_that_does_not_read() -> None:
    """Otherwise the unread lines would fill the memory."""

    async def scenario() -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        async with pipe_reader(read_fd, 64 * 1024) as reader:
            written = await write_until_full(write_fd)
            assert written < 4 << 20
            received = 0
            while received < written:
                received += len(await asyncio.wait_for(reader.read(64 * 1024), PATIENCE_S))
            os.close(write_fd)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""

    asyncio.run(scenario())


def test_what_comes_after_the_close_does_not_block_the_writer() -> None:
    async def scenario() -> None:
        read_fd, write_fd = os.pipe()
        async with pipe_reader(read_fd, 1 << 20):
            os.write(write_fd, b"one\n")
        try:
            await asyncio.to_thread(os.write, write_fd, b"x" * (1 << 20))
        except BrokenPipeError:
            assert native.loop_reads_pipes
        os.close(write_fd)
        await threads_end()

    asyncio.run(scenario())


async def write_until_full(fd: int) -> int:
    """The loop runs between the writes, and has nothing to do once the pipe stays full."""
    written = refused = 0
    while refused < 50:
        try:
            written += os.write(fd, b"x" * 65_536)
            refused = 0
            await asyncio.sleep(0)
        except BlockingIOError:
            refused += 1
            await asyncio.sleep(0.01)
    return written


async def threads_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "pipe-reader":
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()
