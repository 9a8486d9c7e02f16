"""``X-Llamasup-Priority``, and that what is said to llamasup does not reach llama-server."""

from __future__ import annotations

import pytest

from llamasup.http.heads import Head, HeadRules, HttpError, Priority, read_head

HOST = (b"host", b"localhost")


def head(*headers: tuple[bytes, bytes], rules: HeadRules | None = None) -> Head | HttpError:
    return read_head(b"POST", b"/v1/chat/completions", "1.1", [HOST, *headers], rules or HeadRules())


@pytest.mark.parametrize(
    ("value", "priority"),
    [(b"high", Priority.HIGH), (b" Normal ", Priority.NORMAL), (b"LOW", Priority.LOW)],
)
def test_a_request_says_how_urgent_it_is(value: bytes, priority: Priority) -> None:
    read = head((b"x-llamasup-priority", value))
    assert isinstance(read, Head)
    assert read.priority is priority
    assert b"llamasup" not in read.opening.lower()


def test_one_that_says_nothing_asks_for_nothing() -> None:
    read = head()
    assert isinstance(read, Head)
    assert read.priority is None


@pytest.mark.parametrize("value", [b"", b"urgent", b"0", b"high, low"])
def test_what_is_no_priority_is_refused_with_what_is_one(value: bytes) -> None:
    error = head((b"x-llamasup-priority", value))
    assert isinstance(error, HttpError)
    assert (error.status, error.cause) == (400, "bad_priority")
    assert "high, normal or low" in error.remedy


def test_other_headers_of_llamasups_own_go_no_further() -> None:
    read = head((b"x-llamasup-anything", b"1"), (b"x-kept", b"1"))
    assert isinstance(read, Head)
    assert b"x-kept: 1\r\n" in read.opening
    assert b"anything" not in read.opening


def test_a_transparent_llamasup_leaves_them_as_they_are() -> None:
    """With a limit of its own it serves by them, but refuses nothing that llama-server would take."""
    seen_through = HeadRules(transparent=True)
    for value, priority in ((b"low", Priority.LOW), (b"urgent", None)):
        read = head((b"x-llamasup-priority", value), (b"x-llamasup-anything", b"1"), rules=seen_through)
        assert isinstance(read, Head)
        assert read.priority is priority
        assert b"x-llamasup-priority: " + value in read.opening
        assert b"x-llamasup-anything: 1" in read.opening
