"""How many drafted tokens were accepted, and what users are told of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.planning.measured.draft_acceptance import (
    DraftCounts,
    acceptance,
    add_counts,
    counts_for,
    is_low,
)

COUNTS = DraftCounts("build", "/m/draft.gguf", 100, 60)


def test_counts_of_one_draft_are_added() -> None:
    (sum_,) = add_counts(add_counts((), COUNTS), replace(COUNTS, proposed=50, accepted=10))
    assert sum_ == replace(COUNTS, proposed=150, accepted=70)


def test_counts_of_other_drafts_and_builds_are_kept_apart() -> None:
    records = (COUNTS, replace(COUNTS, draft="draft-mtp"), replace(COUNTS, runtime="other"))
    added = add_counts(records, COUNTS)
    assert added == (records[1], records[2], replace(COUNTS, proposed=200, accepted=120))
    assert counts_for(added, "build", "draft-mtp") == records[1]
    assert counts_for(added, "build", "none") is None


def test_old_counts_fade() -> None:
    """A draft that was trained again is judged by its own tokens."""
    records = (replace(COUNTS, proposed=20_000, accepted=1000),)
    (half,) = add_counts(records, replace(COUNTS, proposed=10_000, accepted=9000))
    assert (half.proposed, half.accepted) == (20_000, 9500)
    (whole,) = add_counts(records, replace(COUNTS, proposed=30_000, accepted=27_000))
    assert (whole.proposed, whole.accepted) == (30_000, 27_000)


def test_few_records_are_kept() -> None:
    records: tuple[DraftCounts, ...] = ()
    for number in range(20):
        records = add_counts(records, replace(COUNTS, draft=str(number)))
    assert [record.draft for record in records] == [str(number) for number in range(12, 20)]


@pytest.mark.parametrize(
    ("proposed", "accepted", "low"),
    [(999, 0, False), (1000, 0, True), (1000, 349, True), (1000, 350, False), (1000, 1000, False)],
)
def test_acceptance_is_low_only_if_enough_tokens_show_it(proposed: int, accepted: int, low: bool) -> None:
    assert is_low(proposed, accepted) is low
    assert acceptance(proposed, accepted).startswith("only ") is low
    assert f"{proposed:,} tokens that the draft proposed were accepted" in acceptance(proposed, accepted)
