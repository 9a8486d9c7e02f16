"""Which requests may have ended their server: tables of what follows, and what is kept of their bodies."""

from __future__ import annotations

import pytest

from llamasup.core.queueing.endpoint import generation_ended
from llamasup.core.queueing.suspects import KEPT_S, MAX_KEPT, Next, Suspects, alone_s, next_step, place_for

WHY = generation_ended("llama-server was ended by SIGABRT", "aborted")
ENDS: list[str] = []


def an_end() -> None:
    ENDS.append("explained")


@pytest.mark.parametrize(
    ("ends", "alone", "step"),
    [
        (1, False, Next.ALONE),
        (1, True, Next.ALONE),  # nobody else was in flight: the server may have ended by itself
        (2, True, Next.REFUSED),
        (2, False, Next.ALONE),  # something ran beside it
        (3, True, Next.REFUSED),
        (3, False, Next.FAILED),
    ],
)
def test_request_is_refused_after_two_ends_if_it_was_alone(ends: int, step: Next, *, alone: bool) -> None:
    assert next_step(ends, alone=alone) is step


@pytest.mark.parametrize(
    ("ends", "ran_s", "for_s"), [(1, 0.0, 10.0), (1, 20.0, 40.0), (2, 0.0, float("inf"))]
)
def test_suspect_is_alone_for_longer_than_it_ran_before(ends: int, ran_s: float, for_s: float) -> None:
    assert alone_s(ends, ran_s) == for_s


@pytest.mark.parametrize(
    ("taken", "place"),
    [
        ([0], 0),
        ([3, 0, 0], 1),
        ([3], 0),  # it is kept free
        ([3, 1, 2], 1),
        ([None, 3], None),  # the suspect there may end soon
        ([None], None),
        ([None, 3, 0], 2),  # two suspects, each alone
        ([], None),
    ],
)
def test_suspect_goes_where_nothing_runs(taken: list[int | None], place: int | None) -> None:
    assert place_for(taken) == place


@pytest.fixture
def suspects() -> Suspects:
    return Suspects(b"secret")


def test_fingerprint_depends_on_path_body_and_key(suspects: Suspects) -> None:
    other = Suspects(b"another")
    prints = {
        suspects.fingerprint(b"/completion", b"{}"),
        suspects.fingerprint(b"/completion", b"{ }"),
        suspects.fingerprint(b"/infill", b"{}"),
        suspects.fingerprint(b"/infill{}", b""),
        other.fingerprint(b"/completion", b"{}"),
    }
    assert len(prints) == 5
    assert suspects.fingerprint(b"/completion", b"{}") in prints


def test_suspicion_has_the_ends_and_is_forgotten_after_some_minutes(suspects: Suspects) -> None:
    suspects.suspect(b"a", 0.0, an_end)
    suspects.suspect(b"a", 10.0, an_end)
    known = suspects.find(b"a", KEPT_S)
    assert known is not None
    assert (known.refusal, known.ends) == (None, (an_end, an_end))
    assert suspects.find(b"b", KEPT_S) is None
    assert suspects.find(b"a", KEPT_S + 10.0) is None
    assert not suspects.known


def test_refusal_names_the_reason_and_is_stronger_than_a_suspicion(suspects: Suspects) -> None:
    suspects.suspect(b"a", 0.0, an_end)
    refusal = suspects.refuse(b"a", 1.0, WHY)
    assert (refusal.status, refusal.cause, refusal.queueable) == (503, "poison_request", False)
    assert refusal.message.endswith(WHY.message)
    suspects.suspect(b"a", 2.0, an_end)
    known = suspects.find(b"a", 3.0)
    assert known is not None
    assert known.refusal is refusal


def test_answered_body_is_no_suspect(suspects: Suspects) -> None:
    suspects.suspect(b"a", 0.0, an_end)
    suspects.clear(b"a")
    suspects.clear(b"a")
    assert suspects.find(b"a", 1.0) is None


def test_only_the_last_bodies_are_kept(suspects: Suspects) -> None:
    for number in range(MAX_KEPT + 1):
        suspects.suspect(b"%d" % number, 0.0, an_end)
    assert len(suspects.known) == MAX_KEPT
    assert suspects.find(b"0", 1.0) is None
    assert suspects.find(b"1", 1.0) is not None
    assert repr(suspects) == f"<Suspects: {MAX_KEPT} bodies>"
