"""The starts of a model with a result of ``llamasup tune``: when the planner uses it, and when not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.planning.attempts import Planner
from llamasup.planning.facts import Launch, prepare
from llamasup.planning.load_history import LoadHistory, runtime_id
from llamasup.planning.load_history_store import load
from llamasup.planning.plan import LaunchPlan
from llamasup.planning.tuned import NO_CHANGES, Changes, Kept, KeptResults, asked_key, machine_key
from llamasup.planning.tuned_store import cpu_name, save_results
from llamasup.settings.model import Settings
from llamasup.system.storage.fact_cache import FileIdentity
from tests.planning.plans import machine, value
from tests.planning.test_attempts import HOST_FULL, Machine, needed_bytes


@pytest.fixture
def host(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, tiny_model, monkeypatch)


def launch(host: Machine, settings: Settings | None = None) -> Launch:
    runtime = str(host.folder.parent / "llama-server")
    return prepare(str(host.model), settings or Settings(), runtime=runtime, environ={})


def keep(host: Machine, changes: Changes) -> None:
    of = launch(host)
    save_results(
        FileIdentity.of(host.model),
        KeptResults(
            (
                Kept(
                    runtime_id(of.runtime.command, of.runtime.capabilities),
                    machine_key(machine(), (), cpu=cpu_name()),
                    asked_key(Settings(), {}),
                    *("latency", None, changes, 1.2, 1.1, 1.3, "2026-11-26", 50, 3.0),
                ),
            )
        ),
    )


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
    assert planned(host, Settings(ctx_size=4096)).measured is not None


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
    assert load(host.model) == LoadHistory()
