"""The plans of one model over several starts: refused, reduced, recorded and measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.http.address import UnixAddress
from llamasup.core.llama_server.diagnosis import Diagnosis, diagnose
from llamasup.core.llama_server.rpc.in_use import USED
from llamasup.core.planning import planner as module
from llamasup.core.planning.facts import prepare
from llamasup.core.planning.measured.load_times import LoadTimes
from llamasup.core.planning.measured.stores import load_history
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.planner import Planner
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import Exit
from llamasup.errors import ConfigInvalid, DoesNotFit, UsageInvalid, WorkerMissing
from tests.core.planning.plans import GIB, machine, reason, value
from tests.kit.paths import FIXTURES

HELP = FIXTURES / "help"
MIB = 1 << 20
TRAINED_FOR_LONG = ("--override-kv", "llama.context_length=int:400000")
HOST_FULL = diagnose(Exit(1, None), ["std::bad_alloc"], phase="starting")
SEGFAULT = diagnose(Exit(None, "SIGSEGV"), [], phase="starting")
NO_MODEL = diagnose(Exit(1, None), ["unknown model architecture: 'x'"], phase="starting")


class Machine:
    """A runtime that only answers queries, one model, and a machine with the memory of the test."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        self.model = model
        self.machine: Hardware = machine()
        self._program = folder / "llama-server"
        self._devices = folder / "devices.txt"
        self.devices()
        self.build("b11434")
        monkeypatch.setattr(module, "hardware", lambda: self.machine)

    def build(self, name: str, version: str = "1 (a)") -> None:
        self._program.write_text(
            f"#!/bin/sh\ncase $1 in --help) /bin/cat '{HELP / name}.txt' ;;\n"
            f"--version) echo 'version: {version}' >&2 ;;\n"
            f"--list-devices) /bin/cat '{self._devices}' ;; esac\n"
        )
        self._program.chmod(0o755)

    def devices(self, *lines: str) -> None:
        self._devices.write_text("\n".join(["Available devices:", *(f"  {line}" for line in lines), ""]))

    def free(self, size_bytes: int) -> None:
        self.machine = machine(memory_available_bytes=size_bytes)

    def planner(self, **settings: Any) -> Planner:
        launch = prepare(str(self.model), Settings(**settings), runtime=str(self._program), environ={})
        return Planner(launch, self.folder)

    def remove_program(self) -> None:
        self._program.unlink()


@pytest.fixture
def host(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, tiny_model, monkeypatch)


def sizes_log(made: LaunchPlan, *, times: float = 1.0) -> list[str]:
    """llama-server's log at -lv 4 of a load with a multiple of the planned sizes."""
    memory = made.memory
    return [
        f"load_tensors: CPU_Mapped model buffer size = {memory.weights_bytes / MIB:.2f} MiB",
        f"llama_kv_cache: CPU KV buffer size = {times * memory.kv_bytes / MIB:.2f} MiB",
        f"sched_reserve: CPU compute buffer size = {times * memory.compute_bytes / MIB:.2f} MiB",
    ]


def needed_bytes(made: LaunchPlan) -> int:
    return made.memory.total_bytes - made.memory.prompt_cache_bytes


# --- admission -----------------------------------------------------------------------------------


def test_plan_that_does_not_fit_is_refused_before_any_start_or_write(host: Machine) -> None:
    host.free(MIB)
    for ask in (Planner.check, lambda planner: planner.plan(1)):
        with pytest.raises(DoesNotFit) as refused:
            ask(host.planner(parallel=4, ctx_size=8192))
        assert refused.value.exit_code == 71
        assert refused.value.details
        assert "The smallest plan does not fit either: 1 × 256 tokens" in refused.value.remedy
    assert list(host.folder.iterdir()) == []


def test_settings_named_by_the_refusal_are_accepted(host: Machine) -> None:
    asked = {"parallel": 1, "kv_type": "f16", "extra": TRAINED_FOR_LONG}
    half = host.planner(ctx_size=200_000, **asked).plan(1)
    host.free(needed_bytes(half))
    with pytest.raises(DoesNotFit, match=r"1 × 400000 tokens of context") as refused:
        host.planner(ctx_size=400_000, **asked).check()
    assert refused.value.remedy.startswith("Fits: --ctx-size 200000. ")
    host.planner(ctx_size=200_000, **asked).check()


