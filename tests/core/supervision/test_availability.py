"""Why an instance serves no request, as a table of its states."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.supervision.availability import NOT_RUNNING, STOPPING, is_last, unavailable
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import Instance, State

KILLED = Diagnosis("killed", "It was killed.", "Look for it.", (), False, 75)
TIMES: dict[str, Any] = {
    "load": LoadProgress(43.2, 7.4, 5.0),
    "ready_in_s": 7.0,
    "start_in_s": 20.0,
    "load_s": 5.0,
    "wait_timeout_s": 60.0,
}

# state, changes of the instance, and then: message, cause, remedy, Retry-After, whether a request may wait
TABLE: list[tuple[State, dict[str, Any], tuple[str, str, str, float | None, bool]]] = [
    (State.STARTING, {}, ("Loading model", "loading", "", 7.0, True)),
    (State.LOADING, {}, ("Loading model", "loading", "", 7.0, True)),
    (State.WARMING, {}, ("Loading model", "loading", "", 7.0, True)),
    (State.READY, {}, ("Loading model", "loading", "", 7.0, True)),  # its endpoint has just closed
    (State.DRAINING, {}, ("The server is stopping", "stopping", "", None, False)),
    (State.DRAINING, {"restart_pending": True}, ("The server is restarting", "restarting", "", 5.0, True)),
    (State.STOPPING, {}, ("The server is stopping", "stopping", "", None, False)),
    (State.STOPPING, {"restart_pending": True}, ("The server is restarting", "restarting", "", 5.0, True)),
    (State.STOPPING, {"kill_reason": KILLED}, ("The server is restarting", "restarting", "", 5.0, True)),
    (
        State.STOPPED,
        {},
        ("The model is not loaded", "stopped", "load it: llamasup load", None, False),
    ),
    (State.BACKOFF, {"last": KILLED}, ("It was killed.", "killed", "Look for it.", 25.0, True)),
    (State.BACKOFF, {}, ("llama-server ended", "", "", 25.0, True)),
    (State.FAILED, {"last": KILLED}, ("It was killed.", "killed", "Look for it.", 25.0, False)),
]


@pytest.mark.parametrize(
    ("state", "changes", "expected"),
    TABLE,
    ids=[f"{row[0].value}-{'-'.join(row[1])}" for row in TABLE],
)
def test_answer_of_each_state(
    state: State, changes: dict[str, Any], expected: tuple[str, str, str, float | None, bool]
) -> None:
    why = unavailable(Instance(state, **changes), **TIMES, answers_while_loading=False)
    assert (why.message, why.cause, why.remedy, why.retry_after_s, why.queueable) == expected
    assert why.status == 503


def test_table_has_every_state() -> None:
    assert {row[0] for row in TABLE} == set(State)


@pytest.mark.parametrize(
    ("state", "queueable"),
    [(State.STARTING, False), (State.LOADING, False), (State.BACKOFF, False), (State.WARMING, True)],
)
def test_no_request_waits_while_llama_server_itself_answers(state: State, queueable: bool) -> None:
    why = unavailable(Instance(state), **TIMES, answers_while_loading=True)
    assert why.queueable == queueable


def test_no_request_waits_for_a_start_after_the_wait_timeout() -> None:
    times = TIMES | {"start_in_s": 61.0}
    assert not unavailable(Instance(State.BACKOFF), **times, answers_while_loading=False).queueable


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.WARMING])
def test_load_has_its_progress(state: State) -> None:
    why = unavailable(Instance(state), **TIMES, answers_while_loading=False)
    assert (why.percent, why.eta_s) == (43.2, 7.4)


def test_retry_after_of_a_load_is_at_least_a_second() -> None:
    times = TIMES | {"ready_in_s": 0.1}
    assert unavailable(Instance(State.LOADING), **times, answers_while_loading=False).retry_after_s == 1.0


def test_folders_are_not_shown() -> None:
    diagnosis = Diagnosis("bad_model", "/srv/models/m.gguf is no model", "Look at /srv/models.", (), True, 2)
    last = Instance(State.FAILED, last=diagnosis)
    why = unavailable(last, **TIMES, answers_while_loading=False)
    assert why.message == "m.gguf is no model"
    assert "/srv" not in why.remedy


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (Instance(State.STOPPED), True),
        (Instance(State.FAILED), True),
        (Instance(State.FAILED, next_start_s=3.0), False),
        (Instance(State.BACKOFF, next_start_s=3.0), False),
        (Instance(State.READY), False),
        (Instance(State.STOPPING), True),
        (Instance(State.STOPPING, restart_pending=True), False),
        (Instance(State.DRAINING, kill_reason=KILLED), False),
    ],
)
def test_last_server(instance: Instance, expected: bool) -> None:
    assert is_last(instance) is expected


def test_constants_are_refusals() -> None:
    assert [STOPPING.queueable, NOT_RUNNING.queueable] == [False, False]
