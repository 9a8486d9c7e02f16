"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import ParamSpec

__all__ = ["in_loop"]

Arguments = ParamSpec("Arguments")


def in_loop(test: Callable[Arguments, Coroutine[None, None, None]]) -> Callable[Arguments, None]:
    """In debug mode: a callback of the wrong thread is an error there."""

    @functools.wraps(test)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        asyncio.run(test(*arguments, **named), debug=True)

    return run
