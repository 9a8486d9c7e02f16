"""The choice of a replica for a request: the longest match, unless it is much busier."""

from __future__ import annotations

from statistics import fmean

import pytest

from llamasup.core.pool.replicas.affinity import (
    MAX_BUSIER,
    MAX_MARKS,
    MIN_FIT,
    Affinity,
    Candidate,
    PromptMarks,
    choose,
    homes,
)
from llamasup.core.pool.replicas.conversation import Conversation
from scripts.simulate.affinity import MACHINES, NONE, Machine, play


def conversation(*marks: int, size: int = 0) -> Conversation:
    """A conversation whose messages have ten letters each."""
    sizes = tuple(10 * (number + 1) for number in range(len(marks)))
    return Conversation(marks, sizes, size or sizes[-1])


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        # without a match: the least busy replica; of equal ones, the least recently used
        ([Candidate(0.5), Candidate(0.25), Candidate(0.75)], 1),
        ([Candidate(0.0, turn=7), Candidate(0.0, turn=3), Candidate(0.0, turn=5)], 1),
        ([Candidate(0.0, turn=7), Candidate(0.25, turn=3)], 0),
        # a match outweighs a queue of half the permits
        ([Candidate(0.0), Candidate(MAX_BUSIER, 0.9)], 1),
        ([Candidate(0.0), Candidate(MAX_BUSIER + 0.25, 0.9)], 0),
        ([Candidate(0.25), Candidate(MAX_BUSIER + 0.25, 0.9)], 1),
        # the longest match wins; of equal ones, the less busy replica; a replica that is too busy loses
        ([Candidate(0.0, 0.3), Candidate(0.25, 0.9)], 1),
        ([Candidate(0.25, 0.9), Candidate(0.0, 0.9)], 1),
        ([Candidate(0.0, 0.9, turn=2), Candidate(0.0, 0.9, turn=1)], 1),
        ([Candidate(0.25, 0.3), Candidate(0.75, 0.9), Candidate(0.0)], 0),
        # a few common words are no match
        ([Candidate(0.25, MIN_FIT / 2), Candidate(0.0)], 1),
        ([Candidate(0.25, MIN_FIT), Candidate(0.0)], 0),
        ([Candidate(1.0)], 0),
    ],
)
def test_replica_is_chosen_by_match_and_load(candidates: list[Candidate], chosen: int) -> None:
    assert choose(candidates) == chosen


@pytest.mark.parametrize(
    ("fits", "found"),
    [([], []), ([0.0, 0.0], []), ([0.0, MIN_FIT / 2], []), ([0.2, 0.9, 0.9], [1, 2]), ([MIN_FIT, 0.0], [0])],
)
def test_homes_of_a_request_have_most_of_it_in_their_caches(fits: list[float], found: list[int]) -> None:
    assert homes(fits) == found


def test_fit_is_the_known_share_of_a_request() -> None:
    before = PromptMarks()
    assert before.fit(conversation(1, 2)) == 0.0
    before.add(conversation(1, 2), turn=1)
    assert before.fit(conversation(1, 2)) == 1.0
    assert before.fit(conversation(1, 2, 3, 4)) == 0.5
    assert before.fit(conversation(1, 9, 8, 7, size=100)) == 0.1
    assert before.fit(conversation(9, 8)) == 0.0


def test_request_without_a_conversation_has_no_fit_and_no_marks() -> None:
    before = PromptMarks()
    before.add(None, turn=4)
    assert (len(before), before.turn) == (0, 4)
    before.add(conversation(1), turn=5)
    assert (before.fit(None), before.turn) == (0.0, 5)


def test_least_recently_used_marks_are_dropped_first() -> None:
    before = PromptMarks()
    before.add(conversation(1), turn=1)
    before.add(conversation(2), turn=2)
    before.add(conversation(1), turn=3)
    before.add(conversation(*range(100, 100 + MAX_MARKS - 1)), turn=4)
    assert len(before) == MAX_MARKS
    assert (before.fit(conversation(1)), before.fit(conversation(2))) == (1.0, 0.0)


def test_too_long_request_keeps_its_last_marks() -> None:
    before = PromptMarks()
    marks = tuple(range(MAX_MARKS + 10))
    before.add(conversation(*marks), turn=1)
    assert len(before) == MAX_MARKS
    assert before.fit(conversation(*marks)) == 1.0


def test_conversation_returns_to_its_process_until_that_one_ends() -> None:
    affinity: Affinity[str] = Affinity()
    assert [affinity.add(name) for name in ("a", "b", "a")] == [True, True, False]
    idle = [("a", 0.0), ("b", 0.0)]
    talk = conversation(1, 2)
    assert affinity.pick(idle, talk) == "a"
    assert affinity.pick(idle, conversation(7, 8)) == "b", "the other one was used longer ago"
    assert affinity.pick(idle, conversation(1, 2, 3)) == "a"
    assert affinity.fits("a", talk)
    assert not affinity.fits("b", talk)
    assert affinity.pick([("a", 1.0), ("b", 0.0)], conversation(1, 2, 3, 4)) == "b", "it is much busier"
    affinity.note("b", talk)
    assert affinity.fits("b", talk), "it went there after all"
    affinity.forget("a")
    assert affinity.add("a")
    affinity.keep({"a"})
    assert affinity.add("b")
    assert not affinity.fits("b", talk)


# --- the simulation


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_first_tokens_come_sooner_than_from_the_least_busy_replica(machine: Machine) -> None:
    """Under full load. ``python -m scripts.simulate affinity`` compares more rules."""
    ours_s, plain_s = (
        fmean(play(machine, machine.clients[-1], limit, turns=600, seed=0).first_s)
        for limit in (MAX_BUSIER, NONE)
    )
    assert 1.2 * ours_s < plain_s
