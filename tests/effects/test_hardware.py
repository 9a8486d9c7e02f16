"""Reading this very machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from llamasup.core.hardware import read_hardware
from llamasup.effects import hardware as effect

MACHINES = Path(__file__).parents[1] / "fixtures" / "hardware"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_this_machine_is_read_as_psutil_sees_it() -> None:
    machine = effect.hardware()
    assert machine.cpus_allowed == len(psutil.Process().cpu_affinity())
    assert 1 <= machine.physical_cores <= machine.cpus_allowed
    assert 0 < machine.memory_available_bytes <= machine.memory_total_bytes
    assert machine.memory_total_bytes <= psutil.virtual_memory().total


@linux_only
def test_the_affinity_mask_is_that_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        machine = effect.hardware()
    finally:
        os.sched_setaffinity(0, before)
    assert (machine.cpus_allowed, machine.physical_cores) == (1, 1)


@linux_only
def test_the_control_groups_that_the_process_names_are_the_files_that_are_read() -> None:
    machine = read_hardware(effect.collect(MACHINES / "container"))
    assert machine.cpu_quota == 1.5
    assert machine.memory_total_bytes == 4 << 30


def test_a_machine_without_proc_is_read_by_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    machine = effect.hardware()
    assert machine.platform == "darwin"
    assert machine.cpus_allowed == psutil.cpu_count()
    assert machine.memory_total_bytes == psutil.virtual_memory().total
    assert machine.memlock_limit_bytes == 0
    assert not machine.may_raise_priority
