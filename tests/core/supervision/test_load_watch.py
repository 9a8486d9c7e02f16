"""The samples of a load: when they are taken, and what ends them."""

from __future__ import annotations

from llamasup.core.planning.measured.load_times import LoadFacts
from llamasup.core.supervision.generation import LoadWatch
from llamasup.core.system.hardware.probe import LoadUsage

GIB = 1 << 30


class Machine:
    """A clock and a process that reads 256 MiB each second."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.ended = False
        self.looks = 0
        self.watch = LoadWatch(LoadFacts(GIB, GIB), 7, lambda: self.now_s, self.usage)

    def usage(self, pid: int) -> LoadUsage | None:
        assert pid == 7
        self.looks += 1
        return None if self.ended else LoadUsage(0, 0, round((self.now_s - 100.0) * GIB / 4), 0)

    def passes(self, time_s: float) -> None:
        self.now_s += time_s
        self.watch.sample()


def test_nothing_is_read_between_samples() -> None:
    machine = Machine()
    machine.passes(1.0)
    machine.passes(1.0)
    machine.now_s += 0.5
    assert machine.watch.progress.elapsed_s == 2.5
    assert machine.watch.progress.percent is not None
    assert 30 < machine.watch.progress.percent < 50
    assert machine.looks == 2
    assert repr(machine.watch).startswith("<LoadWatch of process 7: LoadProgress(")


def test_line_of_the_log_begins_a_stage_once() -> None:
    machine = Machine()
    machine.watch.stage_began("weights")
    machine.watch.stage_began("weights")
    assert machine.looks == 1
    machine.passes(4.0)
    machine.watch.stage_began("warm_up")
    machine.watch.stage_began("weights")
    machine.now_s += 1.0
    machine.watch.end()
    times = machine.watch.times
    assert times is not None
    assert (times.weights_s, times.memory_s, times.warm_up_s) == (4.0, 0.0, 1.0)


def test_times_of_a_load_do_not_change_after_its_end() -> None:
    machine = Machine()
    assert machine.watch.times is None
    machine.passes(5.0)
    machine.watch.end()
    times = machine.watch.times
    machine.passes(5.0)
    machine.watch.stage_began("warm_up")
    machine.watch.end()
    assert machine.watch.times is times


def test_ended_process_keeps_its_last_progress() -> None:
    machine = Machine()
    machine.passes(1.0)
    percent = machine.watch.progress.percent
    machine.ended = True
    machine.now_s += 1.0
    assert machine.watch.sample() is None
    assert machine.watch.progress.percent == percent
