"""The embedded runtime as a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.conftest import xllamacpp
from tests.kit import ports
from tests.real.embedded.child import Child

__all__ = ["xllamacpp"]

Start = Callable[..., Child]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


@pytest.fixture
def start(xllamacpp: Any, tiny_model: Path) -> Iterator[Start]:
    """Start ``python -m llamasup.embedded`` with the tiny model, on a free port by default."""
    children: list[Child] = []

    def start_child(
        *arguments: str, environ: dict[str, str] | None = None, model: Path | None = None
    ) -> Child:
        # One thread: two spin against each other when the machine has something else to do as well.
        always = ["--model", str(model or tiny_model), "--port", "0", "--threads", "1"]
        child = Child([*always, *arguments], environ)
        children.append(child)
        return child

    yield start_child
    for child in children:
        child.kill()
