from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.errors import UsageInvalid
from llamasup.features.batch.api.objects import (
    LineMistake,
    NewBatch,
    StoredBatch,
    StoredFile,
    batch_object,
    ended,
    file_object,
    new_batch,
    next_batch,
    page,
    window_s,
)

FILE = StoredFile("file-1", "key:anna", "batch", "in.jsonl", 5, 100, 200)
ASKED = NewBatch("file-1", "/v1/completions", "24h", {"for": "test"})


def test_completion_window_is_hours_or_days() -> None:
    assert window_s("24h") == 86_400
    assert window_s("3d") == 3 * 86_400
    assert window_s("30d") == 30 * 86_400
    for text in ("", "24", "0h", "1w", "-1h", "99999h", "31d", "721h"):
        with pytest.raises(UsageInvalid, match="completion_window"):
            window_s(text)


def test_new_batch_is_that_of_the_owner_of_its_file() -> None:
    batch = new_batch(ASKED, "batch_1", FILE, 1000)
    shown = batch_object(batch)
    assert batch.owner == "key:anna"
    assert "owner" not in shown
    assert shown["status"] == "validating"
    assert shown["expires_at"] == 1000 + 86_400
    assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert shown["metadata"] == {"for": "test"}
    assert shown["errors"] is None


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        (replace(ASKED, endpoint="/v1/images"), FILE),
        (ASKED, replace(FILE, purpose="batch_output")),
        (replace(ASKED, metadata={str(n): "" for n in range(17)}), FILE),
        (replace(ASKED, metadata={"k" * 65: ""}), FILE),
        (replace(ASKED, metadata={"k": "v" * 513}), FILE),
        (replace(ASKED, completion_window="soon"), FILE),
    ],
)
def test_invalid_batch_is_refused(asked: NewBatch, file: StoredFile) -> None:
    with pytest.raises(UsageInvalid):
        new_batch(asked, "batch_1", file, 1000)


def test_batch_without_metadata_is_accepted() -> None:
    assert batch_object(new_batch(replace(ASKED, metadata=None), "b", FILE, 0))["metadata"] is None


def test_end_of_a_batch_has_its_time_and_its_mistakes() -> None:
    mistakes = (LineMistake("invalid_line", "wrong", 3), LineMistake("key_removed", "gone"))
    shown = batch_object(ended(new_batch(ASKED, "b", FILE, 0), "failed", 50, errors=mistakes))
    assert shown["status"] == "failed"
    assert shown["failed_at"] == 50
    assert [error["line"] for error in shown["errors"]["data"]] == [3, None]


def test_page_of_a_list_names_its_ends() -> None:
    shown = page([file_object(FILE), file_object(replace(FILE, id="file-2"))], has_more=True)
    assert (shown["first_id"], shown["last_id"], shown["has_more"]) == ("file-1", "file-2", True)
    assert "owner" not in shown["data"][0]
    assert page([], has_more=False)["first_id"] is None


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
