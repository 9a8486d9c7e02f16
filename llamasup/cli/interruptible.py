"""Runs work that a signal interrupts: the work cleans up first."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llamasup.cli.stop_signals import STOP_SIGNALS, Interrupted

T = TypeVar("T")


def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; a signal cancels it, and raises Interrupted when it has cleaned up."""
    signals: list[str] = []

    async def act() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(name: str) -> None:
            signals.append(name)
            loop.call_soon_threadsafe(task.cancel)

        STOP_SIGNALS.deliver_to(cancel)
        try:
            return await work
        finally:
            STOP_SIGNALS.raise_again()

    try:
        return asyncio.run(act())
    except asyncio.CancelledError:
        raise _interrupted(signals[0] if signals else "SIGINT") from None


@contextmanager
def signals_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Deliver signals to ``listener`` in place of the listener before, in work of ``interruptible``."""
    before = STOP_SIGNALS.listener
    assert before is not None
    STOP_SIGNALS.deliver_to(listener)
    try:
        yield
    finally:
        STOP_SIGNALS.deliver_to(before)


@contextmanager
def on_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call ``act`` in the event loop, in work that ``interruptible`` runs.

    Other signals keep their effect.
    """
    loop, before = asyncio.get_running_loop(), STOP_SIGNALS.listener
    assert before is not None

    def deliver(name: str) -> None:
        if name == "SIGINT":
            loop.call_soon_threadsafe(act)
        else:
            before(name)

    with signals_to(deliver):
        yield


@contextmanager
def interruptible_at_pauses() -> Iterator[Callable[[float], None]]:
    """Yield a function that waits for so many seconds, and raises Interrupted if a signal has come.

    It is for work in C code that cannot be interrupted, such as Ray's (2.60: SystemError). A second signal
    kills the process at once.
    """
    signals: list[str] = []

    def note(name: str) -> None:
        signals.append(name)
        if len(signals) > 1:
            os._exit(128 + _interrupted(name).signal_number)

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if signals:
            raise _interrupted(signals[0])

    STOP_SIGNALS.deliver_to(note)
    try:
        yield pause
    finally:
        STOP_SIGNALS.raise_again()
    if signals:
        raise _interrupted(signals[0])


def _interrupted(name: str) -> Interrupted:
    is_signal = name in signal.Signals.__members__
    return Interrupted(signal.Signals[name] if is_signal else signal.SIGTERM, "" if is_signal else name)
