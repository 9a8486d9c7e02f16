"""Why an instance does not serve: the answers to requests by state, and the errors for commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.queueing.wait_estimate import LONGEST_S
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.not_serving import (
    NOT_RUNNING,
    STOPPING,
    failure_of,
    is_last,
    lacks_memory,
    unavailable,
)
from llamasup.core.supervision.states import Instance, State
from llamasup.errors import DoesNotFit, GaveUp, LlamasupError, ServerFailed

KILLED = Diagnosis("killed", "It was killed.", "Look for it.", (), False, 75)
TIMES: dict[str, Any] = {
    "load": LoadProgress(43.2, 7.4, 5.0),
    "start_in_s": 20.0,
    "load_s": 5.0,
    "wait_timeout_s": 60.0,
}

# state, changes of the instance, and then: message, cause, remedy, Retry-After, whether a request may wait
TABLE: list[tuple[State, dict[str, Any], tuple[str, str, str, float | None, bool]]] = [
    (State.STARTING, {}, ("Loading model", "loading", "", 7.4, True)),
    (State.LOADING, {}, ("Loading model", "loading", "", 7.4, True)),
    (State.WARMING, {}, ("Loading model", "loading", "", 7.4, True)),
    (State.READY, {}, ("Loading model", "loading", "", 7.4, True)),  # its endpoint has just closed
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


# state, estimated rest of the load, elapsed time of the load, time of the last load, until the next start
RETRY_AFTER: list[tuple[State, float | None, float, float | None, float, float]] = [
    (State.LOADING, 0.1, 5.0, 5.0, 0.0, 1.0),  # at least a second
    (State.LOADING, None, 10.0, 30.0, 0.0, 20.0),  # the rest of a load that takes as long as the last one
    (State.WARMING, None, 29.9, 30.0, 0.0, 1.0),
    (State.STARTING, None, 90.0, 30.0, 0.0, 1.0),
    (State.LOADING, None, 10.0, None, 0.0, 1.0),  # the first load
    (State.LOADING, None, 0.0, 3600.0, 0.0, LONGEST_S),
    (State.DRAINING, None, 0.0, 30.0, 0.0, 30.0),  # a whole load follows
    (State.BACKOFF, None, 0.0, 30.0, 8.0, 38.0),
    (State.FAILED, None, 0.0, None, 300.0, 300.0),
]


@pytest.mark.parametrize(
    ("state", "eta_s", "elapsed_s", "load_s", "start_in_s", "retry_after_s"), RETRY_AFTER
)
def test_retry_after_is_the_time_until_it_serves(
    state: State,
    eta_s: float | None,
    elapsed_s: float,
    load_s: float | None,
    start_in_s: float,
    retry_after_s: float,
) -> None:
    why = unavailable(
        Instance(state, restart_pending=True),
        load=LoadProgress(None, eta_s, elapsed_s),
        start_in_s=start_in_s,
        load_s=load_s,
        wait_timeout_s=60.0,
        answers_while_loading=False,
    )
    assert why.retry_after_s == retry_after_s


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


def failed(*, deterministic: bool) -> Instance:
    diagnosis = Diagnosis(
        "flag_unknown", "It does not know --x.", "Leave it out.", ("E x",), deterministic, 2
    )
    return Instance(state=State.FAILED, last=diagnosis, crashes=((1.0, 1), (2.0, 2), (3.0, 3)))


def test_deterministic_failure_has_its_own_or_the_childs_exit_code() -> None:
    error = failure_of(failed(deterministic=True))
    assert isinstance(error, ServerFailed)
    assert (error.cause, error.exit_code, error.message) == ("flag_unknown", 2, "It does not know --x.")
    assert (error.remedy, error.lines) == ("Leave it out.", ("E x",))
    assert failure_of(failed(deterministic=True), 139).exit_code == 139


def test_crash_loop_error_quotes_the_last_crash() -> None:
    error = failure_of(failed(deterministic=False))
    assert isinstance(error, GaveUp)
    assert error.message == "Gave up after 3 crashes of llama-server. The last one: It does not know --x."
    error = failure_of(replace(failed(deterministic=False), crashes=((3.0, 3),)))
    assert error.message.startswith("Gave up after 1 crash of llama-server.")


@pytest.mark.parametrize(
    ("log", "remedy"),
    [(None, "See its log (llamasup logs)."), (Path("/s/m.log"), f"See its log ({Path('/s/m.log')}).")],
)
def test_log_is_named_by_its_file_when_llamasup_ends(log: Path | None, remedy: str) -> None:
    last = Diagnosis("unknown", "It ended.", "See its log (llamasup logs).", (), False, 75)
    for instance in (Instance(state=State.FAILED), Instance(state=State.FAILED, last=last)):
        assert failure_of(instance, log=log).remedy == remedy


def test_failure_without_diagnosis_has_a_message() -> None:
    assert failure_of(Instance(state=State.FAILED)).message == "llama-server failed for an unknown reason."


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (DoesNotFit("It does not fit."), True),
        (ServerFailed("It does not fit.", cause="does_not_fit", exit_code=71), True),
        (ServerFailed("No memory.", cause="out_of_memory_device", exit_code=71), True),
        (ServerFailed("No such flag.", cause="flag_unknown", exit_code=2), False),
        (GaveUp("It crashed too often."), False),
    ],
)
def test_lacks_memory_covers_all_memory_causes(error: LlamasupError, *, lacks: bool) -> None:
    assert lacks_memory(error) is lacks
