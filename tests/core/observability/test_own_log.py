"""The kept lines of llamasup itself."""

from __future__ import annotations

import re

import pytest

from llamasup.core.observability.own_log import MAX_LINES, OwnLog


def texts(read: bytes) -> list[str]:
    return re.findall(r"(?m)^\S+ (.*)$", read.decode())


def test_tail_has_the_last_lines_and_those_to_come() -> None:
    log = OwnLog()
    log.add("info", "one\ntwo")
    tail = log.tail(1)
    assert texts(tail.read()) == ["info: two"]
    assert tail.read() == b""
    log.add("warning", "a \033[31mred\u202e line")
    assert texts(tail.read()) == ["warning: a \\x1b[31mred\\u202e line"]


@pytest.mark.parametrize(("lines", "first"), [(0, None), (3, "info: 1497"), (10_000, "info: 500")])
def test_oldest_lines_are_dropped(lines: int, first: str | None) -> None:
    log = OwnLog()
    for number in range(MAX_LINES + 500):
        log.add("info", str(number))
    assert next(iter(texts(log.tail(lines).read())), None) == first


def test_slow_reader_gets_what_is_left() -> None:
    log = OwnLog()
    tail = log.tail(10)
    for number in range(MAX_LINES + 1):
        log.add("info", str(number))
    assert [len(texts(tail.read())), tail.read()] == [MAX_LINES, b""]


def test_line_is_cut() -> None:
    log = OwnLog()
    log.add("info", "x" * 1_000_000)
    assert len(log.tail(1).read()) < 3000
