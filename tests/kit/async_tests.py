"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec

__all__ = ["async_test"]

Arguments = ParamSpec("Arguments")


def async_test(test: Callable[Arguments, Coroutine[None, None, None]]) -> Callable[Arguments, None]:
    """Runs the coroutine in a new event loop; keeps the fixtures."""

    @wraps(test)
    def run(*arguments: Arguments.args, **fixtures: Arguments.kwargs) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run
