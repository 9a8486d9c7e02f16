"""The times of earlier loads, of which the next one is expected."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.planning.measured.load_times import (
    LoadFacts,
    LoadTimes,
    add_times,
    is_possible,
    times_for,
    times_of_others,
)

TIMES = LoadTimes("runtime", "plan", 0.5, 4.0, 1.0, 2.0, weights_bytes=1000, memory_bytes=100)


def slower(factor: float, **changes: Any) -> LoadTimes:
    stages = {
        name: getattr(TIMES, name) * factor for name in ("begin_s", "weights_s", "memory_s", "warm_up_s")
    }
    return replace(TIMES, **{**stages, **changes})


def test_total_is_the_sum_of_the_stages() -> None:
    assert TIMES.total_s == 7.5


def test_first_load_has_no_expected_times() -> None:
    assert times_for((), "runtime", "plan") is None
    assert times_for((TIMES,), "another runtime", "plan") is None


def test_weights_take_as_long_as_last_time_and_the_warm_up_as_the_fastest() -> None:
    records = (replace(TIMES, warm_up_cpu_s=3.0), slower(2.0), slower(10.0))
    assert times_for(records, "runtime", "plan") == slower(
        2.0, weights_s=40.0, warm_up_s=2.0, warm_up_cpu_s=3.0
    )


def test_another_plan_has_another_context() -> None:
    assert times_for((TIMES,), "runtime", "other plan") == replace(TIMES, key="other plan", memory_bytes=0)


def test_same_plan_counts_more_than_a_later_one() -> None:
    assert times_for((TIMES, slower(2.0, key="other plan")), "runtime", "plan") == TIMES


def test_last_five_loads_of_a_plan_are_kept() -> None:
    other = replace(TIMES, key="other plan")
    records: tuple[LoadTimes, ...] = (other,)
    for factor in range(1, 8):
        records = add_times(records, slower(factor))
    assert records == (other, *(slower(factor) for factor in range(3, 8)))


def test_number_of_records_has_a_limit() -> None:
    records: tuple[LoadTimes, ...] = ()
    for number in range(40):
        records = add_times(records, replace(TIMES, key=str(number)))
    assert [record.key for record in records] == [str(number) for number in range(20, 40)]


@pytest.mark.parametrize(
    "changes",
    [
        {"begin_s": -1.0},
        {"weights_s": math.nan},
        {"memory_s": math.inf},
        {"warm_up_s": 1e9},
        {"warm_up_cpu_s": -1.0},
        {"weights_bytes": -1},
        {"memory_bytes": -1},
    ],
)
def test_damaged_record_is_not_possible(changes: dict[str, Any]) -> None:
    assert is_possible(TIMES)
    assert not is_possible(replace(TIMES, **changes))


# --- other files

OTHER = replace(TIMES, weights_bytes=1000, memory_bytes=100, warm_up_cpu_s=4.0, cpu_bytes=1000)
FACTS = LoadFacts(weights_bytes=3000, cpu_bytes=3000, memory_bytes=500)


def test_other_file_takes_as_long_for_each_byte() -> None:
    expected = times_of_others((OTHER,), "runtime", FACTS)
    assert expected == LoadTimes(
        "runtime",
        "",
        begin_s=0.5,
        weights_s=12.0,
        memory_s=5.0,
        warm_up_s=6.0,
        weights_bytes=3000,
        warm_up_cpu_s=12.0,
        cpu_bytes=3000,
    )


def test_of_several_files_the_median_counts_and_of_the_weights_the_slowest() -> None:
    records = [replace(OTHER, weights_s=s, warm_up_s=s, begin_s=s) for s in (1.0, 9.0, 2.0)]
    expected = times_of_others(records, "runtime", FACTS)
    assert expected is not None
    assert (expected.begin_s, expected.weights_s, expected.warm_up_s) == (2.0, 27.0, 6.0)


@pytest.mark.parametrize(
    ("facts", "runtime"),
    [
        (FACTS, "another runtime"),
        (replace(FACTS, weights_bytes=9000, cpu_bytes=9000), "runtime"),
        (replace(FACTS, weights_bytes=100, cpu_bytes=100), "runtime"),
        (replace(FACTS, cpu_bytes=0), "runtime"),  # on a device
        (LoadFacts(), "runtime"),
    ],
    ids=["runtime", "larger", "smaller", "device", "unknown"],
)
def test_file_of_another_kind_says_nothing(facts: LoadFacts, runtime: str) -> None:
    unknown = replace(OTHER, weights_bytes=0)
    assert times_of_others((OTHER, unknown), runtime, facts) is None


def test_memory_that_took_no_time_or_has_copies_of_the_weights_is_scaled() -> None:
    quick = times_of_others((replace(OTHER, memory_s=0.001),), "runtime", FACTS)
    assert quick is not None
    assert quick.memory_s == pytest.approx(0.003)
    copied = times_of_others((replace(OTHER, cpu_bytes=0),), "runtime", replace(FACTS, cpu_bytes=0))
    assert copied is not None
    assert copied.memory_s == 3.0
