"""The log line about the drafts of a request, as llama-server writes it."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.draft_log import DRAFTED, Drafted, read_drafted

LINE = (
    "0.00.078.626 I slot print_timing: id  0 | task 0 | draft acceptance = 0.57576 (   19 accepted /    33 "
    "generated), mean len =  4.88"
)
OLDER = (
    "slot print_timing: id  0 | task 7 | draft acceptance rate = 0.57576 (   19 accepted /   33 generated)"
)


@pytest.mark.parametrize("line", [LINE, OLDER])
def test_drafts_of_a_request_are_read(line: str) -> None:
    assert read_drafted(line) == Drafted(proposed=33, accepted=19)
    assert DRAFTED.search(line.encode())


@pytest.mark.parametrize(
    "line", [f"prompt: {LINE}", f"{LINE} and more", "slot print_timing: id  0 | task 0 | n_decoded = 3"]
)
def test_other_lines_are_not(line: str) -> None:
    assert read_drafted(line) is None


def test_counts_are_added() -> None:
    assert Drafted(3, 1) + Drafted(5, 5) == Drafted(8, 6)