def test_default_cache_is_packed_before_a_users_context_is_refused(host: Machine) -> None:
    asked = {"parallel": 1, "ctx_size": 400_000, "extra": TRAINED_FOR_LONG}
    packed = host.planner(kv_type="q8_0", **asked).plan(1)
    host.free(needed_bytes(packed))
    made = host.planner(**asked).plan(1)
    assert (made.ctx_size_of_slot, made.kv_type) == (400_000, "q8_0")


def test_settings_that_the_user_did_not_set_are_reduced_to_fit(host: Machine) -> None:
    preferred = host.planner().plan(1)
    host.free(needed_bytes(preferred) - 1)
    planner = host.planner()
    made = planner.plan(1)
    assert made.memory.fits
    assert made.parallel < preferred.parallel
    shown = planner.as_json(planner.admission())
    assert [each["fits"] for each in shown["alternatives"]] == [False, True]
    assert shown["alternatives"][1]["parallel"] == made.parallel
    json.dumps(shown)


@pytest.mark.parametrize("settings", [{"check_memory": False}, {"profile": "plain"}])
def test_without_the_check_and_in_the_profile_plain_nothing_is_refused(host: Machine, settings: Any) -> None:
    host.free(MIB)
    planner = host.planner(parallel=4, ctx_size=8192, **settings)
    planner.check()
    made = planner.plan(1)
    assert not made.memory.fits
    assert (made.parallel, made.ctx_size_of_slot) == (4, 8192)


def test_each_generation_has_its_own_address_and_a_check_has_none(host: Machine) -> None:
    planner = host.planner()
    assert [planner.plan(number).address for number in (1, 2)] == [
        UnixAddress(str(host.folder / f"{number}.sock")) for number in (1, 2)
    ]
    host.build("0.2.90")  # on TCP, with its key in a file
    old = host.planner()
    old.check()
    assert list(host.folder.iterdir()) == []
    made = old.plan(1)
    assert made.api_key == (host.folder / "1.key").read_text()
    assert old.plan(2).api_key != made.api_key
    assert (host.folder / "1.key").stat().st_mode & 0o077 == 0


# --- the ladder ----------------------------------------------------------------------------------


def test_the_plan_after_a_step_is_the_one_that_was_announced(host: Machine) -> None:
    planner = host.planner()
    first = planner.plan(1)
    adjustment = planner.step_down(first, HOST_FULL)
    assert adjustment is not None
    second = planner.plan(2)
    changed = {change.setting: change.after for change in adjustment.changes}
    assert changed == {"--parallel": str(second.parallel)}
    assert second.parallel < first.parallel


def test_failed_start_reported_twice_is_one_step(host: Machine) -> None:
    planner = host.planner()
    first = planner.plan(1)
    step = planner.step_down(first, HOST_FULL)
    assert planner.step_down(first, HOST_FULL) == step
    second = planner.plan(2)
    further = planner.step_down(second, HOST_FULL)
    assert step is not None
    assert further is not None
    assert (step.step, further.step) == (1, 2)


def test_failure_that_no_smaller_plan_solves_changes_nothing(host: Machine) -> None:
    planner = host.planner()
    first = planner.plan(1)
    assert planner.step_down(first, NO_MODEL) is None
    assert planner.plan(2).ctx_size == first.ctx_size


def test_after_three_steps_it_is_over(host: Machine) -> None:
    planner = host.planner()
    taken = 0
    while planner.step_down(planner.plan(taken + 1), SEGFAULT if taken == 0 else HOST_FULL) is not None:
        taken += 1
    assert taken == 3


# --- recorded failures ---------------------------------------------------------------------------


def fail_then_serve(planner: Planner, diagnosis: Diagnosis = HOST_FULL) -> LaunchPlan:
    """The first start fails, the second one serves."""
    planner.step_down(planner.plan(1), diagnosis)
    made = planner.plan(2)
    planner.served(made, [], resident_bytes=0, generated=True)
    return made


