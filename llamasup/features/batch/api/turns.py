"""Decides which batch of the API runs next (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llamasup.features.batch.api.objects import StoredBatch

TURN_S: Final = 300.0
"""How long a batch runs while other clients have batches. Ending a turn costs the answers in flight."""


def next_batch(unfinished: Sequence[StoredBatch], turns: Mapping[str, int], now_s: int) -> StoredBatch | None:
    """From these, the oldest first. ``turns``: the number of the last turn of each client.

    The clients take turns, each with its oldest batch. One that was cancelled, or whose window is over, comes
    first: it only ends.
    """
    return min(
        unfinished,
        key=lambda batch: (
            batch.status != "cancelling" and batch.expires_at > now_s,
            turns.get(batch.owner, 0),
        ),
        default=None,
    )
