"""What requests are told while a model does not serve."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import Stay
from llamasup.core.pool.answers import downloading, pause_of, reason_of
from llamasup.core.pool.model_states import (
    Model,
    Processes,
    ProcessesStatus,
    Removal,
    Rollout,
    RolloutStep,
    Sizing,
)
from scripts.generated.pool_states import ANSWER, ERROR, SPECS

MODEL = Model(SPECS[0])
SERVING, STOPPING = (
    replace(MODEL, current=Processes(1, status))
    for status in (ProcessesStatus.SERVING, ProcessesStatus.STOPPING)
)


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (MODEL, None),
        (SERVING, None),
        (replace(MODEL, error=ERROR), None),
        (replace(SERVING, for_id="b"), "unloading"),
        (STOPPING, "unloading"),
        (replace(SERVING, rollout=Rollout(RolloutStep.BESIDE)), None),
        (replace(SERVING, rollout=Rollout(RolloutStep.STARTING)), "changing"),
    ],
)
def test_all_requests_wait_while_no_process_may_take_one(model: Model, cause: str | None) -> None:
    answer = pause_of(model)
    assert (None if answer is None else answer.cause) == cause
    assert answer is None or answer.queueable


def test_removed_model_answers_with_its_reason() -> None:
    assert pause_of(replace(MODEL, removal=Removal(ERROR), answer=ANSWER)) is ANSWER


def test_eviction_names_the_model_that_needs_the_memory() -> None:
    answer = pause_of(replace(STOPPING, for_id="b"))
    assert answer is not None
    assert answer.message == "The model 'a' is being unloaded to make room for 'b'"
    assert answer.absent  # a request that waits would load it again


@pytest.mark.parametrize(
    ("total", "bytes_per_s", "message", "retry_after_s"),
    [
        (None, 0, "The model 'a' is being downloaded: 1.0 GiB", 1),
        (3 << 30, 0, "The model 'a' is being downloaded: 1.0 GiB of 3.0 GiB", 1),
        (3 << 30, 1 << 28, "The model 'a' is being downloaded: 1.0 GiB of 3.0 GiB", 8),
    ],
)
def test_download_is_the_reason_while_it_runs(
    total: int | None, bytes_per_s: int, message: str, retry_after_s: int
) -> None:
    answer = downloading(SPECS[0], 1 << 30, total, bytes_per_s)
    assert (answer.message, answer.retry_after_s) == (message, retry_after_s)
    sizing = Sizing(1, "load", download=answer)
    assert reason_of(replace(MODEL, sizing=sizing)) is answer


def test_error_of_the_server_is_the_reason_after_a_failure() -> None:
    failed = replace(MODEL, error=ERROR)
    assert _reason(failed).message == "It failed."
    assert _reason(replace(failed, answer=replace(ANSWER, message="No."))).message == "No."
    assert _reason(MODEL).cause == "loading"


def test_model_by_command_answers_for_itself_unless_a_command_loads_it() -> None:
    only = replace(MODEL, spec=replace(SPECS[0], stay=Stay(by_command=True)))
    unloading = replace(only, current=STOPPING.current)
    assert reason_of(only) is None
    assert pause_of(unloading) is None
    waiting = pause_of(unloading, awaited=True)
    assert waiting is not None
    assert waiting.queueable


def _reason(model: Model) -> HttpError:
    reason = reason_of(model)
    assert reason is not None
    return reason
