from __future__ import annotations

from llamasup.features.batch.api.objects import StoredBatch
from llamasup.features.batch.api.turns import next_batch


def batch(id_: str, owner: str, expires_at: int = 100, status: str = "in_progress") -> StoredBatch:
    return StoredBatch(id_, owner, "file-1", "/v1/completions", "24h", 0, expires_at, status=status)


def test_clients_take_turns() -> None:
    waiting = [batch("1", "anna"), batch("2", "anna"), batch("3", "ben"), batch("4", "eve")]
    turns: dict[str, int] = {}
    order = []
    for turn in range(1, 6):
        found = next_batch(waiting, turns, 50)
        assert found is not None
        turns[found.owner] = turn
        order.append(found.id)
    assert order == ["1", "3", "4", "1", "3"]
    assert next_batch([], turns, 50) is None


def test_batch_that_only_ends_comes_first() -> None:
    for ending in (batch("2", "anna", 50), batch("2", "anna", status="cancelling")):
        assert next_batch([batch("1", "anna"), ending], {"anna": 3}, 50) is ending
