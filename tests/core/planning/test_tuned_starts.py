"""The starts of a model with a result of ``llamasup tune``: when the planner uses it, and when not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.planning.facts import Launch, prepare
from llamasup.core.planning.measured.load_history import LoadHistory
from llamasup.core.planning.measured.stores import load_history, load_results, save_results
from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes, KeptResults
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.planner import Planner
from llamasup.core.settings.model import Settings
from llamasup.core.system.storage.fact_cache import FileIdentity
from tests.core.planning.plans import machine, value
from tests.core.planning.test_planner import HOST_FULL, NO_MODEL, SEGFAULT, Machine, needed_bytes
from tests.kit.kept_results import kept_for


@pytest.fixture
def host(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, tiny_model, monkeypatch)


def launch(host: Machine, settings: Settings | None = None) -> Launch:
    runtime = str(host.folder.parent / "llama-server")
    return prepare(str(host.model), settings or Settings(), runtime=runtime, environ={})


def keep(host: Machine, changes: Changes) -> None:
    save_results(FileIdentity.of(host.model), KeptResults((kept_for(launch(host), changes),)))


def planned(host: Machine, settings: Settings | None = None) -> LaunchPlan:
    return Planner(launch(host, settings), host.folder).plan(1)


THREE = Changes((("--threads", "3"),))


def test_the_next_start_uses_a_result(host: Machine) -> None:
    keep(host, THREE)
    made = planned(host)
    assert value(made, "--threads") == "3"
    assert made.measured is not None


def test_another_setting_of_the_user_is_planned_without_it(host: Machine) -> None:
    keep(host, THREE)
    assert planned(host, Settings(profile="latency")).measured is None
    assert planned(host, Settings(kv_type="f16")).measured is None
    assert planned(host, Settings(ctx_size=4096)).measured is None  # no slots that share one context


def test_another_build_or_machine_is_planned_without_it(host: Machine) -> None:
    keep(host, THREE)
    host.machine = machine(physical_cores=4)
    assert planned(host).measured is None
    host.machine = machine()
    assert planned(host).measured is not None
    host.build("b11434", version="2 (b)")
    assert planned(host).measured is None


def test_a_result_that_does_not_fit_is_left_out(host: Machine) -> None:
    plain = planned(host)
    keep(host, Changes((("--parallel", "64"),)))
    assert planned(host).parallel == 64
    host.free(2 * needed_bytes(plain))
    made = planned(host)
    assert made.measured is None
    assert made.parallel == plain.parallel


def test_a_result_that_the_build_refuses_is_left_out(host: Machine) -> None:
    keep(host, Changes((("--no-such-flag", None),)))
    assert planned(host).measured is None
    keep(host, Changes((("--port", "1"),)))
    assert planned(host).measured is None


def test_after_a_failed_start_the_result_is_left_out(host: Machine) -> None:
    keep(host, THREE)
    planner = Planner(launch(host), host.folder)
    made = planner.plan(1)
    assert made.measured is not None
    assert planner.step_down(made, HOST_FULL) is not None
    assert planner.plan(2).measured is None


SWITCH = Changes((("--threads", "3"), ("--no-repack", None)), (("GOMP_SPINCOUNT", "300"),))


@pytest.mark.parametrize("diagnosis", [SEGFAULT, NO_MODEL])
def test_a_crash_with_the_result_restarts_at_once_without_it(host: Machine, diagnosis: Diagnosis) -> None:
    plain = planned(host)
    keep(host, SWITCH)
    planner = Planner(launch(host), host.folder)
    made = planner.plan(1)
    step = planner.step_down(made, diagnosis)
    assert step is not None
    assert str(step).startswith(f"--threads {value(plain, '--threads')} instead of 3, --no-repack ")
    assert step == planner.step_down(made, diagnosis)
    after = planner.plan(2)
    assert after.measured is None
    assert (after.kv_type, after.parallel, after.kv.flash) == (
        plain.kv_type,
        plain.parallel,
        plain.kv.flash,
    )
    planner.served(after, [], resident_bytes=1 << 20, generated=True)
    assert planner.plan(3).measured is None  # also after it served
    assert planned(host).measured is None  # and in the next process
    assert load_history(host.model).failed_plans == ()  # it is no evidence against the KV cache


def test_a_result_stays_until_a_start_without_it_has_served(host: Machine) -> None:
    keep(host, THREE)
    planner = Planner(launch(host), host.folder)
    planner.step_down(planner.plan(1), NO_MODEL)
    assert planner.step_down(planner.plan(2), NO_MODEL) is None  # so the flags are not to blame
    assert planned(host).measured is not None


def test_a_start_without_memory_does_not_delete_the_result(host: Machine) -> None:
    keep(host, THREE)
    planner = Planner(launch(host), host.folder)
    planner.step_down(planner.plan(1), HOST_FULL)
    after = planner.plan(2)
    planner.served(after, [], resident_bytes=1 << 20, generated=True)
    assert planner.plan(3).measured is None
    assert load_results(FileIdentity.of(host.model)).results


def test_a_trial_uses_its_changes_in_place_of_the_result(host: Machine) -> None:
    keep(host, THREE)
    of = launch(host)
    four = Planner(of, host.folder, trial=Changes((("--threads", "4"),))).plan(1)
    assert value(four, "--threads") == "4"
    plain = Planner(of, host.folder, trial=NO_CHANGES).plan(1)
    assert value(plain, "--threads") not in ("3", "4")


def test_a_trial_is_not_recorded(host: Machine) -> None:
    planner = Planner(launch(host), host.folder, trial=THREE)
    planner.served(planner.plan(1), [], resident_bytes=1 << 20, generated=True)
    assert load_history(host.model) == LoadHistory()
