"""How far a load is: simulated loads in, percent, remaining time and reason out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.planning.measured.load_times import LoadFacts, LoadTimes
from llamasup.core.supervision.load_progress import LoadEstimate, LoadProgress, Sample, Stage

MIB = 1 << 20
GIB = 1 << 30
FACTS = LoadFacts(weights_bytes=2 * GIB, cpu_bytes=2 * GIB)
EARLIER = LoadTimes(
    "runtime", "plan", 0.5, 4.0, 1.0, 2.0, weights_bytes=2 * GIB, memory_bytes=512 * MIB, warm_up_cpu_s=4.0
)
KNOWN = replace(FACTS, earlier=EARLIER)
STEP_S = 0.25


class Process:
    """A simulated llama-server that is sampled every 0.25 s."""

    def __init__(self, facts: LoadFacts = FACTS) -> None:
        self.sample = Sample(0.0)
        self.estimate = LoadEstimate(facts)
        self.estimates: list[LoadEstimate] = []

    def spend(
        self, time_s: float, *, stage: Stage | None = None, cores: float = 0.0, **bytes_s: float
    ) -> Process:
        """Go on for so long, with these bytes per second."""
        if stage is not None:
            self.sample = replace(self.sample, stage=stage)
            self.look()
        for _ in range(round(time_s / STEP_S)):
            changes = {
                name: getattr(self.sample, name) + round(speed * STEP_S) for name, speed in bytes_s.items()
            }
            self.sample = replace(
                self.sample,
                at_s=self.sample.at_s + STEP_S,
                cpu_s=self.sample.cpu_s + cores * STEP_S,
                **changes,
            )
            self.look()
        return self

    def stage(self) -> Stage:
        return self.estimate.stage

    def look(self) -> None:
        self.estimate = self.estimate.after(self.sample)
        self.estimates.append(self.estimate)

    def times(self) -> LoadTimes:
        return self.estimate.times("runtime", "plan", self.sample.at_s)


# --- before the weights


def test_nothing_is_known_before_the_first_sample() -> None:
    assert LoadEstimate(KNOWN).progress(0.1) == LoadProgress(None, None, 0.1, None)


def test_first_load_of_a_file_has_no_estimate_before_weights_arrive() -> None:
    process = Process().spend(2.0)
    assert (process.estimate.percent, process.estimate.eta_s) == (None, None)
    assert process.stage() is Stage.BEGIN


def test_load_without_facts_has_no_estimate() -> None:
    process = Process(LoadFacts()).spend(1.0, stage=Stage.WEIGHTS, read_bytes=GIB)
    assert (process.estimate.percent, process.estimate.eta_s) == (None, None)


def test_earlier_load_gives_an_estimate_from_the_first_sample_on() -> None:
    process = Process(KNOWN).spend(0.25)
    assert process.estimate.eta_s == 7.2  # of 7.5 s
    assert process.estimate.percent == 3.3


def test_times_of_another_file_size_are_scaled() -> None:
    half = replace(KNOWN, weights_bytes=GIB)
    assert Process(half).spend(0.25).estimate.eta_s == 5.2


def test_earlier_load_without_a_size_is_used_as_it_was() -> None:
    unknown = replace(KNOWN, weights_bytes=0)
    process = Process(unknown).spend(0.25)
    assert process.estimate.eta_s == 7.2
    process.spend(1.0, stage=Stage.WEIGHTS)
    assert process.estimate.eta_s == 6.0  # of the weights, 1 s of 4 s has passed


@pytest.mark.parametrize("counter", ["file_bytes", "read_bytes", "disk_bytes"])
def test_weights_are_recognised_without_a_log(counter: str) -> None:
    bytes_s: dict[str, Any] = {counter: 256 * MIB}
    process = Process().spend(0.5).spend(1.0, **bytes_s)
    assert process.stage() is Stage.WEIGHTS
    assert process.times().begin_s == 0.75  # at the first sample with weights


def test_bytes_before_the_weights_do_not_count() -> None:
    """The embedded runtime reads libraries first."""
    process = Process().spend(1.0, read_bytes=28 * MIB)
    assert process.stage() is Stage.BEGIN
    process.spend(1.0, stage=Stage.WEIGHTS, read_bytes=512 * MIB)
    assert process.estimate.weights.done_bytes == 512 * MIB


# --- the weights


def test_steady_disk_gives_percent_and_remaining_time() -> None:
    process = Process().spend(2.0, stage=Stage.WEIGHTS, read_bytes=512 * MIB)
    rest_s = 2.0 + 0.2 + 2 * GIB / 3e9  # of the weights, and an estimated warm-up
    assert process.estimate.eta_s == pytest.approx(rest_s, abs=0.1)
    assert process.estimate.percent == pytest.approx(100 * 2.0 / (2.0 + rest_s), abs=1.0)
    assert process.estimate.reason is None


def test_burst_of_a_limited_disk_is_no_measure_of_its_speed() -> None:
    process = Process().spend(0.25, stage=Stage.WEIGHTS, read_bytes=1 * GIB)
    process.spend(4.75, read_bytes=128 * MIB)
    done = 256 * MIB + 608 * MIB
    rest_s = (2 * GIB - done) / (128 * MIB) + 0.2 + 2 * GIB / 3e9
    assert process.estimate.eta_s == pytest.approx(rest_s, rel=0.05)


def test_blocks_are_measured_from_edge_to_edge() -> None:
    process = Process().spend(0.0, stage=Stage.WEIGHTS)
    for _ in range(4):
        process.spend(0.25, read_bytes=512 * MIB).spend(0.75)
    assert process.estimate.weights.rate_bytes_s == pytest.approx(128 * MIB, rel=0.3)


def test_slower_disk_is_a_reason() -> None:
    process = Process().spend(2.0, stage=Stage.WEIGHTS, read_bytes=400 * MIB).spend(3.0, read_bytes=40 * MIB)
    assert process.estimate.reason is not None
    assert process.estimate.reason.startswith("the weights are read at ")
    assert " now, " in process.estimate.reason
    assert process.estimate.reason.endswith(" before")


def test_faster_disk_shortens_the_remaining_time_without_a_reason() -> None:
    process = Process().spend(2.0, stage=Stage.WEIGHTS, read_bytes=40 * MIB)
    slow = process.estimate.eta_s
    process.spend(2.0, read_bytes=400 * MIB)
    assert process.estimate.eta_s is not None
    assert slow is not None
    assert process.estimate.eta_s < slow / 4
    assert process.estimate.reason is None


def test_stall_names_its_time() -> None:
    process = Process().spend(2.0, stage=Stage.WEIGHTS, read_bytes=400 * MIB).spend(8.0)
    assert process.estimate.reason is not None
    assert process.estimate.reason.startswith("no weights have been read for ")


def test_disk_slower_than_in_the_last_load_is_a_reason() -> None:
    process = Process(KNOWN).spend(1.0, stage=Stage.WEIGHTS, read_bytes=64 * MIB)
    assert process.estimate.reason == "the weights are read at 64 MiB/s, 512 MiB/s in the last load"


def test_late_weights_are_a_reason() -> None:
    process = Process(KNOWN).spend(8.0, stage=Stage.WEIGHTS)
    assert process.estimate.reason == "no weights have been read for 6 s"


def test_few_bytes_at_the_begin_are_no_measure_of_the_speed() -> None:
    short = replace(KNOWN, earlier=replace(EARLIER, weights_s=0.0))
    process = Process(short).spend(0.25, stage=Stage.WEIGHTS, read_bytes=4 * MIB).spend(1.0)
    assert process.estimate.eta_s == 3.0
    assert process.estimate.reason is None
    process.spend(1.0)
    assert process.estimate.reason == "no weights have been read for 2 s"


def test_reason_ends_when_the_load_catches_up() -> None:
    process = Process(KNOWN).spend(1.0, stage=Stage.WEIGHTS, read_bytes=256 * MIB)
    assert process.estimate.reason is not None
    process.spend(1.75, read_bytes=900 * MIB)
    assert process.stage() is Stage.WEIGHTS
    assert process.estimate.reason is None


def test_late_start_is_a_reason() -> None:
    process = Process(KNOWN).spend(8.0)
    assert process.estimate.reason == "llama-server takes longer to start than in the last load"


def test_weights_are_complete_although_some_bytes_were_not_seen() -> None:
    process = Process().spend(1.5, stage=Stage.WEIGHTS, read_bytes=1.2 * GIB)
    assert process.stage() is Stage.WEIGHTS
    process.spend(0.5)
    assert process.stage() is Stage.MEMORY


# --- the context and the warm-up


def loaded(facts: LoadFacts = KNOWN) -> Process:
    return Process(facts).spend(0.5).spend(4.0, stage=Stage.WEIGHTS, read_bytes=512 * MIB)


def test_memory_of_the_context_is_measured() -> None:
    process = loaded()
    assert process.stage() is Stage.MEMORY
    process.spend(0.5, anonymous_bytes=512 * MIB)
    assert process.estimate.eta_s == pytest.approx(0.5 + 2.0, abs=0.1)
    process.spend(0.5, anonymous_bytes=512 * MIB)
    assert process.stage() is Stage.WARM_UP


def test_first_load_expects_the_planned_memory() -> None:
    facts = replace(FACTS, memory_bytes=5 * GIB // 2)
    process = loaded(facts)
    assert process.estimate.eta_s == pytest.approx(2.5 * GIB / 2.5e9 + 0.2 + 2 * GIB / 3e9, abs=0.2)
    process.spend(1.0, anonymous_bytes=GIB)
    assert process.estimate.eta_s == pytest.approx(1.5 + 0.2 + 2 * GIB / 3e9, abs=0.1)


def test_slow_memory_is_a_reason() -> None:
    process = loaded().spend(1.0, anonymous_bytes=48 * MIB)
    assert process.estimate.reason == (
        "the memory of the context is filled at 48 MiB/s, 512 MiB/s in the last load"
    )


@pytest.mark.parametrize(
    ("facts", "than"), [(KNOWN, "in the last load"), (replace(FACTS, memory_bytes=64 * MIB), "expected")]
)
def test_slow_memory_without_a_measure_is_a_reason(facts: LoadFacts, than: str) -> None:
    process = loaded(facts).spend(6.0)
    assert process.estimate.reason is not None
    assert process.estimate.reason.startswith(
        f"the memory of the context is filled more slowly than {than} ("
    )


def test_loads_of_another_file_tell_what_is_expected_and_not_what_the_last_load_took() -> None:
    facts = replace(KNOWN, of_this_file=False)
    process = Process(facts).spend(0.25)
    assert process.estimate.eta_s == 0.2 + 4.0 + 1.0 + 2.0  # known before weights arrive
    assert loaded(facts).estimate.eta_s == loaded().estimate.eta_s
    process = loaded(facts).spend(1.0, anonymous_bytes=48 * MIB)
    assert process.estimate.reason is not None
    assert process.estimate.reason.startswith("the memory of the context is filled more slowly than expected")
    slow_start = Process(facts).spend(6.0)
    assert slow_start.estimate.reason == "llama-server takes longer to start than expected"


ON_DEVICE = LoadFacts(weights_bytes=12 * GIB, device_bytes=12 * GIB)


def test_mapped_weights_are_then_copied_to_a_device() -> None:
    """Of a 30 GB model, a H100 had the pages after 1.9 s and the weights after 6.4 s (scripts/gpu)."""
    process = Process(ON_DEVICE).spend(1.0, stage=Stage.WEIGHTS, file_bytes=12 * GIB)
    assert process.stage() is Stage.MEMORY
    assert process.estimate.eta_s == 2.3  # 12 GiB at 6 GB/s, and a warm-up
    process.spend(1.0)
    assert process.estimate.eta_s == 1.3


def test_weights_that_are_read_are_copied_to_a_device_meanwhile() -> None:
    process = Process(ON_DEVICE).spend(1.0, stage=Stage.WEIGHTS, read_bytes=12 * GIB)
    assert process.estimate.eta_s == 0.2


def test_a_little_memory_on_the_host_is_no_measure_of_a_copy_to_a_device() -> None:
    earlier = replace(EARLIER, weights_bytes=12 * GIB, memory_s=4.0, memory_bytes=GIB)
    process = Process(replace(ON_DEVICE, earlier=earlier)).spend(
        1.0, stage=Stage.WEIGHTS, file_bytes=12 * GIB
    )
    process.spend(2.0, anonymous_bytes=MIB)
    assert process.estimate.eta_s == 4.0  # 2 s of 4 s, and the warm-up
    process.spend(12.0)
    assert process.estimate.reason == "the weights are copied to the device more slowly than in the last load"


def test_warm_up_is_measured_by_cpu_time() -> None:
    process = loaded().spend(1.0, stage=Stage.WARM_UP, cores=1.0)
    assert process.estimate.eta_s == 3.0  # of 4 s of CPU time
    assert process.estimate.reason == "the warm-up takes longer than in the last load (2.0 s)"


def test_warm_up_of_a_first_load_is_measured_by_the_weights_of_the_cpu() -> None:
    process = loaded(FACTS).spend(0.5, stage=Stage.WARM_UP, cores=2.0)
    assert process.estimate.eta_s == pytest.approx(2 * GIB / 1.1e9 / 2 - 0.5, abs=0.1)


@pytest.mark.parametrize("cores", [0.0, 1.0])
def test_warm_up_on_a_gpu_is_measured_by_time(cores: float) -> None:
    on_gpu = replace(KNOWN, cpu_bytes=0)
    process = loaded(on_gpu).spend(1.0, stage=Stage.WARM_UP, cores=cores)
    assert process.estimate.eta_s == 1.0


def test_long_warm_up_is_a_reason() -> None:
    process = loaded(FACTS).spend(12.0, stage=Stage.WARM_UP)
    assert process.estimate.reason == "the warm-up takes longer than expected (0.9 s)"


def test_load_is_never_announced_as_complete() -> None:
    process = Process().spend(60.0, stage=Stage.WEIGHTS, read_bytes=34 * MIB)
    process.spend(0.25, stage=Stage.WARM_UP)
    assert process.estimate.percent is not None
    assert 95 <= process.estimate.percent <= 99
    assert process.estimate.eta_s


# --- its end


def test_times_of_a_load_are_those_of_its_stages() -> None:
    process = loaded().spend(1.0, anonymous_bytes=512 * MIB).spend(2.0, stage=Stage.WARM_UP, cores=2.0)
    assert process.times() == replace(EARLIER, cpu_bytes=2 * GIB)


def test_load_that_ends_early_has_no_time_in_the_later_stages() -> None:
    times = Process().spend(1.0, stage=Stage.WEIGHTS, read_bytes=GIB).times()
    assert (times.begin_s, times.weights_s, times.memory_s, times.warm_up_s) == (0.0, 1.0, 0.0, 0.0)


def test_json_of_the_progress() -> None:
    progress = LoadProgress(43.2, 12.5, 8.00049, "the disk is slow")
    assert progress.as_json() == {
        "percent": 43.2,
        "eta_s": 12.5,
        "elapsed_s": 8.0,
        "reason": "the disk is slow",
    }


# --- any load

STRETCH: dict[str, Any] = {
    "time_s": st.floats(0.0, 3.0),
    "cores": st.floats(0.0, 2.0),
    "file_bytes": st.integers(0, GIB),
    "read_bytes": st.integers(0, GIB),
    "disk_bytes": st.integers(0, GIB),
    "anonymous_bytes": st.integers(-GIB // 4, GIB),
}
TIMES = st.floats(0.0, 20.0)


@st.composite
def facts(draw: st.DrawFn) -> LoadFacts:
    times = st.builds(
        LoadTimes,
        runtime=st.just("runtime"),
        key=st.just("plan"),
        begin_s=TIMES,
        weights_s=TIMES,
        memory_s=TIMES,
        warm_up_s=TIMES,
        weights_bytes=st.integers(0, 4 * GIB),
        memory_bytes=st.integers(0, GIB),
        warm_up_cpu_s=TIMES,
    )
    size = draw(st.integers(0, 4 * GIB))
    part = st.integers(0, size)
    return LoadFacts(size, draw(part), draw(part), draw(st.integers(0, GIB)), draw(st.none() | times))


def any_loads() -> st.SearchStrategy[tuple[LoadFacts, list[tuple[Stage, dict[str, Any]]]]]:
    stretches = st.lists(st.tuples(st.sampled_from(Stage), st.fixed_dictionaries(STRETCH)), max_size=5)
    return st.tuples(facts(), stretches)


def estimates(load: tuple[LoadFacts, list[tuple[Stage, dict[str, Any]]]]) -> Iterator[LoadEstimate]:
    facts, stretches = load
    process = Process(facts)
    for stage, stretch in stretches:
        process.spend(**stretch, stage=max(stage, process.sample.stage))
    yield from process.estimates


@given(any_loads())
def test_remaining_time_grows_only_with_a_reason_and_the_percent_never_falls(load: Any) -> None:
    for before, after in pairwise(estimates(load)):
        assert before.stage <= after.stage
        assert all(begin <= end for begin, end in pairwise(after.marks))
        if before.eta_s is not None and before.percent is not None:
            assert after.eta_s is not None
            assert after.percent is not None
            assert after.eta_s <= before.eta_s or after.reason
            assert before.percent <= after.percent <= 99.0