def test_later_starts_begin_with_the_step_that_served(host: Machine) -> None:
    planner = host.planner()
    serving = fail_then_serve(planner)
    assert planner.plan(3).parallel == serving.parallel
    later = host.planner().plan(1)
    assert later.parallel == serving.parallel
    assert any("ran out of memory on 20" in each.reason for each in later.reasons)


@pytest.mark.parametrize("profile", ["latency", "plain"])
def test_next_load_is_expected_to_take_as_long_as_the_last_one(host: Machine, profile: str) -> None:
    planner = host.planner(profile=profile)
    made = planner.plan(1)
    facts = planner.load_facts(made)
    assert facts.weights_bytes == facts.cpu_bytes == made.memory.weights_bytes > 0
    assert facts.memory_bytes == made.memory.kv_bytes > 0
    assert facts.earlier is None
    times = LoadTimes("", "", 0.5, 4.0, 1.0, 2.0, made.memory.weights_bytes, 100)
    planner.served(made, [], resident_bytes=0, generated=True, times=times)
    earlier = host.planner(profile=profile).load_facts(made).earlier
    assert earlier is not None
    assert earlier == replace(times, runtime=earlier.runtime, key=made.key)


def test_first_load_of_a_file_is_expected_to_take_as_long_as_those_of_others(host: Machine) -> None:
    planner = host.planner()
    made = planner.plan(1)
    size = made.memory.weights_bytes
    times = LoadTimes("", "", 0.5, 4.0, 1.0, 2.0, size, 100, cpu_bytes=size)
    planner.served(made, [], resident_bytes=0, generated=True, times=times)
    os.utime(host.model, (0, 0))  # now it is another file
    facts = host.planner().load_facts(made)
    assert not facts.of_this_file
    assert facts.earlier is not None
    assert (facts.earlier.begin_s, facts.earlier.weights_s, facts.earlier.warm_up_s) == (0.5, 4.0, 2.0)


def test_step_that_did_not_serve_is_not_recorded(host: Machine) -> None:
    planner = host.planner()
    whole = planner.plan(1)
    planner.step_down(whole, HOST_FULL)
    assert planner.plan(2).parallel < whole.parallel
    assert host.planner().plan(1).parallel == whole.parallel
    assert load_history(host.model).failed_plans == ()


def test_a_later_start_of_the_same_run_has_three_steps_of_its_own(host: Machine) -> None:
    planner = host.planner()
    fail_then_serve(planner)
    step = planner.step_down(planner.plan(3), HOST_FULL)
    assert step is not None
    assert step.step == 1


def test_full_plan_is_tried_again_in_the_same_run_with_more_memory(
    host: Machine,
) -> None:
    whole = host.planner().plan(1)
    host.free(10 * GIB)
    planner = host.planner()
    serving = fail_then_serve(planner)
    assert serving.parallel < whole.parallel
    host.free(15 * GIB)
    assert planner.plan(3).parallel == whole.parallel
    assert host.planner().plan(1).parallel == whole.parallel


def test_memory_taken_by_another_program_during_the_load_does_not_count(host: Machine) -> None:
    """It was free when the plan was made, and not when the model was loaded."""
    whole = host.planner().plan(1)
    planner = host.planner()
    first = planner.plan(1)
    host.free(2 * GIB)
    planner.step_down(first, HOST_FULL)
    planner.served(planner.plan(2), [], resident_bytes=0, generated=True)
    host.free(28 * GIB)
    assert host.planner().plan(1).parallel == whole.parallel


def test_failure_of_a_larger_request_does_not_bound_a_smaller_one(host: Machine) -> None:
    whole = host.planner().plan(1)
    assert fail_then_serve(host.planner(ctx_size=100_000)).parallel < whole.parallel
    assert host.planner().plan(1).parallel == whole.parallel
    assert host.planner(ctx_size=100_000).plan(1).parallel < whole.parallel


