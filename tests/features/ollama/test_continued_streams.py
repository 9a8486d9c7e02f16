"""A stream of Ollama's API whose llama-server ends is continued by the next one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.http.chunks import Dechunker
from tests.core.proxy.generations import FAILED, await_queued, end_generation
from tests.core.proxy.rig import STREAM_HEAD, Rig, Wire, answer
from tests.features.continuation.streams import PIECES, ChatServer, framed
from tests.features.continuation.test_continued_streams import (
    FIRST,
    LAST_CHUNK,
    SECOND,
    continue_on,
    cut,
    rest_of,
    set_continues,
)
from tests.features.ollama.test_dialect import HI, MakeRig, ask, line
from tests.features.ollama.test_dialect import kept as kept
from tests.features.ollama.test_dialect import make as make
from tests.features.ollama.test_dialect import models as models


@pytest.fixture
def continuing(make: MakeRig) -> Rig:
    return set_continues(make())


def begun(rig: Rig, pieces: int = 3, request: bytes | None = None) -> tuple[Wire, Wire]:
    """A client that has received the lines of this many pieces, and its server."""
    client = rig.send(
        request or ask("chat", messages=HI, options={"num_predict": ChatServer.body["max_tokens"]})
    )
    child = rig.accept()
    child.message()
    events = framed(FIRST.stream(PIECES))[: pieces + 1]
    child.send(STREAM_HEAD + b"".join(events))
    client.head()
    assert text_of(line(client) for _ in range(pieces)) == "".join(PIECES[:pieces])
    return client, child


def next_server(rig: Rig) -> Wire:
    return continue_on(rig, limit="n_predict")


def text_of(lines: Any) -> str:
    return "".join(each["message"]["content"] for each in lines)


def rest_of_lines(client: Wire) -> list[Any]:
    payload = list[bytes]()
    Dechunker(payload.append).write(client.until(LAST_CHUNK))
    return [json.loads(each) for each in b"".join(payload).splitlines()]


def test_stream_is_continued_by_the_next_generation(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    child = next_server(continuing)
    child.send(rest_of())
    *lines, last = rest_of_lines(client)
    assert text_of(lines) == "".join(PIECES[3:])
    assert (last["done"], last["done_reason"]) == (True, "length")
    assert (last["prompt_eval_count"], last["eval_count"]) == (17, len(PIECES))
    record = continuing.record()
    assert (record.path, record.outcome, record.continued) == ("/api/chat", "ok", True)
    client.send(ask("chat", messages=HI))  # the connection stays open
    child.message()


def test_http_1_0_client_gets_lines_without_chunks(continuing: Rig) -> None:
    request = ask("chat", messages=HI, options={"num_predict": 8}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    client, child = continuing.send(request), continuing.accept()
    child.message()
    child.send(STREAM_HEAD + b"".join(framed(FIRST.stream(PIECES))[:4]))
    client.head()
    cut(continuing, child)
    next_server(continuing).send(rest_of())
    lines = [json.loads(each) for each in client.rest().splitlines()]
    assert text_of(lines) == "".join(PIECES)
    assert lines[-1]["done"]


def test_answer_without_its_last_line_is_complete(continuing: Rig) -> None:
    """The server ends after its last event, and before the end of the body."""
    client, child = begun(continuing)
    child.send(b"".join(framed(FIRST.stream(PIECES))[4:]))
    assert text_of(line(client) for _ in PIECES[3:]) == "".join(PIECES[3:])
    child.close()
    end_generation(continuing)
    assert line(client)["eval_count"] == len(PIECES)
    assert client.receive(5) == LAST_CHUNK
    assert continuing.record().outcome == "ok"


def test_model_that_fails_while_the_stream_waits_ends_it_with_an_error(continuing: Rig) -> None:
    client, child = begun(continuing)
    child.close()
    await_queued(continuing, 1)
    end_generation(continuing, FAILED)
    assert line(client) == {"error": "it ran out of memory. Use a smaller context."}
    assert client.sees_the_end()


def test_refusal_of_the_next_server_is_the_error_of_the_stream(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    error = b'{"error":{"code":400,"message":"prefill is not possible","type":"invalid_request_error"}}'
    next_server(continuing).send(answer(error, code=b"400 Bad Request"))
    assert line(client) == {"error": "prefill is not possible"}
    assert client.sees_the_end()
    assert continuing.record().outcome == "error_event"


def test_other_text_of_the_next_server_is_not_sent(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    child = next_server(continuing)
    events = framed(SECOND.stream(PIECES[3:], prefix="Once they lived"))
    child.send(STREAM_HEAD + events[0] + events[1] + events[2])
    assert "which could not be continued" in line(client)["error"]
    assert client.sees_the_end()
    assert child.sees_the_end()
    assert continuing.record().outcome == "upstream_failed"
