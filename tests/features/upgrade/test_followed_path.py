"""The path of a llama-server that is followed: which changes lead to an upgrade."""

from __future__ import annotations

from itertools import pairwise

from llamasup.features.upgrade.followed_path import (
    CONFLICT_RETRY_S,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    MISSING_S,
    Followed,
    Outcome,
    Seen,
    Step,
    after_upgrade,
    look,
)

A, B, C = (("/a/llama-server", "1"), ("/b/llama-server", "1"), ("/c/llama-server", "1"))


class Rig:
    """Looks at the path each ``step_s``; ``outcomes``: those of the next upgrades."""

    def __init__(self, *outcomes: Outcome, step_s: float = 1.0) -> None:
        self._step_s = step_s
        self.followed = Followed(A, A)
        self.running = A[0]
        self.now_s = 1000.0
        self.steps: list[tuple[Step, str]] = []
        self._outcomes = list(outcomes)

    def see(self, seen: Seen | None, times: int = 2) -> None:
        for _ in range(times):
            self.now_s += self._step_s
            self.followed, step = look(self.followed, seen, self.running, self.now_s)
            if step != "wait":
                self.steps.append((step, "" if seen is None else seen[0][1:2]))
            if step == "upgrade":
                assert seen is not None
                outcome = self._outcomes.pop(0)
                if outcome == "serves":
                    self.running = seen[0]
                self.followed = after_upgrade(self.followed, outcome, self.now_s)


def test_unchanged_path_does_nothing() -> None:
    rig = Rig()
    rig.see(A, times=10_000)
    assert rig.steps == []


def test_each_new_build_is_upgraded_to_once() -> None:
    rig = Rig("serves", "serves", "serves")
    for seen in (B, C, A):
        rig.see(seen, times=100)
    assert rig.steps == [("upgrade", "b"), ("upgrade", "c"), ("upgrade", "a")]


def test_build_that_is_still_being_written_waits() -> None:
    rig = Rig("serves")
    for number in range(5):
        rig.see((B[0], str(number)), times=1)
    assert rig.steps == []
    rig.see((B[0], "4"), times=1)
    assert rig.steps == [("upgrade", "b")]


def test_path_that_returns_before_it_was_seen_twice_does_nothing() -> None:
    rig = Rig()
    rig.see(B, times=1)
    rig.see(A)
    rig.see(B, times=1)
    assert rig.steps == []


def test_refused_build_is_tried_again_only_once_it_changes() -> None:
    rig = Rig("refused", "serves")
    rig.see(B, times=10_000)
    assert rig.steps == [("upgrade", "b")]
    rig.see((B[0], "repaired"))
    assert rig.steps == [("upgrade", "b"), ("upgrade", "b")]


def test_path_back_to_the_running_build_does_nothing() -> None:
    rig = Rig("refused", "serves")
    rig.see(B)
    rig.see(A, times=100)
    rig.see(B)
    assert rig.steps == [("upgrade", "b"), ("upgrade", "b")]


def test_unproven_build_is_tried_again_after_longer_and_longer_times() -> None:
    outcomes: list[Outcome] = ["unproven"] * 12
    rig = Rig(*outcomes, step_s=60.0)
    tried_s = []
    for _ in range(4 * int(LAST_RETRY_S) // 60):
        before = len(rig.steps)
        rig.see(B, times=1)
        if len(rig.steps) > before:
            tried_s.append(rig.now_s)
    pauses = [later_s - earlier_s for earlier_s, later_s in pairwise(tried_s)]
    assert [round(pause / FIRST_RETRY_S) for pause in pauses[:9]] == [1, 2, 4, 8, 16, 32, 64, 128, 144]
    assert max(pauses) <= LAST_RETRY_S + 120


def test_changed_build_is_tried_at_once_and_soon_again() -> None:
    rig = Rig("unproven", "unproven", "unproven", "serves")
    rig.see(B, times=int(2 * FIRST_RETRY_S))
    rig.see((B[0], "2"))
    assert len(rig.steps) == 3
    rig.see((B[0], "2"), times=int(FIRST_RETRY_S) + 2)
    assert len(rig.steps) == 4


def test_other_upgrade_is_waited_for() -> None:
    rig = Rig("conflict", "serves")
    rig.see(B, times=int(CONFLICT_RETRY_S) + 4)
    assert rig.steps == [("upgrade", "b"), ("upgrade", "b")]


def test_running_file_that_is_replaced_is_reported_once() -> None:
    rig = Rig("serves")
    rig.see((A[0], "2"), times=100)
    assert rig.steps == [("replaced", "a")]
    rig.see(B)
    rig.see((B[0], "2"), times=100)
    assert rig.steps == [("replaced", "a"), ("upgrade", "b"), ("replaced", "b")]


def test_build_of_another_upgrade_is_no_replaced_one() -> None:
    """The user has asked for B, and then the link points to it."""
    rig = Rig()
    rig.running = B[0]
    rig.see(B, times=100)
    assert rig.steps == []
    rig.see((B[0], "2"), times=100)
    assert rig.steps == [("replaced", "b")]


def test_missing_file_is_reported_once_and_followed_again() -> None:
    rig = Rig("serves")
    rig.see(None, times=int(MISSING_S) - 1)
    assert rig.steps == []
    rig.see(None, times=100)
    assert rig.steps == [("missing", "")]
    rig.see(B)
    rig.see(None, times=100)
    assert rig.steps == [("missing", ""), ("upgrade", "b"), ("missing", "")]
