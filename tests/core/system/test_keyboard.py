"""Single keys from a terminal: characters, arrows, and what is neither."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator

import pytest

from llamasup.core.system.native.keyboard import keyboard


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The user's end of a terminal, whose other end is standard input."""
    user, program = os.openpty()
    with os.fdopen(program) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield user
    os.close(user)


def test_keys_arrive_one_by_one(terminal: int) -> None:
    with keyboard() as keys:
        os.write(terminal, b"q\x1b[A\x1bOBj\x1b[5~\xff\x1b")
        pressed = [keys.next(10.0) for _ in range(7)]
        assert pressed == ["q", "up", "down", "j", None, "\ufffd", "escape"]
        assert keys.next(0.0) is None


def test_terminal_is_as_before_afterwards(terminal: int) -> None:
    before = termios.tcgetattr(sys.stdin)
    with keyboard():
        assert not termios.tcgetattr(sys.stdin)[3] & termios.ECHO
    assert termios.tcgetattr(sys.stdin) == before
