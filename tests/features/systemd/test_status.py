"""The notifications of a service to systemd, as transcripts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Adjustment, PlanLimits
from llamasup.core.supervision.states import State
from llamasup.features.systemd import status as systemd_status
from llamasup.features.systemd.status import ServiceStatus

URL = "http://127.0.0.1:8080"
SERVING = f"STATUS=serving qwen at {URL}, 4 slots"
UP = ServiceStatus(url=URL, models=("qwen",))
MANY = ServiceStatus(of_many=True)
MANY_UP = replace(MANY, url=URL, models=("a", "b"))
OUT_OF_MEMORY = Diagnosis(
    "out_of_memory_host", "The kernel killed it: out of memory.", "Take a smaller context.", (), False, 71
)


def states(status: ServiceStatus, *states: State) -> tuple[ServiceStatus, list[str]]:
    received: list[str] = []
    for state in states:
        status, messages = systemd_status.state_changed(status, "qwen", state, slots=4)
        received += messages
    return status, received


def test_start_is_ready_after_the_first_token() -> None:
    status, received = states(ServiceStatus(), State.STARTING, State.LOADING, State.WARMING, State.READY)
    assert received == [
        "STATUS=starting llama-server for qwen",
        "STATUS=loading qwen",
        "STATUS=waiting for the first token of qwen",
    ]
    status, messages = systemd_status.serving(status, ["qwen"], URL, slots=4)
    assert messages == ("READY=1", SERVING)
    assert not status.is_starting


@pytest.mark.parametrize(
    ("slots", "text"), [(1, f"serving a, b at {URL}, 1 slot"), (None, f"serving a, b at {URL}")]
)
def test_known_slots_are_reported(slots: int | None, text: str) -> None:
    assert systemd_status.serving(ServiceStatus(), ["a", "b"], URL, slots=slots)[1][1] == f"STATUS={text}"


def test_crash_is_in_the_status_until_the_model_serves_again() -> None:
    status, messages = systemd_status.exited(
        UP, "qwen", OUT_OF_MEMORY, restarts=True, crashes=2, most_crashes=5
    )
    trouble = "restarting qwen after out of memory (2 of 5)"
    assert messages == (f"STATUS={trouble}",)
    status, received = states(status, State.BACKOFF, State.STARTING, State.LOADING, State.READY)
    assert received == [
        f"STATUS={trouble}: starting llama-server for qwen",
        f"STATUS={trouble}: loading qwen",
        SERVING,
    ]
    assert status == UP


def test_start_with_a_smaller_plan_does_not_count_as_a_crash() -> None:
    smaller = replace(OUT_OF_MEMORY, cause="kv_unsupported", adjustment=Adjustment(1, 3, (), PlanLimits()))
    _, messages = systemd_status.exited(UP, "qwen", smaller, restarts=True, crashes=0, most_crashes=5)
    assert messages == ("STATUS=starting qwen smaller after kv unsupported",)


def test_giving_up_reports_reason_and_remedy_in_one_line() -> None:
    diagnosis = replace(OUT_OF_MEMORY, message="It ended:\nout of\x1bmemory.")
    _, messages = systemd_status.exited(UP, "qwen", diagnosis, restarts=False, crashes=6, most_crashes=5)
    assert messages == ("STATUS=gave up on qwen: It ended: out of memory. Take a smaller context.",)


def test_reload_ends_with_ready() -> None:
    status, messages = systemd_status.reloading(UP, "qwen", monotonic_us=17)
    assert messages == (
        "RELOADING=1",
        "MONOTONIC_USEC=17",
        "STATUS=restarting qwen as asked: requests in flight may finish",
    )
    status, received = states(status, State.DRAINING, State.STOPPING, State.STARTING, State.READY)
    assert received == ["STATUS=reloading: starting llama-server for qwen", "READY=1", SERVING]
    assert status == UP


@pytest.mark.parametrize("status", [ServiceStatus(), ServiceStatus(url=URL, is_stopping=True)])
def test_reload_before_ready_is_not_reported(status: ServiceStatus) -> None:
    assert systemd_status.reloading(status, "qwen", monotonic_us=17) == (status, ())


@pytest.mark.parametrize(
    ("in_flight", "text"),
    [
        (0, "stopping"),
        (1, "stopping: 1 request in flight may finish"),
        (3, "stopping: 3 requests in flight may finish"),
    ],
)
def test_stop_is_reported_once_with_its_time_limit(in_flight: int, text: str) -> None:
    status, messages = systemd_status.stopping(UP, in_flight=in_flight, needs_s=45.0)
    assert messages == ("STOPPING=1", "EXTEND_TIMEOUT_USEC=45000000", f"STATUS={text}")
    assert systemd_status.stopping(status, in_flight=0, needs_s=45.0) == (status, ())
    assert states(status, State.STARTING, State.READY) == (status, [])


def test_heartbeat_requests_time_only_during_a_load() -> None:
    starting = ("WATCHDOG=1", "EXTEND_TIMEOUT_USEC=60000000")
    assert systemd_status.heartbeat(ServiceStatus()) == starting
    assert systemd_status.heartbeat(replace(UP, is_reloading=True)) == starting
    assert systemd_status.heartbeat(UP) == ("WATCHDOG=1",)
    assert systemd_status.heartbeat(ServiceStatus(is_stopping=True)) == ("WATCHDOG=1",)


def test_unloaded_model_is_not_reported_as_served() -> None:
    assert systemd_status.state_changed(UP, "qwen", State.STOPPED, slots=4)[1] == (
        "STATUS=qwen is not loaded",
    )
    # An unload also ends the reload.
    status, messages = systemd_status.state_changed(
        replace(UP, is_reloading=True), "qwen", State.STOPPED, slots=4
    )
    assert (status.is_reloading, messages) == (False, ("READY=1", "STATUS=qwen is not loaded"))
    assert states(status, State.STARTING, State.READY) == (
        UP,
        ["STATUS=starting llama-server for qwen", SERVING],
    )


# --- of many models ----------------------------------------------------------------------------------


def changes_in_sequence(
    status: ServiceStatus, *changes: tuple[str, State]
) -> tuple[ServiceStatus, list[str]]:
    received: list[str] = []
    for model, state in changes:
        status, messages = systemd_status.state_changed(status, model, state, slots=None)
        received += messages
    return status, received


def test_several_preloads_are_reported_and_ready_is_sent_once() -> None:
    status, received = changes_in_sequence(
        MANY,
        *(("a", State.STARTING), ("b", State.LOADING), ("a", State.WARMING), ("a", State.READY)),
        ("b", State.READY),
    )
    assert received == [
        "STATUS=starting llama-server for a",
        "STATUS=loading b; starting llama-server for a",
        "STATUS=waiting for the first token of a; loading b",
        "STATUS=loading b",
    ]
    assert status.is_starting
    status, messages = systemd_status.serving(status, ["a", "b"], URL, slots=None)
    assert (status, messages) == (MANY_UP, ("READY=1", f"STATUS=serving a, b at {URL}"))


def test_others_are_served_while_one_model_loads_and_unloads() -> None:
    status, received = changes_in_sequence(
        MANY_UP, ("b", State.LOADING), ("b", State.READY), ("a", State.DRAINING), ("a", State.STOPPED)
    )
    assert received == [
        f"STATUS=serving a, b at {URL}; loading b",
        f"STATUS=serving a, b at {URL}",
        f"STATUS=serving a, b at {URL}",
    ]
    assert status == MANY_UP


def test_problem_of_one_model_does_not_affect_others() -> None:
    status, messages = systemd_status.exited(
        MANY_UP, "a", OUT_OF_MEMORY, restarts=True, crashes=None, most_crashes=5
    )
    trouble = "restarting a after out of memory"
    assert messages == (f"STATUS=serving a, b at {URL}; {trouble}",)
    status, received = changes_in_sequence(
        status, ("b", State.LOADING), ("b", State.READY), ("a", State.LOADING)
    )
    assert received == [
        f"STATUS=serving a, b at {URL}; loading b; {trouble}",
        f"STATUS=serving a, b at {URL}; {trouble}",
        f"STATUS=serving a, b at {URL}; {trouble}: loading a",
    ]
    status, messages = systemd_status.exited(
        status, "a", OUT_OF_MEMORY, restarts=False, crashes=None, most_crashes=5
    )
    assert messages[0].startswith(f"STATUS=serving a, b at {URL}; gave up on a: The kernel killed it")
    # Reported while it lasts, here until the model is removed.
    status, messages = systemd_status.reloaded(status, ["b"], gone=["a"])
    assert (status, messages) == (replace(MANY_UP, models=("b",)), (f"STATUS=serving b at {URL}",))


def test_reload_ends_with_the_new_config_while_models_load() -> None:
    status, messages = systemd_status.reloading(MANY_UP, None, monotonic_us=17)
    assert messages == ("RELOADING=1", "MONOTONIC_USEC=17", "STATUS=reading the config again")
    status, received = changes_in_sequence(status, ("b", State.LOADING), ("b", State.READY))
    assert received == [f"STATUS=serving a, b at {URL}; loading b", f"STATUS=serving a, b at {URL}"]
    status, messages = systemd_status.reloaded(status, ["a", "c"])
    assert messages == ("READY=1", f"STATUS=serving a, c at {URL}")
    # After a change of a folder, without a reload.
    assert systemd_status.reloaded(status, ["a"])[1] == (f"STATUS=serving a at {URL}",)
    assert systemd_status.reloaded(MANY, ["a"]) == (MANY, ())


def test_rejected_config_keeps_service_ready_and_is_reported() -> None:
    status, _ = systemd_status.reloading(MANY_UP, None, monotonic_us=17)
    status, messages = systemd_status.reloaded(status, None, "x.yaml has 2 mistakes.")
    refused = "config rejected: x.yaml has 2 mistakes."
    assert messages == ("READY=1", f"STATUS=serving a, b at {URL}; {refused}")
    status, received = changes_in_sequence(status, ("b", State.LOADING))
    assert received == [f"STATUS=serving a, b at {URL}; loading b; {refused}"]
    status, _ = changes_in_sequence(status, ("b", State.READY))
    assert systemd_status.reloaded(status, ["a", "b"]) == (MANY_UP, (f"STATUS=serving a, b at {URL}",))


def test_status_names_only_some_of_very_many_models() -> None:
    models = [f"m{number}" for number in range(7)]
    status, _ = systemd_status.serving(MANY, models, URL, slots=None)
    _, received = changes_in_sequence(status, *((model, State.LOADING) for model in models))
    assert received[-1] == (
        f"STATUS=serving 7 models at {URL}; "
        "loading m6; loading m5; loading m4; loading m3; loading m2; 2 more"
    )
    assert systemd_status.serving(MANY, [], URL, slots=None)[1][1] == f"STATUS=serving 0 models at {URL}"
