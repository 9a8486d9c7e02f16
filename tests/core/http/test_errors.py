from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.http.errors import error_from, error_object, type_of
from llamasup.errors import ERRORS, ControlFailed, LlamasupError, ModelUnknown, NotAllowed, ServerFailed

PLAIN = [error for error in ERRORS if error not in (LlamasupError, ServerFailed)]


@pytest.mark.parametrize("kind", PLAIN)
def test_every_error_survives_the_round_trip(kind: type[LlamasupError]) -> None:
    sent = kind("What.", remedy="Do.", lines=("a",), details=("b", "c"))
    got = error_from(sent.http_status, json.loads(json.dumps(error_object(sent))))
    assert type(got) is kind
    assert (got.message, got.remedy, got.lines, got.details) == ("What.", "Do.", ("a",), ("b", "c"))


@pytest.mark.parametrize(("cause", "exit_code"), [("out_of_memory", 71), ("model_missing", 75)])
def test_a_diagnosis_keeps_its_cause_and_its_exit_code(cause: str, exit_code: int) -> None:
    got = error_from(503, error_object(ServerFailed("It died.", cause=cause, exit_code=exit_code)))
    assert isinstance(got, ServerFailed)
    assert (got.cause, got.exit_code) == (cause, exit_code)


def test_cause_is_enough_without_an_exit_code() -> None:
    got = error_from(404, {"error": {"message": "no", "cause": ModelUnknown.cause}})
    assert isinstance(got, ModelUnknown)


@pytest.mark.parametrize(("status", "cause"), [(401, "api_key"), (403, "key_rights"), (403, "")])
def test_access_refusal_becomes_not_allowed(status: int, cause: str) -> None:
    got = error_from(status, {"error": {"message": "no", "cause": cause, "remedy": "a key"}})
    assert isinstance(got, NotAllowed)
    assert got.exit_code == 77
    assert got.cause == (cause or "not_allowed")


@pytest.mark.parametrize(
    "answered",
    [
        None,
        [],
        "no",
        {"error": "no"},
        {"error": None},
        {"error": {"message": 7, "cause": ["x"], "lines": "abc", "details": {"a": 1}}},
        {"error": {"message": "strange", "cause": "of_tomorrow"}},
        {"error": {"message": "strange", "cause": "of_tomorrow", "exit_code": "x"}},
    ],
)
def test_answer_without_an_error_object_is_reported_as_such(answered: Any) -> None:
    got = error_from(500, answered)
    assert isinstance(got, ControlFailed)
    assert got.message
    assert got.lines == got.details == ()


def test_an_endless_message_is_cut() -> None:
    assert len(error_from(500, {"error": {"message": "x" * 100_000}}).message) == 2000


@pytest.mark.parametrize(
    ("status", "type_"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (418, "invalid_request_error"),
        (500, "server_error"),
    ],
)
def test_a_status_has_its_type(status: int, type_: str) -> None:
    assert type_of(status) == type_