def test_another_build_begins_at_the_top(host: Machine) -> None:
    serving = fail_then_serve(host.planner())
    assert host.planner().plan(1).parallel == serving.parallel
    host.build("b11434", version="2 (b)")
    assert host.planner().plan(1).parallel > serving.parallel


# --- crashes --------------------------------------------------------------------------------------

READING = diagnose(
    Exit(None, "SIGSEGV"),
    ["load_tensors: loading model tensors, this can take a while... (load_mode = mmap)"],
    phase="starting",
)
COMPUTING = diagnose(Exit(None, "SIGSEGV"), ["llama_context: constructing llama_context"], phase="starting")


def test_a_crash_while_the_file_was_read_changes_no_later_plan(host: Machine) -> None:
    whole = host.planner().plan(1)
    for _ in range(3):
        planner = host.planner()
        assert fail_then_serve(planner, READING).kv.flash == "off"  # in this run the user is served at once
        assert planner.plan(3).kv.flash == whole.kv.flash
    assert host.planner().plan(1).kv.flash == whole.kv.flash


def test_crash_during_computation_counts_after_two_occurrences(host: Machine) -> None:
    whole = host.planner().plan(1)
    fail_then_serve(host.planner(), COMPUTING)
    assert host.planner().plan(1).kv.flash == whole.kv.flash
    fail_then_serve(host.planner(), COMPUTING)
    host.free(500 * GIB)
    later = host.planner().plan(1)
    assert later.kv.flash == "off"
    assert "a plan without this setting ended with segfault on 20" in reason(later, "--flash-attn")


