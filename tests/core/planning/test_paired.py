"""The sequential test, by simulation: how often it is wrong, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from statistics import fmean, median

import pytest

from llamasup.core.planning.measured.paired import (
    ALPHA,
    MIN_PAIRS,
    Verdict,
    bounds,
    judge,
    wealth,
    wins_needed,
)
from tests.kit.extent import examples

_MOST_PAIRS = 60
_RUNS = examples(2000)

Machine = Callable[[Random, int], float]
"""The log of how much slower the machine is at this moment."""


def cauchy(random: Random, moment: int) -> float:
    return 0.02 * math.tan(math.pi * (random.random() - 0.5))


def drifting(random: Random, moment: int) -> float:
    return 0.01 * moment + random.gauss(0, 0.02)


def throttled(random: Random, moment: int) -> float:
    return (0.7 if moment % 17 < 6 else 0.0) + random.gauss(0, 0.01)


def neighbour(random: Random, moment: int) -> float:
    return random.gauss(0, 0.02) + (random.expovariate(1) if random.random() < 0.3 else 0.0)


MACHINES: tuple[Machine, ...] = (cauchy, drifting, throttled, neighbour)


def verdict(machine: Machine, gain: float, seed: int) -> tuple[Verdict, int]:
    """Of one test that looks after each pair, and the number of pairs."""
    random, ratios, moment = Random(seed), [], 0
    for pair in range(_MOST_PAIRS):
        slow = {}
        for name in random.sample(("candidate", "default"), 2):
            slow[name] = machine(random, moment)
            moment += 1
        ratios.append(slow["default"] - slow["candidate"] + math.log(gain))
        if (found := judge(ratios)) is not Verdict.UNDECIDED:
            return found, pair + 1
    return Verdict.UNDECIDED, _MOST_PAIRS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_same_configuration_wins_in_at_most_the_stated_share(machine: Machine) -> None:
    wins = sum(verdict(machine, 1.0, seed)[0] is Verdict.BETTER for seed in range(_RUNS))
    assert wins / _RUNS <= ALPHA


@pytest.mark.parametrize("machine", MACHINES)
def test_a_slower_configuration_wins_less_often_still(machine: Machine) -> None:
    wins = sum(verdict(machine, 0.95, seed)[0] is Verdict.BETTER for seed in range(500))
    assert wins / 500 <= ALPHA


@pytest.mark.parametrize(
    ("machine", "gain", "share"),
    [
        (cauchy, 1.2, 0.99),
        (drifting, 1.2, 0.99),
        (throttled, 1.2, 0.99),
        (neighbour, 1.2, 0.85),
        (cauchy, 1.05, 0.8),
        (drifting, 1.05, 0.95),
        (throttled, 1.05, 0.99),
    ],
)
def test_a_planted_gain_is_found(machine: Machine, gain: float, share: float) -> None:
    found = sum(verdict(machine, gain, seed)[0] is Verdict.BETTER for seed in range(300))
    assert found / 300 >= share


def test_noise_makes_the_test_longer() -> None:
    quiet = [verdict(drifting, 1.2, seed)[1] for seed in range(100)]
    noisy = [verdict(neighbour, 1.2, seed)[1] for seed in range(100)]
    assert sum(noisy) > 2 * sum(quiet)


def test_the_bounds_contain_the_gain_at_all_times_together() -> None:
    missed = 0
    for seed in range(1000):
        random, ratios = Random(seed), []
        for _ in range(40):
            ratios.append(math.log(1.1) + cauchy(random, 0))
            seen = bounds(ratios)
            if not seen.lower <= 1.1 <= seen.upper:
                missed += 1
                break
    assert missed / 1000 <= 2 * ALPHA


def shown(gain: float, runs: int) -> list[tuple[bool, float]]:
    """Of the proofs of this gain that take it: whether the bounds are wrong, and the gain that they show."""
    taken = []
    for seed in range(runs):
        random, ratios = Random(seed), list[float]()
        while len(ratios) < 40 and not (len(ratios) >= MIN_PAIRS and median(ratios) <= 0):
            ratios.append(math.log(gain) + random.gauss(0, 0.1))
            if (found := judge(ratios)) is not Verdict.UNDECIDED:
                seen = bounds(ratios)
                if found is Verdict.BETTER:
                    taken.append((not seen.lower <= gain <= seen.upper, seen.gain))
                break
    return taken


def test_a_small_gain_that_is_taken_is_shown_too_large_and_a_worthwhile_one_is_not() -> None:
    small = shown(1.005, 4000)
    assert len(small) / 4000 <= ALPHA
    assert fmean(wrong for wrong, _ in small) > 0.4
    assert fmean(gain for _, gain in small) > 1.05
    larger = shown(1.1, 1000)
    assert fmean(wrong for wrong, _ in larger) < 0.01
    assert fmean(gain for _, gain in larger) < 1.12


def test_the_wealth_is_a_martingale_under_a_fair_coin() -> None:
    for pairs in range(20):
        for wins in range(pairs + 1):
            after = (wealth(pairs + 1, wins) + wealth(pairs + 1, wins + 1)) / 2
            assert after == pytest.approx(wealth(pairs, wins))


def test_nine_wins_are_enough_and_eight_are_not() -> None:
    assert MIN_PAIRS == 9
    assert judge([0.1] * 8) is Verdict.UNDECIDED
    assert judge([0.1] * 9) is Verdict.BETTER
    assert wins_needed(8) is None


def test_no_verdict_without_pairs() -> None:
    assert judge([]) is Verdict.UNDECIDED
    assert bounds([]).pairs == 0


def test_too_few_pairs_have_a_gain_without_bounds() -> None:
    seen = bounds([math.log(2)] * 3)
    assert seen.gain == pytest.approx(2)
    assert (seen.lower, seen.upper) == (0.0, math.inf)


def test_a_gain_that_is_not_worth_a_change_ends_the_test() -> None:
    assert judge([0.001] * 9) is Verdict.BETTER
    assert judge([0.0] * 9) is Verdict.NOT_BETTER
    assert judge([-0.2] * 9) is Verdict.NOT_BETTER


def test_one_enormous_outlier_decides_nothing() -> None:
    ratios = [-0.01] * 20 + [1e6]
    assert judge(ratios) is Verdict.NOT_BETTER
    assert bounds(ratios).upper < 1
