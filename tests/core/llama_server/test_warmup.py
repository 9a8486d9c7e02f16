from __future__ import annotations

import json

import pytest

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.warmup import (
    begun_message_requests,
    no_response,
    repeats_begun_message,
    response_problem,
    slot_request,
    warm_up_request,
    warmup_diagnosis,
)

TOKEN = warm_up_request(ModelClass.DECODER)
VECTOR = warm_up_request(ModelClass.ENCODER)
SCORE = warm_up_request(ModelClass.RERANKER)
DECISION = warm_up_request(ModelClass.DECISION)


def test_each_class_has_its_own_request() -> None:
    assert (TOKEN.path, VECTOR.path, SCORE.path) == ("/completion", "/embedding", "/v1/rerank")
    assert warm_up_request(ModelClass.ENCODER_DECODER) is TOKEN


def test_slot_request_is_the_token_request_with_a_slot_id() -> None:
    assert slot_request(2).path == TOKEN.path
    assert slot_request(2).body == {**TOKEN.body, "id_slot": 2}


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (TOKEN, {"content": " the", "tokens_predicted": 1}),
        (VECTOR, [{"index": 0, "embedding": [[0.1, 0.2]]}]),
        (VECTOR, {"embedding": [0.1, 0.2]}),
        (SCORE, {"results": [{"index": 0, "relevance_score": -1.5}]}),
        (DECISION, {"answers": {"greets": {"type": "noul", "noul": 0.5}}}),
    ],
)
def test_valid_answer_has_no_problem(request_: object, answer: object) -> None:
    assert response_problem(request_, 200, json.dumps(answer).encode()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (TOKEN, {"content": "", "tokens_predicted": 0}),
        (TOKEN, {}),
        (TOKEN, []),
        (VECTOR, []),
        (VECTOR, {"embedding": []}),
        (SCORE, {"results": []}),
        (DECISION, {"answers": {}}),
        (DECISION, {"answers": {"greets": {"noul": None}}}),
        (SCORE, {"results": [{"relevance_score": None}]}),
    ],
)
def test_empty_answer_is_a_problem(request_: object, answer: object) -> None:
    problem = response_problem(request_, 200, json.dumps(answer).encode())  # type: ignore[arg-type]
    assert problem is not None
    assert "answered 200 without" in problem


@pytest.mark.parametrize(
    ("status", "body", "quoted"),
    [
        (500, b'{"error":{"message":"Compute error."}}', "500: Compute error."),
        (501, b'{"detail":"no"}', '501: {"detail":"no"}'),
        (500, b"[1]", "500: [1]"),
        (200, b"<html>", "not JSON: <html>"),
        (200, b"\xff\x00", "not JSON: \ufffd"),
        (200, b"[" * 100_000, "not JSON: [["),
    ],
)
def test_error_answer_is_quoted(status: int, body: bytes, quoted: str) -> None:
    problem = response_problem(TOKEN, status, body)
    assert problem is not None
    assert quoted in problem


def test_missing_response_names_the_error_or_its_type() -> None:
    assert (
        no_response(TOKEN, OSError("connection refused"))
        == "/completion was not answered: connection refused"
    )
    assert no_response(TOKEN, TimeoutError()) == "/completion was not answered: TimeoutError"


def test_failed_warm_up_is_not_deterministic_and_quotes_the_log() -> None:
    tail = [f"line {number}" for number in range(20)]
    failure = warmup_diagnosis("it was silent", tail, status=500)
    assert (failure.cause, failure.deterministic, failure.exit_code) == ("warm_up_failed", False, 75)
    assert "it was silent" in failure.message
    assert failure.lines == tuple(tail[-8:])


def test_unknown_api_key_is_deterministic() -> None:
    failure = warmup_diagnosis("/completion answered 401", [], status=401)
    assert (failure.cause, failure.deterministic, failure.exit_code) == ("locked_out", True, 69)
    assert "/etc/llama.cpp/config.ini" in failure.remedy


def stream_of(*texts: str | None) -> bytes:
    events = [{"choices": [{"delta": {} if text is None else {"content": text}}]} for text in texts]
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def begun_message() -> str:
    rendered, streamed = begun_message_requests()
    assert rendered.body["messages"] == streamed.body["messages"]
    return str(rendered.body["messages"][-1]["content"])


@pytest.mark.parametrize(
    ("after", "texts", "repeats"),
    [
        ("", (None, "{begun} four"), True),
        ("", (None, "{begun}", None), True),
        ("", (None, " four"), False),
        ("", (None,), False),
        ("<end><assistant>", ("One",), None),  # it begins a new message
        ("", (), None),  # not a stream of a chat
    ],
)
def test_begun_message_is_repeated_continued_or_neither(
    after: str, texts: tuple[str | None, ...], repeats: bool | None
) -> None:
    begun = begun_message()
    rendered = json.dumps({"prompt": f"<user>Count<assistant>{begun}{after}"}).encode()
    answer = stream_of(*(text and text.format(begun=begun) for text in texts))
    assert repeats_begun_message(rendered, answer) is repeats


@pytest.mark.parametrize(
    ("rendered", "answer"),
    [
        (b"404", b""),
        (b'{"error":{}}', stream_of("a")),
        (b'{"prompt":1}', stream_of("a")),
        (b'{"prompt":"a"}', b'data: {"error":{}}\n\n'),
        (b'{"prompt":"a"}', b"data: {broken\n\n"),
    ],
)
def test_server_without_an_answer_continues_no_message(rendered: bytes, answer: bytes) -> None:
    assert repeats_begun_message(rendered, answer) is None


@pytest.mark.parametrize(
    ("status", "problem", "cause"),
    [
        (404, "/v1/systemone answered 404: File Not Found", "model_unsupported"),
        (500, "/v1/systemone answered 500: decision model has no mask token", "warm_up_failed"),
        (404, "/completion answered 404: File Not Found", "warm_up_failed"),
    ],
)
def test_a_build_without_decisions_is_named_and_not_tried_again(
    status: int, problem: str, cause: str
) -> None:
    """Builds before b11361 load such files as plain models (Quartermaster 1.7.0 marks them)."""
    diagnosis = warmup_diagnosis(problem, [], status=status)
    assert (diagnosis.cause, diagnosis.deterministic) == (cause, cause == "model_unsupported")
