"""A call in a thread ends before its caller does, also when the caller is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from llamasup.features.batch.threads import in_thread
from tests.kit.async_tests import async_test


@async_test
async def test_result_and_error_come_from_the_thread() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@async_test
async def test_cancelled_caller_waits_for_the_end_of_the_thread(times: int, fails: bool) -> None:
    began, may_end, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def act() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        ended.set()
        if fails:
            raise ZeroDivisionError

    calling = loop.create_task(in_thread(act))
    await began.wait()
    for _ in range(times):
        calling.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    assert not calling.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set()
