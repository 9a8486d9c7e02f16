"""The cheapest set of evictions, compared with all possible sets."""

from __future__ import annotations

import random
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.pool.cheapest_set import Candidate, Resource, cheapest_set

RAM: Resource = ("memory", "ram")
GPU: Resource = ("memory", "CUDA0")


def amounts(least: int) -> st.SearchStrategy[dict[Resource, int]]:
    return st.dictionaries(st.sampled_from([RAM, GPU]), st.integers(1, 6), min_size=least, max_size=2)


costs = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 8).map(float))


def enough(chosen: tuple[Candidate, ...], lack: dict[Resource, int]) -> bool:
    return all(sum(one.frees.get(key, 0) for one in chosen) >= amount for key, amount in lack.items())


def total(chosen: tuple[Candidate, ...]) -> tuple[float, ...]:
    return tuple(sum(one.cost[part] for one in chosen) for part in range(3))


@given(st.lists(st.tuples(amounts(0), costs), max_size=7), amounts(1))
def test_chosen_set_is_cheapest_and_minimal(
    given_: list[tuple[dict[Resource, int], tuple[int, int, float]]], lack: dict[Resource, int]
) -> None:
    candidates = [Candidate(f"m{n}", frees, cost) for n, (frees, cost) in enumerate(given_)]
    every = chain.from_iterable(combinations(candidates, size) for size in range(len(candidates) + 1))
    sufficient = [one for one in every if enough(one, lack)]
    chosen = cheapest_set(candidates, lack)
    if chosen is None:
        assert not sufficient
        return
    assert enough(chosen, lack)
    assert total(chosen) == min(total(one) for one in sufficient)
    assert not any(enough(tuple(kept for kept in chosen if kept is not one), lack) for one in chosen)


def test_good_set_is_found_among_a_thousand() -> None:
    seeded = random.Random(6)
    many = [
        Candidate(f"m{n}", {RAM: seeded.randint(1, 100)}, (0, 0, seeded.uniform(1, 100))) for n in range(1000)
    ]
    lack = {RAM: 5000}
    chosen = cheapest_set(many, lack)
    assert chosen is not None
    assert enough(chosen, lack)
    assert not any(enough(tuple(kept for kept in chosen if kept is not one), lack) for one in chosen)
    assert total(chosen)[2] < total(tuple(many))[2] / 10
