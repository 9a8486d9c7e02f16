"""Every event, and every byte, of a stream as the place where its llama-server ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk
from llamasup.features.continuation.answer import NotContinued
from llamasup.features.continuation.stream import MAX_HELD, MAX_KEPT, TAIL_PIECES, Recording
from tests.features.continuation.streams import (
    PIECES,
    SERVERS,
    WHOLE,
    ChatServer,
    CompletionServer,
    MessagesServer,
    ResponsesServer,
    complete,
    data,
    framed,
)

FIRST, SECOND = "first", "the-second"
EVERY_API = pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.route)


class Client:
    """What the client receives."""

    def __init__(self) -> None:
        self.raw = b""

    def write(self, data: bytes) -> None:
        self.raw += data

    @property
    def events(self) -> str:
        """Without comments, which clients skip."""
        payload: list[bytes] = []
        Dechunker(payload.append).write(self.raw)
        blocks = b"".join(payload).decode().split("\n\n")
        return "".join(f"{block}\n\n" for block in blocks if block and not block.startswith(":"))


def recording(server: Any, **changes: Any) -> Recording:
    return Recording(server.route, json.dumps({**server.body, **changes}).encode())


def sent_until(cut: int, server: Any, client: Client) -> Recording:
    """The recording of a stream whose server has sent only the first ``cut`` events."""
    record = recording(server)
    record.begin(client.write)
    for read in framed(server(FIRST).stream(PIECES))[:cut]:
        record.relay(read)
    return record


def pieces_in(events: Sequence[str]) -> int:
    """How many pieces of the text these events have."""
    text = "".join(events)
    return sum(json.dumps(piece, ensure_ascii=False) in text for piece in PIECES)


def continue_as_asked(record: Recording, client: Client, server: Any, had: int) -> None:
    """The second server answers: it has ``had`` pieces in its prompt, and repeats them first."""
    record.continued_body()
    record.begin(client.write, repeats=True)
    rest = PIECES[had:] or (PIECES[0],)
    prefix = "" if server.route in ("/v1/completions",) else "".join(PIECES[:had])
    for read in complete(server(SECOND).stream(rest, prompt=17 + had, prefix=prefix)):
        record.relay(read)
    record.finish()


@EVERY_API
def test_continued_stream_has_the_events_of_an_undisturbed_one(server: Any) -> None:
    whole = server(FIRST).stream(PIECES)
    texts = [number for number, event in enumerate(whole) if pieces_in([event]) == 1]
    for cut in range(1, texts[-1] + 2):
        client = Client()
        record = sent_until(cut, server, client)
        continue_as_asked(record, client, server, pieces_in(whole[:cut]))
        # The slot is another one. An item that the client did not know yet is that of the second server.
        expected = "".join(whole).replace('"id_slot":5', '"id_slot":10')
        if cut < 3:
            expected = expected.replace(f"msg_{FIRST}", f"msg_{SECOND}")
        assert client.events == expected, cut
        assert client.raw.endswith(LAST_CHUNK)
        assert b"\n\n: llama-server ended within this answer" in client.raw.replace(b"\r\n", b"\n\n")


@EVERY_API
def test_client_gets_only_whole_events_whatever_the_reads(server: Any) -> None:
    stream = b"".join(complete(server(FIRST).stream(PIECES)))
    for at in range(1, len(stream)):
        client = Client()
        record = recording(server)
        record.begin(client.write)
        record.relay(stream[:at])
        assert client.raw == b"" or client.raw.endswith((b"\n\n\r\n", LAST_CHUNK)), at
        record.relay(stream[at:])
        record.finish()
        assert client.raw == stream


@EVERY_API
def test_request_that_continues_asks_for_the_rest(server: Any) -> None:
    whole = server(FIRST).stream(PIECES)
    cut = next(number for number, event in enumerate(whole) if '"ä"' in event) + 1
    body = json.loads(sent_until(cut, server, Client()).continued_body())
    (limit,) = [name for name in body if name.startswith(("max", "n_"))]
    assert body[limit] == 8 - 6
    begun = "Once there lived a smä"
    assert begun in json.dumps(body, ensure_ascii=False) or body["prompt"] == ["Tell me", *range(100, 106)]


@EVERY_API
def test_first_request_is_repeated_before_any_text(server: Any) -> None:
    record = recording(server)
    record.begin(Client().write)
    assert json.loads(record.continued_body()) == server.body


@EVERY_API
def test_answer_that_lacks_only_its_end_is_not_continued(server: Any) -> None:
    whole = server(FIRST).stream(PIECES)
    marks = ('"length"', "_stop", "text.done", '"stop":true')
    end = next(number for number, event in enumerate(whole) if any(mark in event for mark in marks))
    record = sent_until(end + 1, server, Client())
    with pytest.raises(NotContinued, match=r"complete but for its end"):
        record.continued_body()


@EVERY_API
def test_answer_is_complete_with_its_last_event(server: Any) -> None:
    record = recording(server)
    record.begin(Client().write)
    assert not record.is_complete
    for event in framed(server(FIRST).stream(PIECES)):
        assert not record.is_complete
        record.relay(event)
    assert record.is_complete


def test_answer_that_ends_within_a_chunk_is_not_complete() -> None:
    record = recording(ChatServer)
    record.begin(Client().write)
    event = chunk(ChatServer(FIRST).stream(["x" * 100_000])[1].encode())
    for _ in range(11):
        record.relay(event)  # more than is kept: reads are forwarded as they come
    last = chunk(b"data: [DONE]\n\n")
    record.relay(last[:-4])
    assert not record.is_complete
    record.relay(last[-4:])
    assert record.is_complete


def test_answer_that_ends_with_an_unreadable_event_is_not_complete() -> None:
    record = recording(ChatServer)
    record.begin(Client().write)
    record.relay(chunk(b"data: [DONE\n\n"))
    assert not record.is_complete


@EVERY_API
def test_second_end_continues_what_both_servers_sent(server: Any) -> None:
    client = Client()
    whole = server(FIRST).stream(PIECES)
    cut = next(number for number, event in enumerate(whole) if '" lived"' in event) + 1
    record = sent_until(cut, server, client)
    record.continued_body()
    record.begin(client.write, repeats=True)
    prefix = "" if server.route == "/v1/completions" else "".join(PIECES[:3])
    second = server(SECOND).stream(PIECES[3:], prompt=20, prefix=prefix)
    until = next(number for number, event in enumerate(second) if '"ä"' in event) + 1
    for read in framed(second)[:until]:
        record.relay(read)
    continue_as_asked(record, client, server, 6)
    assert client.events.count("Once") == "".join(whole).count("Once")
    for piece in PIECES:
        assert json.dumps(piece, ensure_ascii=False) in client.events


def test_answer_of_more_than_one_mebibyte_is_not_kept() -> None:
    client = Client()
    record = recording(ChatServer)
    record.begin(client.write)
    event = ChatServer(FIRST).stream(["x" * 100_000])[1]
    for _ in range(11):
        record.relay(chunk(event.encode()))
    assert len(client.raw) > MAX_KEPT
    assert sum(map(len, record.tail)) <= TAIL_PIECES * 110_000
    with pytest.raises(NotContinued, match="longer than 1 MiB"):
        record.continued_body()


@pytest.mark.parametrize(
    "server", [ChatServer, MessagesServer, ResponsesServer], ids=lambda server: server.route
)
def test_server_that_reads_the_beginning_in_another_way_is_refused(server: Any) -> None:
    client = Client()
    whole = server(FIRST).stream(PIECES)
    cut = next(number for number, event in enumerate(whole) if '" a"' in event) + 1
    record = sent_until(cut, server, client)
    record.continued_body()
    record.begin(client.write, repeats=True)
    before = client.raw
    with pytest.raises(NotContinued, match="in another way"):
        for read in complete(server(SECOND).stream(PIECES[4:], prefix="Once they lived a")):
            record.relay(read)
    assert client.raw == before


def test_error_within_the_second_part_is_not_passed_as_text() -> None:
    client = Client()
    record = sent_until(4, ChatServer, client)
    record.continued_body()
    record.begin(client.write, repeats=True)
    with pytest.raises(NotContinued, match="has an error"):
        record.relay(chunk(data({"error": {"message": "no"}}).encode()))


def test_events_that_are_not_json_are_not_continued() -> None:
    record = sent_until(3, ChatServer, Client())
    record.relay(chunk(b"data: {broken\n\n"))
    with pytest.raises(NotContinued, match="is not JSON"):
        record.continued_body()


def test_comments_are_skipped() -> None:
    client = Client()
    record = sent_until(3, ChatServer, client)
    record.relay(chunk(b": ping\n\n"))
    assert WHOLE.startswith(json.loads(record.continued_body())["messages"][-1]["content"])


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.route)
def test_server_that_continues_no_message_is_not_asked_to(server: Any) -> None:
    client = Client()
    whole = server(FIRST).stream(PIECES)
    cut = next(number for number, event in enumerate(whole) if '" a"' in event) + 1
    record = sent_until(cut, server, client)
    record.continued_body()
    if server.route in ("/v1/completions", "/completion"):
        record.begin(client.write)
        return
    with pytest.raises(NotContinued, match="not seen to continue"):
        record.begin(client.write)


@EVERY_API
def test_server_that_continues_no_message_answers_before_any_text(server: Any) -> None:
    client = Client()
    record = recording(server)
    record.begin(client.write)
    record.continued_body()
    record.begin(client.write)
    for read in complete(server(SECOND).stream(PIECES)):
        record.relay(read)
    record.finish()
    assert client.events == "".join(server(SECOND).stream(PIECES))


@EVERY_API
def test_build_that_repeats_nothing_continues(server: Any) -> None:
    client = Client()
    whole = server(FIRST).stream(PIECES)
    cut = next(number for number, event in enumerate(whole) if '" a"' in event) + 1
    record = sent_until(cut, server, client)
    record.continued_body()
    record.begin(client.write, repeats=False)
    for read in complete(server(SECOND).stream(PIECES[4:], prompt=21)):
        record.relay(read)
    assert [client.events.count(json.dumps(piece, ensure_ascii=False)) for piece in PIECES] == [1] * len(
        PIECES
    )


def test_pings_of_the_next_server_are_passed_on() -> None:
    client = Client()
    record = sent_until(3, ChatServer, client)
    record.continued_body()
    record.begin(client.write, repeats=True)
    record.relay(chunk(b": ping\n\n"))
    assert client.raw.endswith(chunk(b": ping\n\n"))


@pytest.mark.parametrize("event", [b"data: {}\r\n\r\n", b"data: " + b"x" * MAX_HELD], ids=["CRLF", "long"])
def test_events_that_cannot_be_kept_are_sent_at_once(event: bytes) -> None:
    client = Client()
    record = sent_until(3, ChatServer, client)
    before = client.raw
    record.relay(chunk(event))
    record.relay(chunk(b"more"))
    assert client.raw == before + chunk(event) + chunk(b"more")
    with pytest.raises(NotContinued, match="events are too long"):
        record.continued_body()


@pytest.mark.parametrize(
    ("request_", "event"),
    [
        (b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}", "data: {}\n\n"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "data: {}\n\n"),
        (b"{}", 'data: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n'),
    ],
)
def test_values_that_cannot_be_read_are_not_continued(request_: bytes, event: str) -> None:
    record = Recording(ChatServer.route, request_)
    record.begin(lambda _: None)
    record.relay(chunk(event.encode()))
    with pytest.raises(NotContinued):
        record.continued_body()


def test_strange_value_of_the_next_server_is_refused() -> None:
    client = Client()
    record = recording(CompletionServer)
    record.begin(client.write)
    record.relay(framed(CompletionServer(FIRST).stream(PIECES))[0])
    record.continued_body()
    record.begin(client.write)
    with pytest.raises(NotContinued, match="cannot be read"):
        record.relay(chunk(data({"content": "a", "tokens_predicted": "x"}).encode()))
