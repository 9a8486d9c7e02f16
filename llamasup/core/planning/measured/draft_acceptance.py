"""Counts how many of the tokens that a draft proposed were accepted on this machine (pure).

llama-server logs the counts of each request. ``planning/measured/load_history.py`` keeps their sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

_MAX_RECORDS = 8
# Older requests count less and less, so that a draft that was trained again is judged by its own tokens.
_MAX_PROPOSED = 20_000
_MIN_PROPOSED = 1000
# The wide model of scripts/bench_drafts.py with --spec-synth-rates (b11434): a share of 0.3 gave 0.8 times
# the speed with drafts of 4 tokens and 1.1 times with 8; a share of 0.5 gave 0.9 and 1.2.
_LOW = 0.35


class DraftCounts(Struct, frozen=True):
    """The counts of one ``draft``: a path, or the type of drafting of a model that drafts for itself."""

    runtime: str
    draft: str
    proposed: int
    accepted: int


def add_counts(records: Sequence[DraftCounts], new: DraftCounts) -> tuple[DraftCounts, ...]:
    """Add the counts of one process, the newest last."""
    earlier = counts_for(records, new.runtime, new.draft)
    if earlier is not None:
        kept = max(0.0, min(1.0, (_MAX_PROPOSED - new.proposed) / max(1, earlier.proposed)))
        proposed = new.proposed + round(earlier.proposed * kept)
        new = replace(new, proposed=proposed, accepted=new.accepted + round(earlier.accepted * kept))
    others = [record for record in records if record is not earlier]
    return (*others, new)[-_MAX_RECORDS:]


def counts_for(records: Sequence[DraftCounts], runtime: str, draft: str) -> DraftCounts | None:
    """Find the counts of this draft. None: it has none."""
    return next((one for one in records if (one.runtime, one.draft) == (runtime, draft)), None)


def is_low(proposed: int, accepted: int) -> bool:
    """Whether so few tokens were accepted that answers are hardly faster than without drafts, or slower."""
    return proposed >= _MIN_PROPOSED and accepted < _LOW * proposed


def acceptance(proposed: int, accepted: int) -> str:
    """Describe the counts for users."""
    share = f"{accepted / proposed:.0%} of {proposed:,} tokens that the draft proposed were accepted"
    if not is_low(proposed, accepted):
        return share
    return f"only {share}, so drafts hardly pay: llamasup tune measures it"
