"""The event of an error, and the lines of a stream."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.sse import Lines, error_event
from llamasup.core.llama_server.answers import error_of


def test_an_error_event_is_named_where_the_api_names_its_events() -> None:
    body = b'{"error":{"message":"m"}}'
    assert error_event(b"/v1/chat/completions", body) == b'data: {"error":{"message":"m"}}\n\n'
    assert (
        error_event(b"/v1/messages", body)
        == b'event: error\ndata: {"type":"error","error":{"message":"m"}}\n\n'
    )
    for event in (error_event(b"/v1/responses", body), error_event(b"/completion", body)):
        json.loads(event.partition(b"data: ")[2])


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"data: 1\n\nda", b"ta", b": 2\r\n", b""], ["data: 1", "", "data: 2"]),
        (["a\u2028b\x85c\u2029d\x0be\n".encode()], ["a\u2028b\x85c\u2029d\x0be"]),
        ([b"gr\xc3", b"\xb6\n\xff\n"], ["grö", "\ufffd"]),
        ([b"x\n", b"no ", b"end"], ["x", "no end"]),
        ([], []),
    ],
)
def test_only_a_line_feed_ends_a_line(pieces: list[bytes], lines: list[str]) -> None:
    reader = Lines()
    found = [line for piece in pieces for line in reader.add(piece)]
    assert [*found, *reader.rest()] == lines


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            b'{\n  "error": {\n"code": 400, "message": "no \\"messages\\"", "type": "invalid_request"}\n}',
            {"code": 400, "message": 'no "messages"', "type": "invalid_request"},
        ),
        (b'{"error":{}}', {}),
        (b'{"content":"an answer after all"}', None),
        (b"<html>", None),
        (b"\xff", None),
        (b"", None),
        (b"[" * 100_000, None),
    ],
)
def test_an_error_that_comes_where_a_stream_was_promised_fits_into_one_event(
    body: bytes, told: dict[str, object] | None
) -> None:
    error = error_of(400, body)
    assert b"\n" not in error
    synthetic = {
        "message": "llama-server answered with status 400 instead of a stream",
        "type": "server_error",
        "code": 400,
    }
    assert json.loads(error) == {"error": synthetic if told is None else told}
