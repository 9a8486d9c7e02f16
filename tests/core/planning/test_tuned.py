"""The kept results of tuning: when they apply, and what they do to a plan."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.http.address import TcpAddress
from llamasup.core.planning.measured.tuned import (
    NO_CHANGES,
    Changes,
    Conditions,
    Kept,
    KeptResults,
    Measured,
    add_result,
    asked_key,
    defaults_key,
    files_key,
    is_plausible,
    machine_key,
    remove_result,
    result_for,
    why_not,
)
from llamasup.core.planning.plan_report import plan_as_json
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.devices import Device
from tests.core.planning.plans import GIB, GPU, machine, planned, reason, value

CHANGES = Changes((("--threads", "3"), ("--no-repack", None)), (("GOMP_SPINCOUNT", "300"),))
MEASURED_ON = Conditions("build", "machine", "asked", "files", "defaults")
KEPT = Kept(MEASURED_ON, "latency", None, CHANGES, 1.18, 1.11, 1.24, "2026-11-26", 50, 3.0)
WHY = "measured here on 2026-11-26: 1.18 ×, 95 % 1.11 to 1.24"


PARTS = ("runtime", "machine", "asked", "files", "defaults")


def found(*results: Kept, **changes: str) -> Kept | None:
    return result_for(KeptResults(results), replace(KEPT.conditions, **changes))


# --- when it applies -----------------------------------------------------------------------------


def test_a_result_applies_only_under_its_conditions() -> None:
    assert found(KEPT) is KEPT
    assert why_not(KEPT, KEPT.conditions) == ""
    reasons = set()
    for name in PARTS:
        assert found(KEPT, **{name: "other"}) is None
        reasons.add(why_not(KEPT, replace(KEPT.conditions, **{name: "other"})))
    assert len(reasons - {""}) == len(PARTS)
    assert why_not(replace(KEPT, lower=0.5), KEPT.conditions) == "it is damaged"
    assert why_not(replace(KEPT, changes=NO_CHANGES, lower=1.0), KEPT.conditions) == ""


def test_a_result_of_another_build_or_machine_stays() -> None:
    for name in PARTS:
        other = replace(KEPT, conditions=replace(KEPT.conditions, **{name: "other"}), changes=NO_CHANGES)
        results = add_result(KeptResults((KEPT,)), other)
        assert result_for(results, KEPT.conditions) is KEPT
        assert remove_result(results, other).results == (KEPT,)


def test_the_newest_result_counts() -> None:
    newer = replace(KEPT, gain=1.2)
    assert found(KEPT, newer) is newer
    assert add_result(KeptResults((KEPT,)), newer).results == (newer,)


def test_that_nothing_was_better_changes_nothing() -> None:
    assert found(replace(KEPT, changes=NO_CHANGES)) is None


def test_results_of_other_settings_are_kept_up_to_a_limit() -> None:
    kept = KeptResults()
    for number in range(20):
        kept = add_result(kept, replace(KEPT, conditions=replace(KEPT.conditions, asked=str(number))))
    assert len(kept.results) == 16
    assert kept.results[-1].conditions.asked == "19"


@pytest.mark.parametrize(
    "changes",
    [
        {"lower": 1.0},
        {"lower": 2.0},
        {"upper": float("inf")},
        {"gain": float("nan")},
        {"date": "yesterday"},
        {"changes": Changes((("; rm", None),))},
        {"changes": Changes((("model.gguf", None),))},
        {"changes": Changes(env=(("LD_PRELOAD", "x"),))},
    ],
)
def test_a_damaged_result_is_ignored(changes: dict[str, Any]) -> None:
    assert is_plausible(KEPT)
    assert found(replace(KEPT, **changes)) is None


def test_settings_that_decide_the_computing_are_part_of_the_key() -> None:
    base = asked_key(Settings(), {})
    assert asked_key(Settings(ctx_size=4096, alias="name"), {"HOME": "/root"}) == base
    assert asked_key(Settings(threads=2), {}) != base
    assert asked_key(Settings(extra=("--no-mmap",)), {}) != base
    assert asked_key(Settings(profile="latency"), {}) != base
    assert asked_key(Settings(nice=19), {}) != base
    assert asked_key(Settings(), {"OMP_NUM_THREADS": "2"}) != base


def test_the_default_plan_is_known_by_its_flags_that_decide_speed() -> None:
    def key(**changes: Any) -> str:
        made = planned(**changes)
        return defaults_key(made.argv, made.env)

    assert key(address=TcpAddress("127.0.0.1", 9)) == key()
    assert key(hardware=machine(memory_available_bytes=20 * GIB)) == key()
    assert key(threads=2) != key()
    assert key(profile="throughput") != key()
    assert defaults_key((), {"GOMP_SPINCOUNT": "3"}) != defaults_key((), {})
    assert defaults_key(("--no-repack",), {}) != defaults_key((), {})


def test_files_are_known_by_their_states() -> None:
    assert files_key([("a", 1)]) == files_key(iter([("a", 1)])) != files_key([("a", 2)])


def test_the_reason_says_whether_answers_can_differ() -> None:
    assert KEPT.measured.why == WHY
    assert replace(KEPT, lossy=True).measured.why == (
        f"{WHY}; its answers may differ slightly from those of the default"
    )
    assert "--allow-lossy" in replace(KEPT, lossy=True, unchecked=True).measured.why


def test_the_machine_is_known_by_its_processors_and_devices() -> None:
    base = machine_key(machine(), (GPU,), cpu="a CPU")
    assert machine_key(machine(memory_available_bytes=5), (replace(GPU, free_bytes=1),), cpu="a CPU") == base
    for other in (
        machine_key(machine(cpu_quota=2.0), (GPU,), cpu="a CPU"),
        machine_key(machine(cpu_sharers=2), (GPU,), cpu="a CPU"),
        machine_key(machine(), (), cpu="a CPU"),
        machine_key(machine(), (Device("CUDA0", "another GPU", 1, 1),), cpu="a CPU"),
        machine_key(machine(), (GPU,), cpu="another CPU"),
    ):
        assert other != base


# --- what it does to a plan ----------------------------------------------------------------------


def test_a_plan_with_a_result_passes_its_flags_with_the_measurement_as_reason() -> None:
    made = planned(measured=KEPT.measured)
    assert value(made, "--threads") == "3"
    assert made.argv.count("--threads") == 1
    assert reason(made, "--threads") == WHY
    assert "--no-repack" in made.argv
    assert made.env["GOMP_SPINCOUNT"] == "300"
    assert made.env_reasons["GOMP_SPINCOUNT"] == WHY
    assert [each.flag for each in made.reasons].count("--threads") == 1


def test_the_plan_calculates_with_the_measured_values() -> None:
    slots = Measured(Changes((("--parallel", "2"),)), WHY)
    assert planned(measured=slots).parallel == 2
    assert planned(measured=slots).ctx_size_of_slot == planned().ctx_size_of_slot
    packed = Measured(Changes((("--cache-type-k", "q8_0"), ("--cache-type-v", "q8_0"))), WHY)
    assert planned(measured=packed).memory.kv_bytes < planned().memory.kv_bytes


def test_a_measured_waiting_policy_replaces_the_number_of_rounds() -> None:
    made = planned(measured=Measured(Changes(env=(("OMP_WAIT_POLICY", "passive"),)), WHY))
    assert made.env["OMP_WAIT_POLICY"] == "passive"
    assert "GOMP_SPINCOUNT" not in made.env


def test_the_users_own_flags_come_after_the_measured_ones() -> None:
    made = planned(measured=KEPT.measured, extra=("--poll", "0"))
    assert made.argv[-2:] == ("--poll", "0")


def test_a_left_out_flag_that_is_measured_has_one_reason() -> None:
    made = planned(measured=Measured(Changes((("--prio", "2"),)), WHY))
    assert [each.reason for each in made.reasons if each.flag == "--prio"] == [WHY]


def test_the_json_of_a_plan_has_the_result() -> None:
    def measured_in(**options: Any) -> Any:
        shown = plan_as_json(
            planned(**options),
            model="m",
            path="p",
            kind="binary",
            version="v",
            profile=None,
            alternatives=(),
            refused=None,
        )
        return shown["measured"]

    assert measured_in() is None
    assert measured_in(measured=KEPT.measured) == {
        "taken": {"--threads": "3", "--no-repack": None, "GOMP_SPINCOUNT": "300"},
        "reason": WHY,
    }


def test_changes_are_written_as_on_a_command_line() -> None:
    assert str(CHANGES) == "GOMP_SPINCOUNT=300 --threads 3 --no-repack"
    assert str(NO_CHANGES) == ""
