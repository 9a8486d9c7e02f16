"""Runs a coroutine that a signal ends in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from llamasup.cli.stop_signals import STOP_SIGNALS, Interrupted

__all__ = ["interruptible"]

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
        name = signals[0] if signals else "SIGINT"
        is_signal = name in signal.Signals.__members__
        raise Interrupted(
            signal.Signals[name] if is_signal else signal.SIGTERM, "" if is_signal else name
        ) from None
