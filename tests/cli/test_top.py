"""``top`` and a llamasup that no longer answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from llamasup.cli.commands.top import _Top
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping

SILENT, GONE, STOPS = ControlFailed("does not answer"), NotRunning("nobody listens"), Stopping("is stopping")


class Client:
    """Its answers, in turn: an error, or a status."""

    def __init__(self, *answers: LlamasupError | None) -> None:
        self._answers: Iterator[LlamasupError | None] = iter(answers)

    def status(self) -> dict[str, Any]:
        if error := next(self._answers):
            raise error
        return {"models": ()}


@pytest.mark.parametrize(
    ("first", "then", "has_ended"),
    [
        (GONE, (), True),
        (STOPS, (), True),
        (SILENT, (GONE,), True),  # the connection broke, because it ended
        (SILENT, (SILENT, STOPS), True),
        (SILENT, (None,), False),
        (SILENT, (SILENT, SILENT), False),  # suspended
    ],
)
def test_silent_llamasup_has_not_ended(
    first: LlamasupError, then: tuple[LlamasupError | None, ...], has_ended: bool
) -> None:
    assert _Top(cast("Any", Client(*then)))._has_ended(first) is has_ended
