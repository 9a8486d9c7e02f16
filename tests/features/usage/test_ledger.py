"""The sums of finished requests by day, model and key."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from llamasup.features.usage.ledger import Group, Ledger, Sums, day_at
from tests.features.usage.records import record

DAY = "2026-03-01"
TINY = Group(DAY, "tiny", "")


def test_requests_of_one_group_are_added_up() -> None:
    ledger = Ledger()
    assert ledger.count(record(), DAY) == TINY
    ledger.count(record(slot_s=0.25), DAY)
    assert ledger.rows() == [
        (TINY, Sums(2, 0, tokens_prompt=20, tokens_cached=8, tokens_completion=10, slot_us=1_750_000))
    ]
    assert (len(ledger), repr(ledger)) == (1, "<Ledger of 1 groups>")


def test_each_day_model_and_key_has_its_own_sums() -> None:
    ledger = Ledger()
    for changes, day in (
        ({}, DAY),
        ({"model": "other"}, DAY),
        ({"client": "key:phone"}, DAY),
        ({"client": "192.0.2.7"}, DAY),  # an address is no key
        ({}, "2026-03-02"),
    ):
        ledger.count(record(**changes), day)
    assert {group: sums.requests for group, sums in ledger.rows()} == {
        TINY: 2,
        Group(DAY, "other", ""): 1,
        Group(DAY, "tiny", "phone"): 1,
        Group("2026-03-02", "tiny", ""): 1,
    }


@pytest.mark.parametrize(
    ("outcome", "status", "errors"),
    [
        ("ok", 200, 0),
        ("ok", 400, 1),
        ("local", 404, 0),
        ("client_gone", 499, 0),
        ("gave_way", 503, 0),
        ("upstream_failed", 200, 1),
        ("revoked", 503, 1),
        ("unavailable", 429, 1),
        ("error_event", 200, 1),
    ],
)
def test_answer_that_is_an_error_or_incomplete_is_an_error(outcome: str, status: int, errors: int) -> None:
    ledger = Ledger()
    ledger.count(record(outcome=outcome, status=status), DAY)
    assert ledger.rows()[0][1].errors == errors


@pytest.mark.parametrize(
    ("changes", "unreported"),
    [
        ({}, 1),
        ({"tokens_completion": 3}, 0),
        ({"slot_s": 0.0}, 0),  # it never had a slot
        ({"status": 400}, 0),
    ],
)
def test_answer_without_counts_of_tokens_is_unreported(changes: dict[str, int], unreported: int) -> None:
    ledger = Ledger()
    nothing = {"tokens_prompt": None, "tokens_cached": None, "tokens_completion": None}
    ledger.count(record(**{**nothing, "tokens_estimated": 7, **changes}), DAY)
    sums = ledger.rows()[0][1]
    assert (sums.unreported, sums.tokens_estimated) == (unreported, 7)


def test_taken_sums_leave_the_ledger_and_can_be_added_to_another() -> None:
    ledger, unsaved = Ledger(), Ledger()
    ledger.count(record(), DAY)
    taken = ledger.take()
    assert not ledger
    ledger.count(record(), DAY)
    unsaved.add(taken)
    unsaved.add(ledger.take())
    assert unsaved.rows()[0][1].requests == 2
    assert taken[TINY].requests == 1  # adding does not change what was taken


def test_energy_is_unknown_until_it_is_measured() -> None:
    ledger = Ledger()
    ledger.count(record(), DAY)
    assert ledger.rows()[0][1].energy_uj is None
    ledger.add_energy({TINY: 5})
    ledger.add_energy({TINY: 6, Group(DAY, "other", ""): 1})
    assert [sums.energy_uj for _, sums in ledger.rows()] == [11, 1]


def test_day_changes_at_local_midnight_and_is_asked_for_each_minute() -> None:
    zone = timezone(timedelta(hours=5, minutes=30))
    assert day_at(datetime(2026, 3, 1, 23, 59, 50, tzinfo=zone)) == (DAY, 10.0)
    assert day_at(datetime(2026, 3, 1, 12, 0, tzinfo=zone)) == (DAY, 60.0)
    assert day_at(datetime(2026, 3, 1, 0, 0, tzinfo=zone)) == (DAY, 60.0)
