"""Which slots belong to which request, by the order of their tasks."""

from __future__ import annotations

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.llama_server.answers import SlotProgress
from llamasup.core.proxy.live.state import LivePhase, slots_of, with_progress
from llamasup.core.queueing.endpoint import Endpoint, Lease
from tests.core.proxy.live.samples import REQUEST


def slot(task: int, *, prompt: int | None = 10, done: int | None = 0, decoded: int = 0) -> SlotProgress:
    return SlotProgress(task, prompt, done, decoded)


def leased(*weights: int) -> tuple[Endpoint, list[Lease]]:
    """An endpoint whose requests got their permits one after the other."""
    endpoint = Endpoint("tiny", 1, UnixAddress("/nowhere"), max_concurrent=4)
    leases = []
    for number, weight in enumerate(weights):
        lease = endpoint.lease(infers=True)
        lease.weigh(weight)
        lease.since_s = 1.0 + number
        leases.append(lease)
    return endpoint, leases


def test_slots_are_matched_in_the_order_of_arrival() -> None:
    endpoint, (first, second) = leased(1, 1)
    assert slots_of(endpoint, (), [slot(4), slot(9)]) == {first: [slot(4)], second: [slot(9)]}


def test_request_of_several_jobs_has_several_slots() -> None:
    endpoint, (first, second) = leased(2, 1)
    found = slots_of(endpoint, (), [slot(1), slot(2), slot(3)])
    assert found == {first: [slot(1), slot(2)], second: [slot(3)]}


def test_unsent_request_has_no_slot() -> None:
    endpoint, (first, second) = leased(1, 1)
    assert slots_of(endpoint, {first}, [slot(1)]) == {second: [slot(1)]}


def test_abandoned_request_keeps_its_slot() -> None:
    endpoint, (first, second) = leased(1, 1)
    first.linger(lambda why: None)
    assert slots_of(endpoint, (), [slot(1), slot(2)])[second] == [slot(2)]


@pytest.mark.parametrize("tasks", [[], [1], [1, 2, 3]])
def test_other_number_of_slots_shows_nothing(tasks: list[int]) -> None:
    endpoint, _ = leased(1, 1)
    assert slots_of(endpoint, (), [slot(task) for task in tasks]) == {}


def test_request_at_its_prompt_has_a_percentage() -> None:
    shown = with_progress(REQUEST, [slot(1, prompt=400, done=100)], None)
    assert (shown.phase, shown.percent, shown.tokens_prompt) == (LivePhase.PROMPT, 25.0, 400)


def test_slot_with_a_token_generates() -> None:
    """Also if its answer is not a stream, so that the client has received nothing."""
    shown = with_progress(REQUEST, [slot(1, prompt=400, done=400, decoded=7)], 3.5)
    assert (shown.phase, shown.percent, shown.tokens_completion) == (LivePhase.GENERATING, None, 7)
    assert shown.tokens_per_s == 3.5


def test_build_that_does_not_count_prompts_shows_the_answer_only() -> None:
    shown = with_progress(REQUEST, [slot(1, prompt=None, done=None, decoded=2)], None)
    assert (shown.tokens_prompt, shown.percent, shown.tokens_completion) == (None, None, 2)


def test_jobs_are_added_up() -> None:
    shown = with_progress(REQUEST, [slot(1, prompt=100, done=100), slot(2, prompt=100, done=0)], None)
    assert (shown.tokens_prompt, shown.percent) == (200, 50.0)
