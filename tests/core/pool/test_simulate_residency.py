"""The policy compared with others for a few requests."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from scripts.simulate.residency import WORKLOADS, played, turns_table

NAME = "**llamasup**"


def test_hindsight_is_the_bound_for_models_of_one_size() -> None:
    """Two independent computations agree: Belady's rule, and the dual of the linear program."""
    equal = WORKLOADS[-1]
    results = played(equal, equal.calls(1, 200))
    hits, load_s = results["bound: no policy does better"]
    assert results["hindsight: farthest in future"] == pytest.approx((hits, load_s), rel=0.01)
    for name, (hit_rate, seconds) in results.items():
        assert hit_rate <= hits * 1.0001, name
        assert seconds >= load_s * 0.9999, name


def test_frequent_models_are_loaded_less_often_than_by_lru() -> None:
    single = WORKLOADS[2]
    results = played(single, single.calls(0, 200))
    assert results[NAME][1] < 0.95 * results["least recently used (LRU)"][1]


def test_every_policy_loads_once_if_all_models_fit() -> None:
    roomy = replace(WORKLOADS[0], budget_gb=200.0)
    calls = roomy.calls(0, 100)
    once_s = sum(model.load_s for model in roomy.models() if model.id in {call.model for call in calls})
    for name, (_, load_s) in played(roomy, calls).items():
        assert load_s == pytest.approx(once_s), name


def test_idle_grace_helps_programs_without_pauses() -> None:
    row = re.compile(r"^\| (?P<name>\S+ \S+).*? \| (?P<per_s>[0-9.]+) \|", re.MULTILINE)
    few = turns_table(seeds=1, requests=20).split("\n\n")[0]
    per_s = {found["name"]: float(found["per_s"]) for found in row.finditer(few)}
    assert per_s["**llamasup** (`time_slice_s`"] > 1.2 * per_s["no idle"]
