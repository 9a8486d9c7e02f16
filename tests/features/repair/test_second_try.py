"""Answers that cannot be used are requested a second time, with another seed (``repair/second_try.py``)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route
from llamasup.core.llama_server.schema_check import AskedJson
from llamasup.core.observability.counters import CANCELLED, Metrics
from llamasup.core.proxy import ProxyConfig, bind
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.request import UNREAD, Request
from llamasup.core.proxy.settings import Limits
from llamasup.core.queueing.endpoint import NodeLink, generation_ended
from llamasup.core.settings.model import Repairs
from llamasup.features.repair import answers
from llamasup.features.repair.answers import MAX_HELD, Checks
from llamasup.features.repair.second_try import SecondTry
from llamasup.features.virtual.rewrite import rewritten
from llamasup.features.virtual.settings import Candidate, Changes
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.many import ManyModels
from tests.core.proxy.rig import (
    CHAT,
    EVENT,
    STREAM_HEAD,
    Clock,
    Rig,
    Wire,
    answer,
    chunk,
    error_of,
    eventually,
    field,
    post,
    status,
)
from tests.core.proxy.test_virtual_models import NAME, QWEN, Cold
from tests.features.continuation.streams import PIECES, framed
from tests.features.continuation.test_continued_streams import (
    BODY,
    FIRST,
    LAST_CHUNK,
    continue_on,
    cut,
    rest_of,
    set_continues,
)
from tests.features.repair.conversations import conversation
from tests.features.repair.test_answers import ERROR_EVENT, JSON, MISMATCH, chat

BOTH = Repairs(tool_calls=True, json=True)
TOOLS = Repairs(tool_calls=True)
MARKED = b"x-llamasup-repaired"
SERVER_ERROR = b"500 Internal Server Error"
ASKED = {"messages": [{"role": "user", "content": "x"}]}
REFUSED = answer(MISMATCH, code=SERVER_ERROR)
GOOD_BODY = chat('{"age": 3}')
BAD_BODY = chat('{"age": -3}')
USAGE = b',"usage":{"completion_tokens":%d,"prompt_tokens":%d,"total_tokens":0}}'
LINK = NodeLink("other", b"other.test", b"front", lambda: None)
GOOD, BAD = answer(GOOD_BODY), answer(BAD_BODY)


def with_usage(body: bytes, prompt: int, completion: int) -> bytes:
    return body[:-1] + USAGE % (completion, prompt)


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(body: bytes) -> bytes:
    return CHUNKED_HEAD + chunk(body[:-10]) + chunk(body[-10:]) + b"0\r\n\r\n"


def set_repairs(rig: Rig, repairs: Repairs = BOTH) -> Rig:
    rig.call(lambda: setattr(rig.backend, "repairs", repairs))
    return rig


def request(*lines: bytes, **fields: Any) -> bytes:
    return post(CHAT, json.dumps({**ASKED, **fields}).encode(), *lines)


def second_request(rig: Rig, child: Wire, first: bytes) -> tuple[Wire, dict[str, Any]]:
    """Send the first answer; returns the child with the second request, and its body."""
    child.send(first)
    if first.startswith(b"HTTP/1.1 500"):  # its connection is closed
        child = rig.accept()
    _head, body = child.message()
    return child, json.loads(body)


def begin(rig: Rig, sent: bytes) -> tuple[Wire, Wire]:
    return rig.begin(sent)


def only_connection(rig: Rig) -> Downstream:
    (connection,) = rig.proxy.clients
    return cast("Downstream", connection)


def await_held(rig: Rig, size: int) -> None:
    """Wait until so many bytes of the answer have arrived at the proxy."""

    def held() -> int:
        shown = only_connection(rig).live(monotonic())
        assert shown is not None
        return shown.request.bytes_out

    eventually(lambda: rig.call(held) == size)


def test_answer_that_llama_server_cannot_parse_is_requested_again(rig: Rig) -> None:
    client, child = begin(set_repairs(rig, TOOLS), request(seed=7))
    child, second = second_request(rig, child, REFUSED)
    assert second.pop("seed") != 7
    assert second == ASKED
    child.send(answer(b"{}"))
    head, body = client.message()
    assert (status(head), body) == (200, b"{}")
    assert field(head, MARKED) == b"tool_call"
    assert rig.proxy.metrics.repaired == {("tiny", "tool_call"): 1}
    assert rig.record().repaired == "tool_call"


@pytest.mark.parametrize(
    "second",
    [
        REFUSED,
        answer(b'{"error":{"code":500,"message":"other"}}', code=SERVER_ERROR),
        answer(code=b"400 Bad"),
    ],
)
def test_first_error_is_forwarded_if_the_second_attempt_fails(rig: Rig, second: bytes) -> None:
    client, child = begin(set_repairs(rig, TOOLS), request())
    child, _body = second_request(rig, child, REFUSED)
    child.send(second)
    head, body = client.message()
    assert (status(head), body) == (500, MISMATCH)
    assert field(head, MARKED) is None
    assert rig.proxy.metrics.repaired == {("tiny", "tool_call_failed"): 1}
    record = rig.record()
    assert (record.status, record.outcome, record.repaired) == (500, "ok", "tool_call_failed")


def test_json_that_does_not_match_its_schema_is_requested_again(rig: Rig) -> None:
    client, child = begin(set_repairs(rig, Repairs(json=True)), request(**JSON))
    child, second = second_request(rig, child, BAD)
    assert second.pop("seed") >= 0
    assert second == {**ASKED, **JSON}
    child.send(GOOD)
    head, body = client.message()
    assert (field(head, MARKED), body) == (b"json", GOOD_BODY)
    assert rig.proxy.metrics.repaired == {("tiny", "json"): 1}


@pytest.mark.parametrize(
    "second",
    [
        answer(chat("no")),
        answer(chat('{"age": ', "length")),
        answer(b"{"),
        REFUSED,
        answer(code=b"503 Service Unavailable"),
    ],
    ids=["wrong again", "cut off", "unreadable", "an error", "no server"],
)
def test_first_answer_is_forwarded_if_the_second_one_is_no_better(rig: Rig, second: bytes) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, BAD)
    child.send(second)
    head, body = client.message()
    assert (status(head), body) == (200, BAD_BODY)
    assert field(head, MARKED) is None
    assert rig.record().repaired == "json_failed"


def test_first_answer_is_forwarded_if_the_check_of_the_second_one_takes_too_long(rig: Rig) -> None:
    schema = {"properties": {"age": {"minimum": 0}, "list": {"uniqueItems": True}}}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    client, child = begin(set_repairs(rig), request(response_format=asked))
    child, _body = second_request(rig, child, BAD)
    child.send(answer(chat(json.dumps({"age": 3, "list": [[n] for n in range(2000)]}))))
    assert client.message()[1] == BAD_BODY


def test_first_answer_is_forwarded_if_the_check_of_the_second_one_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_answer: bytes) -> None:
        raise RuntimeError

    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, BAD)
    monkeypatch.setattr(answers, "read_answer", fail)
    child.send(GOOD)
    assert client.message()[1] == BAD_BODY
    assert "the check of a second answer has failed" in caplog.text


def test_good_answer_is_forwarded_byte_for_byte(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child.send(GOOD[:-5])
    child.send(GOOD[-5:])
    head, body = client.message()
    assert (status(head), body) == (200, GOOD_BODY)
    assert field(head, MARKED) is None
    assert rig.record().repaired == ""
    assert rig.proxy.metrics.repaired == {}
    client.send(request(**JSON))  # the connection of the client stays open, and that of the child
    child.message()


def test_answer_in_pieces_is_held_until_its_end(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child.send(BAD[:-3])
    await_held(rig, len(BAD_BODY) - 3)
    child, _body = second_request(rig, child, BAD[-3:])
    assert client.is_quiet()
    child.send(GOOD)
    assert client.message()[1] == GOOD_BODY


def test_cut_off_answer_is_not_requested_again(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    cut = chat('{"age": ', "length")
    child.send(answer(cut))
    assert client.message()[1] == cut
    assert rig.record().repaired == ""


@pytest.mark.parametrize(
    ("repairs", "lines", "fields"),
    [
        (Repairs(json=True), (), {}),
        (BOTH, (), {"temperature": 0}),
        (BOTH, (), {"n": 2}),
        (BOTH, (b"X-Llamasup-Priority: batch",), {}),
        (Repairs(), (), {}),
    ],
)
def test_other_errors_are_forwarded_at_once(
    rig: Rig, repairs: Repairs, lines: tuple[bytes, ...], fields: dict[str, Any]
) -> None:
    if repairs != Repairs():
        set_repairs(rig, repairs)
    client, child = begin(rig, request(*lines, **fields))
    child.send(REFUSED)
    assert status(client.message()[0]) == 500
    assert rig.record().repaired == ""


def test_error_with_another_cause_is_forwarded(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request())
    error = b'{"error":{"code":500,"message":"Failed to parse input","type":"server_error"}}'
    child.send(answer(error, code=SERVER_ERROR))
    assert client.message()[1] == error


def test_answer_is_forwarded_if_its_request_cannot_be_sent_again(rig: Rig) -> None:
    """The name of a field is not UTF-8, so that the body cannot get another seed."""
    body = json.dumps({**ASKED, **JSON}).encode()[:-1] + b',"\xff":1}'
    client, child = begin(set_repairs(rig), post(CHAT, body))
    child.send(BAD)
    assert client.message()[1] == BAD_BODY
    assert rig.in_flight() == 0


def test_answer_whose_check_fails_is_forwarded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_answer: bytes) -> None:
        raise RuntimeError

    monkeypatch.setattr(answers, "read_answer", fail)
    client, child = begin(set_repairs(rig), request(**JSON))
    child.send(BAD)
    assert client.message()[1] == BAD_BODY
    assert "the check of an answer has failed" in caplog.text
    assert rig.in_flight() == 0


def test_repaired_conversation_can_be_requested_again(rig: Rig) -> None:
    body = json.dumps(conversation("{")).encode()
    client, child = begin(set_repairs(rig), post(CHAT, body))
    child, second = second_request(rig, child, REFUSED)
    assert "malformed_arguments" in json.dumps(second)
    child.send(answer())
    assert field(client.message()[0], MARKED) == b"arguments, tool_call"
    assert rig.record().repaired == "arguments, tool_call"


def test_schema_that_llama_server_ignores_is_refused(make_rig: MakeRig) -> None:
    """The embedded runtime generates any text then, and a second answer would be no better."""
    rig = set_repairs(make_rig(ProxyConfig(key_file=keys_of("one name=one tpm=1000"))))
    asked = post(b"/completion", b'{"json_schema":{"not":{}}}', b"Authorization: Bearer one")
    client, child = begin(rig, asked)
    child.send(answer(with_usage(b'{"content":" think of it","stop_type":"limit"}', 3, 4)))
    assert error_of(client, 400)["cause"] == "schema_ignored"
    record = rig.record()
    assert (record.status, record.repaired) == (400, "schema_ignored")
    assert (record.tokens_prompt, record.tokens_completion) == (3, 4)
    assert rig.proxy.metrics.repaired == {("tiny", "schema_ignored"): 1}
    assert rig.in_flight() == 0
    client.send(asked)  # the connections stay open
    child.message()


# --- streams


def test_stream_that_begins_with_the_error_is_requested_again(rig: Rig) -> None:
    client, child = begin(set_repairs(rig, TOOLS), request(stream=True))
    child.send(STREAM_HEAD)  # once a slot takes the request
    child.send(chunk(ERROR_EVENT), b"0\r\n\r\n")
    _head, _body = child.message()
    child.send(STREAM_HEAD + EVENT + b"0\r\n\r\n")
    head = client.head()
    assert field(head, MARKED) == b"tool_call"
    assert client.until(b"0\r\n\r\n") == EVENT + b"0\r\n\r\n"


def test_first_error_event_is_forwarded_if_the_second_stream_begins_with_it_too(rig: Rig) -> None:
    failed = STREAM_HEAD + chunk(ERROR_EVENT) + b"0\r\n\r\n"
    client, child = begin(set_repairs(rig, TOOLS), request(stream=True))
    child.send(failed)
    child.message()
    child.send(failed)
    head = client.head()
    assert field(head, MARKED) is None
    assert client.until(b"0\r\n\r\n") == chunk(ERROR_EVENT) + b"0\r\n\r\n"
    assert rig.record().repaired == "tool_call_failed"


def test_second_stream_that_begins_with_another_error_is_not_forwarded(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(stream=True))
    child.send(STREAM_HEAD + chunk(ERROR_EVENT) + b"0\r\n\r\n")
    child.message()
    child.send(STREAM_HEAD + chunk(b'data: {"error":{"message":"other"}}\n\n') + b"0\r\n\r\n")
    client.head()
    assert client.until(b"0\r\n\r\n") == chunk(ERROR_EVENT) + b"0\r\n\r\n"


def test_streams_are_not_held_for_their_json(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(stream=True, **JSON))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)


def test_stream_with_comments_goes_on_with_the_second_answer(make_rig: MakeRig, clock: Clock) -> None:
    rig = set_repairs(make_rig(ProxyConfig(limits=Limits(sweep_s=0.01), stream_keepalive_s=1.0)), TOOLS)
    client, child = begin(rig, request(stream=True))
    clock.pass_until_readable(client, 0.5)
    client.until(b"\n\n\r\n")
    child, _body = second_request(rig, child, REFUSED)
    child.send(STREAM_HEAD + EVENT + b"0\r\n\r\n")
    client.until(EVENT + b"0\r\n\r\n")
    assert rig.record().repaired == "tool_call"


# --- the end of a second attempt without an answer


def test_first_answer_is_forwarded_if_llama_server_ends(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, BAD)
    rig.stop_listening()
    child.close()
    assert client.message()[1] == BAD_BODY
    record = rig.record()
    assert (record.status, record.repaired, record.replayed) == (200, "json_failed", False)
    assert rig.in_flight() == 0


def test_first_error_is_forwarded_if_llama_server_accepts_no_connection(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request())
    rig.stop_listening()
    child.send(REFUSED)
    head, body = client.message()
    assert (status(head), body) == (500, MISMATCH)


def test_first_answer_is_forwarded_if_the_generation_is_stopped(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, BAD)
    rig.call(lambda: rig.endpoint.close(generation_ended("tiny", "stopped")))
    assert client.message()[1] == BAD_BODY
    assert child.sees_the_end()


def test_first_answer_is_forwarded_if_the_time_is_over(make_rig: MakeRig, clock: Clock) -> None:
    rig = set_repairs(make_rig(ProxyConfig(limits=Limits(sweep_s=0.01), request_timeout_s=30.0)))
    client, child = begin(rig, request(**JSON))
    child, _body = second_request(rig, child, BAD)
    clock.pass_s(31.0)
    assert client.message()[1] == BAD_BODY
    assert child.sees_the_end()


def test_client_that_leaves_frees_the_slot_of_the_second_attempt(make_rig: MakeRig) -> None:
    rig = set_repairs(make_rig(max_concurrent=1))
    client, child = begin(rig, request(**JSON))
    child, _body = second_request(rig, child, answer(with_usage(BAD_BODY, 20, 5)))
    client.close()
    assert child.sees_the_end()
    record = rig.record()
    assert (record.status, record.outcome, record.bytes_out) == (499, "client_gone", 0)
    assert (record.tokens_prompt, record.tokens_completion) == (20, 5)
    child.close()
    eventually(lambda: rig.call(lambda: rig.endpoint.busy) == 0)


def test_client_that_leaves_while_its_answer_is_held_frees_the_slot(make_rig: MakeRig) -> None:
    rig = set_repairs(make_rig(max_concurrent=1))
    client, child = begin(rig, request(**JSON))
    child.send(BAD[:-3])
    await_held(rig, len(BAD_BODY) - 3)
    client.close()
    assert child.sees_the_end()
    assert rig.record().bytes_out == 0
    child.close()
    eventually(lambda: rig.call(lambda: rig.endpoint.busy) == 0)


def test_administrator_can_cancel_a_second_attempt(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, BAD)
    cancelled = HttpError(409, "cancelled", cause="cancelled")
    rig.call(lambda: only_connection(rig).interrupt(cancelled, CANCELLED))
    assert error_of(client, 409)["cause"] == "cancelled"
    assert child.sees_the_end()


@pytest.mark.usefixtures("no_cause")
@pytest.mark.parametrize("next_is_node", [False, True])
def test_first_answer_that_breaks_off_while_it_is_held_is_replayed(rig: Rig, *, next_is_node: bool) -> None:
    """What the next server answers is not mixed with the held part, also if it is not held."""
    client, child = begin(set_repairs(rig), request(**JSON))
    child.send(BAD[:-3])
    await_held(rig, len(BAD_BODY) - 3)
    if next_is_node:
        rig.call(lambda: setattr(rig.endpoint, "node", LINK))
    child.close()
    child = rig.accept()
    _head, body = child.message()
    assert "seed" not in json.loads(body)
    child.send(answer(b'{"error":{}}', code=b"400 Bad Request"))
    head, body = client.message()
    assert (status(head), body) == (400, b'{"error":{}}')
    record = rig.record()
    assert (record.replayed, record.repaired) == (True, "")


@pytest.mark.parametrize("is_second", [False, True])
def test_held_answer_that_stalls_has_the_usual_limit(
    make_rig: MakeRig, clock: Clock, *, is_second: bool
) -> None:
    rig = set_repairs(make_rig(ProxyConfig(limits=Limits(sweep_s=0.01, upstream_idle_s=100.0))))
    client, child = begin(rig, request(**JSON))
    if is_second:
        child, _body = second_request(rig, child, BAD)
    child.send(GOOD[:-3])
    await_held(rig, len(GOOD_BODY) - 3)
    clock.pass_until_readable(client, 60.0)
    if is_second:
        assert client.message()[1] == BAD_BODY
    else:
        assert error_of(client, 504)["cause"] == "upstream_idle"
    assert child.sees_the_end()


def test_draining_proxy_begins_no_second_attempt(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    rig.call(rig.proxy.drain)
    child.send(BAD)
    head, body = client.message()
    assert (body, field(head, b"connection")) == (BAD_BODY, b"close")


# --- other servers and other names


def test_node_decides_itself_what_it_requests_again(rig: Rig) -> None:
    set_repairs(rig)
    rig.call(lambda: setattr(rig.endpoint, "node", LINK))
    client, child = begin(rig, request(**JSON))
    child.send(answer(BAD_BODY, b"X-Llamasup-Repaired: json"))
    head, body = client.message()
    assert (field(head, MARKED), body) == (b"json", BAD_BODY)


def test_second_answer_to_another_node_is_marked(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(b"X-Llamasup-Node: other", **JSON))
    child, _body = second_request(rig, child, BAD)
    child.send(GOOD)
    assert field(client.message()[0], MARKED) == b"json"


class Brief(Cold):
    def rewrite(self, body: bytes, route: Route) -> bytes | HttpError:
        return rewritten(body, route, NAME, Candidate("qwen", (Changes(system="Be brief."),)))


class WithBrief(ManyModels):
    def resolve(  # type: ignore[override]
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> Brief:
        return Brief(self.by_id["qwen"])


def test_second_request_for_a_virtual_model_has_its_changes(rig: Rig, tmp_path: Path) -> None:
    many = rig.call(lambda: WithBrief(tmp_path, [QWEN]))
    rig.proxy.backend = many
    many.by_id["qwen"].repairs = BOTH
    client = rig.send(request(model=NAME, **JSON))
    child = many.accept("qwen", rig)
    first = json.loads(child.message()[1])
    child.send(BAD)
    second = json.loads(child.message()[1])
    assert second.pop("seed") >= 0
    assert second == first
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    child.send(GOOD)
    assert field(client.message()[0], MARKED) == b"json"
    assert rig.proxy.metrics.repaired == {(NAME, "json"): 1}
    many.close()


# --- what it costs


def test_second_attempt_keeps_its_permit(make_rig: MakeRig) -> None:
    """A request that waits does not come between the two attempts."""
    rig = set_repairs(make_rig(max_concurrent=1))
    client, child = begin(rig, request(**JSON))
    waits = rig.send(request())
    eventually(lambda: rig.call(lambda: len(rig.backend.waiting)) == 1)
    child, second = second_request(rig, child, BAD)
    assert "seed" in second
    child.send(GOOD)
    assert client.message()[1] == GOOD_BODY
    child.message()
    child.send(answer())
    assert status(waits.message()[0]) == 200


@pytest.mark.parametrize("second", [GOOD_BODY, BAD_BODY])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_tokens_of_both_answers_count(make_rig: MakeRig, second: bytes, *, is_chunked: bool) -> None:
    framed = chunked if is_chunked else answer
    config = ProxyConfig(key_file=keys_of("one name=one tpm=1000"))
    rig = set_repairs(make_rig(config))
    client, child = begin(rig, request(b"Authorization: Bearer one", **JSON))
    child, _body = second_request(rig, child, framed(with_usage(BAD_BODY, 20, 5)))
    child.send(answer(with_usage(second, 20, 7)))
    client.head()
    record = rig.record()
    assert (record.tokens_prompt, record.tokens_completion) == (40, 12)
    assert record.tokens_estimated == 0


def test_both_answers_count_for_the_health_of_the_server(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request())
    child, _body = second_request(rig, child, REFUSED)
    child.send(REFUSED)
    client.message()
    assert rig.call(lambda: (rig.endpoint.answered, rig.endpoint.failures)) == (2, 2)


def test_second_attempt_is_sent_again_on_a_stale_connection(rig: Rig) -> None:
    """llama-server closes an idle connection at the moment in which it is used."""
    client, child = begin(set_repairs(rig), request(**JSON))
    child.send(BAD)
    child.message()
    child.close()
    child = rig.accept()
    child.message()
    child.send(GOOD)
    assert client.message()[1] == GOOD_BODY


# --- large answers


def large(content: str) -> bytes:
    return answer(chat(content + " " * MAX_HELD))


def test_large_answer_is_forwarded_as_it_comes(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    sent = large('{"age": -3}')
    child.send(sent[:-1])
    head = client.head()
    size = int(field(head, b"content-length") or 0)
    body = client.receive(size - 1)  # before the answer is complete
    child.send(sent[-1:])
    body += client.receive(1)
    assert (field(head, MARKED), sent.endswith(body)) == (None, True)
    assert rig.record().bytes_out == size


def test_slow_client_of_a_held_answer_stops_no_other_request(make_rig: MakeRig) -> None:
    """The connection to llama-server has gone back to its pool before the client gets the answer."""
    listening = bind("127.0.0.1", 0)
    listening[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    rig = set_repairs(make_rig(sockets=listening))
    slow = rig.connect(receive_buffer=4096)
    slow.send(request(**JSON))
    child = rig.accept()
    child.message()
    connection = only_connection(rig)
    sent = answer(chat('{"age": 3}' + " " * 900_000))
    child.send(sent)
    eventually(lambda: rig.call(lambda: connection.paused))
    other = rig.send(request())
    child.message()  # on the same connection
    child.send(answer(b"{}"))
    assert other.message()[1] == b"{}"
    assert sent.endswith(slow.message()[1])


def test_large_second_answer_is_not_forwarded(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, BAD)
    child.send(large('{"age": 3}')[:-1])
    assert client.message()[1] == BAD_BODY


def test_chunked_answer_is_checked_too(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request())
    head = b"HTTP/1.1 500 Internal Server Error\r\nTransfer-Encoding: chunked\r\n\r\n"
    child, _body = second_request(rig, child, head + chunk(MISMATCH) + b"0\r\n\r\n")
    child.send(answer())
    assert field(client.message()[0], MARKED) == b"tool_call"


def test_chunked_json_is_checked_without_its_framing(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child, _body = second_request(rig, child, chunked(BAD_BODY))
    child.send(chunked(GOOD_BODY))
    head = client.head()
    assert field(head, MARKED) == b"json"
    client.until(b"\r\n0\r\n\r\n")
    client.send(request(**JSON))
    child.message()
    child.send(chunked(GOOD_BODY))
    assert field(client.head(), MARKED) is None  # without a second request


def test_compressed_json_is_not_checked(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON))
    child.send(answer(BAD_BODY, b"Content-Encoding: x"))
    assert client.message()[1] == BAD_BODY
    client.send(request(**JSON))
    child.message()
    child, _body = second_request(rig, child, BAD)
    child.send(answer(GOOD_BODY, b"Content-Encoding: x"))
    assert client.message()[1] == BAD_BODY


@pytest.mark.parametrize("reply", [REFUSED, BAD], ids=["an error", "JSON"])
def test_other_paths_are_not_held(rig: Rig, reply: bytes) -> None:
    client, child = begin(set_repairs(rig), post(b"/v1/embeddings", json.dumps({**ASKED, **JSON}).encode()))
    child.send(reply)
    assert reply.endswith(client.message()[1])


def test_client_of_http_1_0_gets_the_second_answer_without_chunks(rig: Rig) -> None:
    client, child = begin(set_repairs(rig), request(**JSON).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    child, _body = second_request(rig, child, chunked(BAD_BODY))
    child.send(chunked(GOOD_BODY))
    head = client.head()
    assert (field(head, MARKED), field(head, b"transfer-encoding")) == (b"json", None)
    assert client.rest() == GOOD_BODY


@pytest.mark.parametrize("second", [GOOD, BAD], ids=["the second", "the first"])
def test_page_of_another_origin_may_read_the_answer(make_rig: MakeRig, second: bytes) -> None:
    rig = set_repairs(make_rig(ProxyConfig(origins=("https://app.example",))))
    client, child = begin(rig, request(b"Origin: https://app.example", **JSON))
    child, _body = second_request(rig, child, BAD)
    child.send(second)
    assert field(client.head(), b"access-control-allow-origin") == b"https://app.example"


def test_second_stream_is_continued_by_the_next_server(rig: Rig) -> None:
    set_continues(set_repairs(rig))
    client, child = begin(rig, post(CHAT, BODY))
    child.send(STREAM_HEAD + chunk(ERROR_EVENT) + LAST_CHUNK)
    child.message()
    events = framed(FIRST.stream(PIECES))[:4]
    child.send(STREAM_HEAD + b"".join(events))
    client.until(events[-1])
    cut(rig, child)
    continue_on(rig).send(rest_of())
    client.until(LAST_CHUNK)
    record = rig.record()
    assert (record.outcome, record.continued, record.repaired) == ("ok", True, "tool_call")


def test_second_try_does_not_show_the_schema() -> None:
    checks = Checks(CHAT.decode(), tool_calls=True, json=AskedJson({"const": "open-sesame-123"}))
    second_try = SecondTry(checks, Request(UNREAD, b"1", keep_alive=True), Metrics())
    assert repr(second_try) == "<SecondTry of /v1/chat/completions, fault None, over: False>"
