"""Which messages of one kind are shown, and how the others are counted."""

from __future__ import annotations

from llamasup.cli.output.repeats import BURST, PERIOD_S, Repeats, count_one, end_period


def shown_of(repeats: Repeats | None, times: list[float]) -> tuple[Repeats, list[bool]]:
    shown = []
    for now_s in times:
        repeats, is_shown = count_one(repeats, now_s)
        shown.append(is_shown)
    assert repeats is not None
    return repeats, shown


def test_the_first_few_are_shown_at_once_and_the_others_counted() -> None:
    repeats, shown = shown_of(None, [10.0 + n / 1000 for n in range(500)])
    assert shown == [True] * BURST + [False] * (500 - BURST)
    assert repeats == Repeats(10.0 + PERIOD_S, BURST, 500 - BURST)


def test_a_flood_that_goes_on_is_only_counted() -> None:
    repeats, _ = shown_of(None, [0.0] * 100)
    repeats, left_out = end_period(repeats, PERIOD_S)
    assert left_out == 100 - BURST
    repeats, shown = shown_of(repeats, [1.5] * 10)
    assert shown == [False] * 10
    assert end_period(repeats, 2 * PERIOD_S)[1] == 10


def test_after_a_quiet_period_the_first_is_shown_again() -> None:
    repeats, _ = end_period(shown_of(None, [0.0] * 100)[0], PERIOD_S)
    assert shown_of(repeats, [2 * PERIOD_S + 0.1])[1] == [True]


def test_messages_with_pauses_between_them_are_all_shown() -> None:
    assert all(shown_of(None, [n * PERIOD_S for n in range(50)])[1])


def test_what_was_left_out_is_counted_until_it_was_said() -> None:
    """The timer may be late on a busy machine."""
    repeats, shown = shown_of(None, [0.0] * (BURST + 1) + [100.0])
    assert not shown[-1]
    assert repeats.left_out == 2