def test_crash_expires_after_two_weeks(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host.planner().plan(1)
    monkeypatch.setattr(module, "_today", lambda: "2026-11-01")
    for _ in range(2):
        fail_then_serve(host.planner(), COMPUTING)
    monkeypatch.setattr(module, "_today", lambda: "2026-11-15")
    assert host.planner().plan(1).kv.flash == "off"
    monkeypatch.setattr(module, "_today", lambda: "2026-11-16")
    assert host.planner().plan(1).kv.flash == whole.kv.flash


def test_crash_does_not_count_against_a_plan_that_has_served(host: Machine) -> None:
    planner = host.planner()
    whole = planner.plan(1)
    planner.served(whole, [], resident_bytes=0, generated=True)
    for _ in range(3):
        fail_then_serve(host.planner(), COMPUTING)
    assert host.planner().plan(1).kv.flash == whole.kv.flash
    assert load_history(host.model).failed_plans == ()


def test_a_crash_counts_against_a_plan_that_served_more_than_two_weeks_ago(
    host: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new driver does not change the build of llama-server."""
    monkeypatch.setattr(module, "_today", lambda: "2026-11-01")
    planner = host.planner()
    planner.served(planner.plan(1), [], resident_bytes=0, generated=True)
    for today in ("2026-11-15", "2026-11-16", "2026-11-17"):
        monkeypatch.setattr(module, "_today", lambda today=today: today)
        assert host.planner().plan(1).kv.flash != "off"
        fail_then_serve(host.planner(), COMPUTING)
    assert host.planner().plan(1).kv.flash == "off"


def test_a_plan_that_was_not_seen_to_generate_has_not_served(host: Machine) -> None:
    planner = host.planner()
    planner.served(planner.plan(1), [], resident_bytes=0, generated=False)
    for _ in range(2):
        fail_then_serve(host.planner(), COMPUTING)
    assert host.planner().plan(1).kv.flash == "off"


def test_two_crashes_with_a_good_start_between_them_are_not_believed_without_a_warm_up(host: Machine) -> None:
    for _ in range(2):
        fail_then_serve(host.planner(), COMPUTING)
        planner = host.planner()
        whole = planner.plan(1)
        planner.served(whole, [], resident_bytes=0, generated=False)
    assert whole.kv.flash != "off"
    assert load_history(host.model).failed_plans == ()


def test_crash_and_lack_of_memory_are_recorded_separately(host: Machine) -> None:
    whole = host.planner().plan(1)
    planner = host.planner()
    planner.step_down(planner.plan(1), COMPUTING)
    planner.step_down(planner.plan(2), HOST_FULL)
    made = planner.plan(3)
    assert (made.kv.flash, made.parallel < whole.parallel) == ("off", True)
    planner.served(made, [], resident_bytes=0, generated=True)
    later = host.planner().plan(1)
    assert (later.kv.flash, later.parallel) == (whole.kv.flash, made.parallel)


def test_a_rebuilt_llama_server_of_the_same_version_begins_at_the_top(host: Machine) -> None:
    """Source builds all say "build 0, commit unknown"."""
    serving = fail_then_serve(host.planner())
    assert host.planner().plan(1).parallel == serving.parallel
    host.build("b11434")
    assert host.planner().plan(1).parallel > serving.parallel


# --- measurements --------------------------------------------------------------------------------


def test_next_plan_uses_measured_sizes(host: Machine) -> None:
    planner = host.planner()
    first = planner.plan(1)
    planner.served(first, sizes_log(first, times=1.5), resident_bytes=0, generated=True)
    for again in (planner.plan(2), host.planner().plan(1)):
        assert again.memory.measured
        assert again.memory.kv_bytes == pytest.approx(1.5 * first.memory.kv_bytes, rel=0.02)
        assert again.memory.compute_bytes == pytest.approx(1.5 * first.memory.compute_bytes, rel=0.02)
        assert "--verbosity" not in again.argv


def test_log_without_sizes_is_ignored_and_the_next_start_logs_them(host: Machine) -> None:
    planner = host.planner()
    planner.served(planner.plan(1), ["main: model loaded"], resident_bytes=GIB, generated=True)
    again = host.planner().plan(1)
    assert not again.memory.measured
    assert value(again, "--verbosity") == "4"


def test_plain_start_records_no_measurement(host: Machine) -> None:
    plain = host.planner(profile="plain")
    made = plain.plan(1)
    plain.served(made, sizes_log(made, times=9), resident_bytes=GIB, generated=True)
    assert host.planner().plan(1).memory == host.planner(profile=None).plan(1).memory
    assert not host.planner().plan(1).memory.measured


def test_model_serves_with_an_unusable_state_folder(
    host: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    planner = host.planner()
    first = planner.plan(1)
    planner.served(first, sizes_log(first), resident_bytes=0, generated=True)
    assert planner.plan(2).memory.measured
    assert not host.planner().plan(1).memory.measured


# --- devices -------------------------------------------------------------------------------------


def test_later_generations_query_the_free_memory_of_devices_again(host: Machine) -> None:
    host.devices("Vulkan0: A card (24000 MiB, 20000 MiB free)")
    planner = host.planner()
    assert planner.plan(1).memory.free.device_bytes == 20000 * MIB
    host.devices("Vulkan0: A card (24000 MiB, 5000 MiB free)")
    assert planner.plan(2).memory.free.device_bytes == 5000 * MIB


def test_runtime_that_no_longer_answers_keeps_its_last_devices(host: Machine) -> None:
    host.devices("Vulkan0: A card (24000 MiB, 20000 MiB free)")
    planner = host.planner()
    host.remove_program()
    assert planner.plan(2).memory.free.device_bytes == 20000 * MIB


def test_the_first_generation_takes_the_devices_as_they_were_just_listed(host: Machine) -> None:
    host.devices("Vulkan0: A card (24000 MiB, 20000 MiB free)")
    planner = host.planner()
    host.devices("Vulkan0: A card (24000 MiB, 5000 MiB free)")
    planner.check()
    assert planner.plan(1).memory.free.device_bytes == 20000 * MIB


# --- RPC workers ---------------------------------------------------------------------------------


class WithWorkers(Machine):
    """Its runtime asks only the workers that the test names."""

    def workers(self, **free_mib: int) -> None:
        """Free memory by the last number of the address: ``_2=1024`` is 10.0.0.2:50052."""
        addresses = {f"10.0.0.{name[1:]}:50052": free for name, free in free_mib.items()}
        answers = "".join(
            f"{address}) echo '  RPC0: {address} ({free} MiB, {free} MiB free)' ;;\n"
            for address, free in addresses.items()
        )
        program = self.folder.parent / "llama-server"
        program.write_text(
            f"#!/bin/sh\ncase $1 in --help) /bin/cat '{HELP / 'b11434.txt'}' ;;\n"
            "--version) echo 'version: 1 (a)' >&2 ;;\n"
            "--list-devices) echo 'Available devices:' ;;\n"
            f"--rpc) case $2 in {answers}"
            '*) echo "x.cpp:547: Failed to connect to $2" >&2; exit 134 ;; esac ;;\n'
            "esac\n"
        )
        program.chmod(0o755)


@pytest.fixture
def network(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> WithWorkers:
    return WithWorkers(tmp_path, tiny_model, monkeypatch)


def test_layers_are_planned_on_the_memory_of_workers(network: WithWorkers) -> None:
    network.workers(_2=4096, _3=8192)
    made = network.planner(rpc=("10.0.0.2:50052", "10.0.0.3:50052")).plan(1)
    assert value(made, "--rpc") == "10.0.0.2:50052,10.0.0.3:50052"
    assert made.memory.free.device_bytes == 12 * GIB
    assert made.device == "RPC0,RPC1"


def test_model_that_fits_is_planned_without_an_absent_worker(network: WithWorkers) -> None:
    network.workers(_2=4096)
    made = network.planner(rpc=("10.0.0.2:50052", "10.0.0.3:50052")).plan(1)
    assert value(made, "--rpc") == "10.0.0.2:50052"
    assert "10.0.0.3:50052: it accepts no connection" in made.warnings[0][0]


def test_model_that_does_not_fit_waits_for_an_absent_worker(network: WithWorkers) -> None:
    network.workers()
    network.free(8 * MIB)
    with pytest.raises(WorkerMissing, match=r"10\.0\.0\.2:50052 \(it accepts no connection\)"):
        network.planner(rpc=("10.0.0.2:50052",)).plan(1)


def test_worker_that_a_model_of_this_process_uses_is_not_asked(network: WithWorkers) -> None:
    worker = "10.0.0.2:50052"
    network.workers(_2=4096)
    assert network.planner(rpc=(worker,)).plan(1).workers == (worker,)
    network.workers()  # a question would find it absent
    USED.add((worker,), "the model a")
    try:
        other = network.planner(rpc=(worker,))
        assert other.admission().plan.workers == (worker,)  # an estimate: with its last answer
        assert "the model a of this llamasup uses it" in other.plan(1).warnings[0][0]
    finally:
        USED.remove((worker,), "the model a")
    assert USED.user_of(worker) is None
    assert network.planner(rpc=(worker,)).admission().plan.workers == ()


def test_worker_has_one_user_in_every_notation() -> None:
    USED.add(("tls://localhost:7",), "a trial")
    USED.add(("tls://localhost:7",), "a trial")
    assert USED.user_of("127.0.0.1:7") == "a trial"
    USED.remove(("tls://localhost:7",), "a trial")
    assert USED.user_of("tls://127.0.0.1:7") == "a trial"
    USED.remove(("tls://localhost:7",), "a trial")
    assert USED.user_of("127.0.0.1:7") is None


def test_absent_worker_that_the_devices_exclude_is_no_reason_for_a_refusal(network: WithWorkers) -> None:
    network.workers()
    network.free(8 * MIB)
    planner = network.planner(rpc=("10.0.0.2:50052",), extra=("--device", "none"))
    with pytest.raises(DoesNotFit):
        planner.plan(1)
    network.free(8 * GIB)
    assert planner.plan(1).warnings == ()


def test_devices_that_name_a_worker_need_all_of_them(network: WithWorkers) -> None:
    rpc, extra = ("10.0.0.2:50052", "10.0.0.3:50052"), ("--device", "RPC1")
    network.workers(_2=4096, _3=4096, _5=4096)
    assert network.planner(rpc=rpc, extra=extra).plan(1).device == "RPC1"
    absent = ("10.0.0.4:50052", "10.0.0.5:50052")  # the second one would be RPC0
    with pytest.raises(WorkerMissing, match=r"needs the RPC worker 10\.0\.0\.4:50052"):
        network.planner(rpc=absent, extra=extra).plan(1)


def test_conditions_of_a_measurement_are_those_of_a_start_with_workers(network: WithWorkers) -> None:
    network.workers(_2=4096)
    planner = network.planner(rpc=("10.0.0.2:50052",))
    before = planner.conditions()
    planner.plan(1)
    assert planner.conditions() == before


def test_lost_worker_is_asked_again_and_named(network: WithWorkers) -> None:
    network.workers(_2=4096, _3=4096)
    planner = network.planner(rpc=("10.0.0.2:50052", "10.0.0.3:50052"))
    made = planner.plan(1)
    network.workers(_2=4096)
    lost = Diagnosis("rpc_worker_lost", "lost one of its RPC workers", "", (), False, 75)
    assert "lost the RPC worker 10.0.0.3:50052" in planner.name_lost(made, lost).message
    assert planner.plan(2).workers == ("10.0.0.2:50052",)  # although its last answer is new


def test_model_of_a_removed_llama_server_keeps_its_diagnosis(network: WithWorkers) -> None:
    network.workers(_2=4096)
    planner = network.planner(rpc=("10.0.0.2:50052",))
    made = planner.plan(1)
    network.remove_program()
    lost = Diagnosis("rpc_worker_lost", "lost one of its RPC workers", "", (), False, 75)
    assert planner.name_lost(made, lost) == lost


def test_true_reason_of_an_end_is_kept_although_a_worker_is_absent(network: WithWorkers) -> None:
    network.workers(_2=4096)
    planner = network.planner(rpc=("10.0.0.2:50052",))
    made = planner.plan(1)
    network.workers()
    bad = Diagnosis("model_corrupt", "the model is corrupt", "", (), True, 65)
    assert planner.name_lost(made, bad) == bad
    unknown = Diagnosis("unknown", "llama-server ended", "", (), False, 69)
    assert planner.name_lost(made, unknown).cause == "rpc_worker_lost"


def test_worker_gets_a_second_attempt_before_a_start_does_without_it(
    network: WithWorkers, tmp_path: Path
) -> None:
    network.workers(_2=4096)
    planner = network.planner(rpc=("10.0.0.2:50052",))
    program, mark = tmp_path / "llama-server", tmp_path / "asked"
    refuse = f"if [ ! -e '{mark}' ]; then : > '{mark}'; echo 'Failed to connect' >&2; exit 134; fi"
    program.write_text(program.read_text().replace("--rpc) ", f"--rpc) {refuse}\n", 1))
    assert planner.plan(1).workers == ("10.0.0.2:50052",)
    assert mark.exists()


def test_workers_need_a_build_with_rpc(host: Machine) -> None:
    host.build("0.3.16")
    with pytest.raises(UsageInvalid, match="was built without RPC"):
        host.planner(rpc=("10.0.0.2:50052",)).plan(1)


def test_workers_of_several_replicas_are_refused(network: WithWorkers) -> None:
    network.workers(_2=4096)
    with pytest.raises(UsageInvalid, match="exclude each other"):
        network.planner(rpc=("10.0.0.2:50052",), replicas=2).plan(1)


def test_tunnel_without_certificates_is_refused(network: WithWorkers) -> None:
    network.workers()
    with pytest.raises(ConfigInvalid, match="needs certificates"):
        network.planner(rpc=("tls://worker.example.net:7000",)).plan(1)


def test_flags_of_llamasup_that_failed_are_left_out_at_once_for_this_file_and_build(host: Machine) -> None:
    abort = diagnose(Exit(None, "SIGABRT"), ["/src/glm4-moe.cpp:149: fatal error"], phase="starting")
    serving = fail_then_serve(host.planner(), abort)
    assert (serving.bounds.bare, serving.ctx_size) == (True, 8192)
    again = host.planner(ctx_size=4096).plan(1)
    assert (again.bounds.bare, again.ctx_size) == (True, 4096)
    assert "a plan with more flags ended with" in again.bounds.why
    host.build("b11434", version="2 (b)")
    assert not host.planner().plan(1).bounds.bare
