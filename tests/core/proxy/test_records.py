"""The record of a finished request: its trace, its client, and the effect of the context limit."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.answers import ContextWindow
from llamasup.core.observability.counters import CANCELLED
from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.queueing.endpoint import generation_ended
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, field, get, post, status

TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = b"00-" + TRACE + b"-00f067aa0ba902b7-01"
TIMINGS = (
    b'"timings":{"cache_n":11,"prompt_n":1,"prompt_ms":0.2,"predicted_n":%d,"predicted_per_second":50.0}'
)


# --- traces and ids ----------------------------------------------------------------------------------


def test_trace_headers_are_forwarded_and_trace_id_is_recorded(rig: Rig) -> None:
    client = rig.send(get(b"/props", b"Traceparent: " + PARENT, b"Tracestate: a=1,b=2", b"X-Request-Id: r-1"))
    child = rig.accept()
    head = child.head()
    assert field(head, b"traceparent") == PARENT
    assert field(head, b"tracestate") == b"a=1,b=2"
    assert field(head, b"x-request-id") is None  # llama-server does not use it
    child.send(answer())
    assert field(client.message()[0], b"x-request-id") == b"r-1"
    record = rig.record()
    assert (record.trace_id, record.request_id) == (TRACE.decode(), "r-1")


def test_request_without_trace_gets_none(rig: Rig) -> None:
    client = rig.send(get(b"/props"))
    child = rig.accept()
    head = child.head()
    assert field(head, b"traceparent") is None
    assert field(head, b"tracestate") is None
    child.send(answer())
    client.message()
    assert rig.record().trace_id == ""


@pytest.mark.parametrize(
    "lines", [(b"Traceparent: nonsense",), (b"Traceparent: " + PARENT, b"Traceparent: " + PARENT)]
)
def test_invalid_trace_is_forwarded_and_not_recorded(rig: Rig, lines: tuple[bytes, ...]) -> None:
    client = rig.send(get(b"/props", *lines))
    child = rig.accept()
    assert child.head().lower().count(b"\r\ntraceparent: ") == len(lines)
    child.send(answer())
    client.message()
    assert rig.record().trace_id == ""


def test_record_counts_bytes_in_both_directions(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b'{"messages":[]}'))
    child.send(answer(b'{"choices":[]}'))
    client.message()
    record = rig.record()
    assert (record.bytes_in, record.bytes_out) == (15, 14)


# --- slots and tokens ---------------------------------------------------------------------------------


def test_record_has_the_time_in_a_slot(rig: Rig) -> None:
    began_s = monotonic()
    client, child = rig.begin(post(CHAT, b'{"messages":[]}'))
    child.send(answer(b"{%b}" % (TIMINGS % 5)))
    client.message()
    record = rig.record()
    assert 0.0 < record.slot_s <= record.duration_s
    assert began_s < record.ended_s < monotonic()
    assert record.tokens_estimated == 0


def test_request_that_is_no_work_for_the_model_has_no_slot(rig: Rig) -> None:
    client = rig.send(get(b"/props"))
    child = rig.accept()
    child.head()
    child.send(answer())
    client.message()
    assert rig.record().slot_s == 0.0


def test_slot_time_ends_when_the_client_leaves_and_tokens_are_estimated(rig: Rig) -> None:
    rig.endpoint.tokens_per_s = 1000.0
    client, child = rig.begin(post(CHAT, b'{"stream":true,"messages":["' + b"x" * 300 + b'"]}'))
    child.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
    client.until(b"data: {}\n\n\r\n")
    client.close()
    record = rig.record()
    assert record.outcome == "client_gone"
    assert 0.0 < record.slot_s <= record.duration_s
    assert record.tokens_prompt is None
    assert record.tokens_estimated >= 100  # for the bytes of the prompt alone


def leaves(rig: Rig, client: Wire, child: Wire) -> None:
    client.close()


def breaks(rig: Rig, client: Wire, child: Wire) -> None:
    child.close()


def ends(rig: Rig, client: Wire, child: Wire) -> None:
    rig.call(lambda: rig.endpoint.close(generation_ended("the server is stopping")))


def crashes(rig: Rig, client: Wire, child: Wire) -> None:
    rig.call(lambda: rig.endpoint.close(generation_ended("it aborted", "aborted"), crashed=True))


def is_cancelled(rig: Rig, client: Wire, child: Wire) -> None:
    error = HttpError(503, "an administrator has cancelled it", cause="cancelled")
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    rig.call(lambda: connection.interrupt(error, CANCELLED))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("tpm", ["", " tpm=100000"], ids=["", "tpm"])
@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (leaves, "client_gone"),
        (breaks, "upstream_failed"),
        (ends, "revoked"),
        (crashes, "revoked"),
        (is_cancelled, "cancelled"),
    ],
)
def test_tokens_of_an_answer_are_estimated_whatever_cuts_it(
    make_rig: MakeRig, end: Callable[[Rig, Wire, Wire], None], outcome: str, tpm: str, *, stream: bool
) -> None:
    limits = Limits(cause_wait_s=0.0)
    rig = make_rig(ProxyConfig(key_file=keys_of(f"one name=one{tpm}"), limits=limits), wait_timeout_s=0.0)
    prompt = b"x" * 300
    body = b'{"stream":%b,"messages":["%b"]}' % (b"true" if stream else b"false", prompt)
    client, child = rig.begin(post(CHAT, body, b"Authorization: Bearer one"))
    if stream:
        child.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
        client.until(b"data: {}\n\n\r\n")
    end(rig, client, child)
    record = rig.record()
    assert record.outcome == outcome
    assert record.tokens_prompt is None
    assert record.tokens_estimated >= 100  # for the bytes of the prompt alone


@pytest.mark.usefixtures("no_cause")
def test_slot_time_of_both_servers_counts(rig: Rig) -> None:
    """The first server ends without an answer, after most of the time."""
    client, child = rig.begin(post(CHAT, b'{"messages":[]}'))
    began_s = monotonic()
    sleep(0.05)
    first_s = monotonic() - began_s
    child.close()
    child = rig.accept()
    child.message()
    child.send(answer(b"{%b}" % (TIMINGS % 5)))
    client.message()
    record = rig.record()
    assert record.replayed
    assert first_s < record.slot_s <= record.duration_s


# --- the context -------------------------------------------------------------------------------------


def test_prompt_beyond_the_context_is_recorded(rig: Rig) -> None:
    body = (
        b'{"error":{"code":400,"message":"request (5012 tokens) exceeds the available context size",'
        b'"type":"exceed_context_size_error","n_prompt_tokens":5012,"n_ctx":4096}}'
    )
    client, child = rig.begin(post(CHAT, b'{"messages":[]}'))
    child.send(answer(body, code=b"400 Bad Request"))
    head, passed = client.message()
    assert (status(head), passed) == (400, body)
    record = rig.record()
    assert (record.context, record.n_prompt_tokens, record.n_ctx) == ("exceeded", 5012, 4096)
    assert record.tokens_prompt is None
    assert rig.proxy.metrics.models["tiny"].context_ends["exceeded"] == 1


@pytest.mark.parametrize(("completion", "context"), [(243, ""), (244, "cut")])
def test_stream_that_fills_the_context_is_recorded_as_cut(rig: Rig, completion: int, context: str) -> None:
    rig.endpoint.window = ContextWindow(256, 256)
    client, child = rig.begin(post(CHAT, b'{"stream":true}'))
    events = chunk(b"data: {" + TIMINGS % completion + b"}\n\n"), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"
    child.send(STREAM_HEAD, *events)
    client.until(b"\r\n0\r\n\r\n")
    record = rig.record()
    assert (record.tokens_prompt, record.tokens_completion, record.context) == (12, completion, context)


def test_prompt_tokens_of_message_stream_come_from_its_first_event(rig: Rig) -> None:
    rig.endpoint.window = ContextWindow(256, 256)
    client, child = rig.begin(post(b"/v1/messages", b'{"stream":true}'))
    opening = (
        b'event: message_start\ndata: {"message":{"usage":{"cache_read_input_tokens":8,"input_tokens":17,'
        b'"output_tokens":0}}}\n\n'
    )
    child.send(STREAM_HEAD + chunk(opening))
    client.until(opening)
    for _ in range(50):  # more than the kept tail
        child.send(chunk(b'event: content_block_delta\ndata: {"delta":{"text":"%b"}}\n\n' % (b"x" * 1000)))
    child.send(chunk(b'data: {"type":"message_delta","usage":{"output_tokens":231}}\n\n'), b"0\r\n\r\n")
    client.until(b"\r\n0\r\n\r\n")
    record = rig.record()
    assert (record.tokens_prompt, record.tokens_cached, record.tokens_completion) == (25, 8, 231)
    assert record.context == "cut"
