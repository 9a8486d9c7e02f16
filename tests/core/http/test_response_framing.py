"""The framing of a response, for every rule of RFC 9112 §6.3."""

from __future__ import annotations

import pytest

from llamasup.core.http.response_heads import (
    CHUNKED,
    EMPTY,
    LENGTH,
    UNTIL_CLOSE,
    Framing,
    framing_of,
)


@pytest.mark.parametrize(
    ("status", "transfer_coding", "length", "is_head", "expected"),
    [
        (200, None, b"5", True, EMPTY),
        (200, b"chunked", None, True, EMPTY),
        (204, b"chunked", b"5", False, EMPTY),
        (304, None, b"5", False, EMPTY),
        (200, b"chunked", None, False, CHUNKED),
        (200, b" Chunked ", b"5", False, CHUNKED),
        (200, b"gzip, chunked", None, False, "used the transfer coding 'gzip, chunked'"),
        (200, b"identity", b"5", False, "used the transfer coding 'identity'"),
        (200, None, b"0" * 33, False, "sent a Content-Length with too many digits"),
        (200, None, b"0" * 31 + b"5", False, LENGTH),
        (200, None, b"0", False, LENGTH),
        (500, None, b"5", False, LENGTH),
        (205, None, None, False, UNTIL_CLOSE),
        (200, None, None, False, UNTIL_CLOSE),
    ],
)
def test_framing_of_a_response(
    status: int, transfer_coding: bytes | None, length: bytes | None, is_head: bool, expected: Framing | str
) -> None:
    assert framing_of(status, transfer_coding, length, is_head=is_head) == expected
