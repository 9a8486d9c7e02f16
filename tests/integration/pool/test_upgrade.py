"""Upgrades of a pool over real children of the fake server: bad builds are refused, a good one serves."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.inspect import Runtime
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.estimate import Fetch
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, RestartRequested, State
from llamasup.errors import (
    BrokenRuntime,
    BuildRefused,
    Conflict,
    LlamasupError,
    RuntimeMissing,
    Stopping,
    UsageInvalid,
)
from llamasup.features.upgrade import proof, verdict
from llamasup.features.upgrade.upgrade import Upgrade
from tests.core.pool.pools import PATIENCE_S, Pooled, async_test, file_of, pooled, spec_of, with_context
from tests.kit.fake_server import install

LONGEST_PROOF_S = 5 * PATIENCE_S  # of 300 requests, if the machine is too busy to compare the speed sooner


PREFILL_S = 0.05  # a time that noise of the machine hides less
GOOD_PREFILL_S = 0.2


class Rig:
    """Models, with an upgrade. ``used``: the paths of the builds that served all models, in order."""

    def __init__(self, folder: Path, models: Pooled, tasks: asyncio.TaskGroup, watch_s: float) -> None:
        self.folder = folder
        self.models = models
        self.tasks = tasks
        self.used: list[str] = []
        self.upgrade = Upgrade(
            models.pool, models.catalog.managed_models, lambda: tasks, self._use, watch_s=watch_s
        )

    def _use(self, runtime: Runtime) -> None:
        self.used.append(runtime.path)

    def build(self, *fakes: str, prefill_s: float = PREFILL_S) -> str:
        return str(install(self.folder / "new-server", f"prefill_s={prefill_s}", *fakes))

    async def run(self, *fakes: str, prefill_s: float = PREFILL_S) -> None:
        async with asyncio.timeout(LONGEST_PROOF_S):
            await self.upgrade.upgrade(self.build(*fakes, prefill_s=prefill_s))

    async def refusal(self, *fakes: str, prefill_s: float = PREFILL_S) -> BuildRefused:
        with pytest.raises(BuildRefused) as refused:
            await self.run(*fakes, prefill_s=prefill_s)
        return refused.value

    @property
    def state(self) -> object:
        return self.upgrade.status()["state"]

    @property
    def requests(self) -> int:
        """Those of the proof."""
        return int(self.upgrade.status()["proof"]["requests"])

    def builds(self) -> dict[str, str]:
        """The folder names of the builds of all models."""
        models = self.models.catalog.managed_models()
        return {managed.spec.id: Path(managed.spec.runtime).name for managed in models}

    def new_processes(self, model: str) -> list[InstanceRunner]:
        """Those that a proof is about."""
        managed = self.models[model]
        assert managed.model.current is not None
        return managed.driver.runners_of(managed.model.current.id)

    def texts(self, model: str) -> list[str]:
        """The decisions about a model, the newest first."""
        return [decision.text for decision in self.models.pool.decisions.of(model)]


@asynccontextmanager
async def upgraded(
    folder: Path,
    *specs: ModelSpec,
    prefill_s: float = PREFILL_S,
    watch_s: float = 3600.0,
    capacity: float = 9,
    fakes: Sequence[str] = (),
    policy: Policy | None = None,
    fetch: Fetch | None = None,
) -> AsyncIterator[Rig]:
    old = install(folder / "old-server", f"prefill_s={prefill_s}", *fakes)
    pool = pooled(folder, *specs, runtime=old, capacity=capacity, policy=policy, fetch=fetch)
    async with pool as models, asyncio.TaskGroup() as tasks:
        rig = Rig(folder, models, tasks, watch_s)
        try:
            yield rig
        finally:
            rig.upgrade.close()


def without_flag(program: str, flag: str) -> str:
    """The same program, whose help has another flag instead."""
    path = Path(program)
    path.write_text(path.read_text().replace(flag, f"{flag}-of-old"))
    return program


def no_server(path: Path) -> str:
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def short_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes before or after the proof: few requests, and any speed will do."""
    monkeypatch.setattr(verdict, "REQUESTS", 24)
    monkeypatch.setattr(verdict, "LEAST_SPEED", 0.01)


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> list[ModelSpec]:
    return [spec_of(file_of(tmp_path, name, tiny_model)) for name in "ab"]


# --- a good build


@pytest.mark.extended
@async_test
async def test_good_build_serves_all_models(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs, prefill_s=GOOD_PREFILL_S) as rig:
        for name in "ab":
            await rig.models.load(name)
        before = rig.models.pids("a", "b")
        await rig.run(prefill_s=GOOD_PREFILL_S)
        status = rig.upgrade.status()

        assert rig.state == "watching"
        assert {managed.spec.runtime for managed in rig.models.catalog.managed_models()} == {
            str(tmp_path / "new-server")
        }
        assert rig.used == [str(tmp_path / "new-server")]
        assert not set(before.values()) & set(rig.models.pids("a", "b").values())
        assert status["proof"]["requests"] >= 100
        assert status["proof"]["text"] == 1.0
        assert [await rig.models.ask(name).served_by() for name in "ab"] == [1, 1]
        assert "a gets a new build of llama.cpp" in rig.texts("a")[0]


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_model_is_loaded_for_the_proof_if_none_is(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.run()
        assert rig.models[str(rig.upgrade.status()["model"])].serves
        assert {managed.spec.runtime for managed in rig.models.catalog.managed_models()} == set(rig.used)


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_reload_and_new_model_keep_the_new_build(
    tmp_path: Path, tiny_model: Path, specs: list[ModelSpec]
) -> None:
    async with upgraded(tmp_path, specs[0]) as rig:
        await rig.models.load("a")
        await rig.run()
        new = spec_of(file_of(tmp_path, "c", tiny_model))
        rig.models.apply(with_context(specs[0], 600), new)
        await rig.models.until(lambda: not rig.models["a"].rolling_out)
        assert [rig.models[name].spec.runtime for name in "ac"] == [*rig.used, *rig.used]
        launch = rig.models["a"].sized
        assert launch is not None
        assert launch.launch is not None
        assert launch.launch.runtime.path == rig.used[0]


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_link_to_a_build_may_change_while_it_serves(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        link = tmp_path / "link"
        link.symlink_to(rig.build())
        await rig.upgrade.upgrade(str(link))
        link.unlink()
        assert rig.used == [str(tmp_path / "new-server")]
        await rig.models.load("b")
        assert await rig.models.ask("b").served_by() == 1


@async_test
async def test_models_get_the_new_build_if_the_old_one_is_gone(
    tmp_path: Path, specs: list[ModelSpec]
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        before = rig.models.pids("a")
        (tmp_path / "old-server").unlink()
        await rig.run()
        status = rig.upgrade.status()
        assert (status["state"], status["before"]) == ("kept", None)
        assert "the old build is gone" in status["reason"]
        assert rig.models.pids("a") != before
        for name in "ab":
            await rig.models.load(name)
            assert await rig.models.ask(name).served_by() == 1
        assert rig.used == [str(tmp_path / "new-server")]


# --- bad builds


@pytest.mark.parametrize(
    ("fakes", "prefill_s", "why"),
    [
        ((), PREFILL_S * 1.6, "of the speed of the running build; 90% are needed"),
        (("leak_bytes=2000000",), PREFILL_S, "its memory has grown by"),
        (("die_at=50",), PREFILL_S, "at request 49 of 100"),
        (("fail_at=50",), PREFILL_S, "its server answered with status 500 at request 49 of 100"),
        (("wrong=yes",), PREFILL_S, "its text is that of the running build for"),
        (("exit=load:1",), PREFILL_S, "does not start with it"),
        (("status=500",), PREFILL_S, "does not start with it"),
    ],
    ids=["slow", "leaks", "crashes", "errors", "wrong", "ends", "fails"],
)
@async_test
async def test_bad_build_is_refused_and_the_old_one_serves(
    tmp_path: Path, specs: list[ModelSpec], fakes: tuple[str, ...], prefill_s: float, why: str
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        before = rig.models.pids("a")
        refused = await rig.refusal(*fakes, prefill_s=prefill_s)
        assert why in refused.message
        assert rig.state == "refused"
        proof = rig.upgrade.status()["proof"]
        if fakes == ("fail_at=50",):
            assert '"injected"' in proof["answer"]
            assert refused.details == (f"Its answer: {proof['answer']}",)
        if fakes == ("wrong=yes",):
            assert (proof["answer"][:3], proof["expected"][:3]) == (" x0", " w0")
        assert tuple(proof["lines"]) == refused.lines
        if fakes == ("die_at=50",):
            assert proof["answer"] is None
        assert rig.models.pids("a") == before
        assert await rig.models.ask("a").served_by() == 1
        assert {managed.spec.runtime for managed in rig.models.catalog.managed_models()} == {
            str(tmp_path / "old-server")
        }
        assert rig.used == []
        assert "keeps its build" in rig.texts("a")[0]


@async_test
async def test_build_without_a_needed_flag_is_refused_before_it_starts(
    tmp_path: Path, specs: list[ModelSpec]
) -> None:
    settings = Settings(alias="a", ctx_size=512, parallel=1, extra=("--keep", "5"))
    spec = ModelSpec("a", specs[0].source, settings=settings, identity=specs[0].identity)
    async with upgraded(tmp_path, spec) as rig:
        path = without_flag(rig.build(), "--keep")
        shown = await rig.upgrade.preview(path)
        assert "--keep" in shown["models"][0]["problem"]["message"]
        with pytest.raises(BuildRefused, match=r"'a' has no plan with it: .*--keep"):
            await rig.upgrade.upgrade(path)
        assert rig.models["a"].runners == []


@async_test
async def test_program_that_is_no_build_is_refused(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        with pytest.raises(BrokenRuntime):
            await rig.upgrade.upgrade(no_server(tmp_path / "other"))
        with pytest.raises(UsageInvalid, match="is the build that llamasup runs"):
            await rig.upgrade.upgrade(str(tmp_path / "old-server"))


@pytest.mark.extended
@pytest.mark.usefixtures("short_proof")
@async_test
async def test_all_models_return_if_one_does_not_start(tmp_path: Path, specs: list[ModelSpec]) -> None:
    """The model of the proof is small; the other one fails with its larger context."""
    async with upgraded(tmp_path, specs[0], with_context(specs[1], 600)) as rig:
        for name in "ab":
            await rig.models.load(name)
        refused = await rig.refusal("exit=load:1", "above_ctx=520")
        assert "'b' does not start with it" in refused.message
        assert {managed.spec.runtime for managed in rig.models.catalog.managed_models()} == {
            str(tmp_path / "old-server")
        }
        assert [await rig.models.ask(name).served_by() for name in "ab"] == [1, 1]
        assert any("returns to its old build" in text for text in rig.texts("a"))


@async_test
async def test_build_needs_room_for_a_model_twice(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs, capacity=1.5) as rig:
        await rig.models.load("a")
        refused = await rig.refusal()
        assert "no model that generates text fits into memory twice" in refused.message


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_one_upgrade_at_a_time(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        first = rig.tasks.create_task(rig.run())
        await rig.models.until(lambda: rig.state == "proving")
        with pytest.raises(Conflict):
            await rig.upgrade.upgrade(str(tmp_path / "new-server"))
        await first


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_running_build_serves_and_is_shown_during_the_proof(
    tmp_path: Path, specs: list[ModelSpec]
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        before = rig.models.pids("a")
        old = rig.models["a"].runners[0].endpoint
        upgrade = rig.tasks.create_task(rig.run())
        await rig.models.until(lambda: rig.upgrade.status()["proof"]["requests"] > 0)
        request = rig.models.ask("a")
        assert request.lease is not None
        assert request.lease.endpoint is old
        request.finish()
        assert rig.models["a"].serves
        await rig.models.load("a")  # at once
        assert rig.state == "proving"
        assert rig.models.pids("a") == before
        assert len(rig.models["a"].all_runners) == 2
        await upgrade
        assert rig.models.pids("a") != before


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_unload_during_the_proof_refuses_the_build(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        refusal = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.upgrade.status()["proof"]["requests"] > 0)
        await rig.models.unload("a")
        await refusal
        assert rig.models["a"].spec.runtime == str(tmp_path / "old-server")
        await rig.models.load("a")
        assert await rig.models.ask("a").served_by() == 1


@async_test
async def test_other_model_gets_the_memory_of_a_proof(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs, capacity=2.5) as rig:
        await rig.models.load("a")
        before = rig.models.pids("a")
        refusal = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.requests > 0)
        assert await rig.models.ask("b").served_by() == 1
        assert "not proven: The memory of the proof with 'a' was needed for 'b'" in (await refusal).message
        assert rig.models.pids("a") == before


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The proof waits for it."""
    event = threading.Event()

    def held(trial: verdict.Trial) -> verdict.Step:
        event.wait(PATIENCE_S)
        return verdict.next_step(trial)

    monkeypatch.setattr(proof, "next_step", held)
    return event


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_idle_model_is_evicted_before_a_proof_ends(
    tmp_path: Path, tiny_model: Path, specs: list[ModelSpec], go_on: threading.Event
) -> None:
    third = spec_of(file_of(tmp_path, "c", tiny_model))
    async with upgraded(tmp_path, *specs, third, capacity=3.2) as rig:
        for name in "ac":
            await rig.models.load(name)
        upgrade = rig.tasks.create_task(rig.run())
        await rig.models.until(lambda: rig.state == "proving")
        proven = str(rig.upgrade.status()["model"])
        await rig.models.until(lambda: len(rig.models[proven].all_runners) == 2)
        try:
            request = rig.models.ask("b")
            assert await request.served_by() == 1
            request.finish()
            assert rig.state == "proving"
            assert [model for model, *_ in rig.models.unloads()] == ["c" if proven == "a" else "a"]
        finally:
            go_on.set()
        await upgrade


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_other_model_is_changed_during_a_proof(
    tmp_path: Path, specs: list[ModelSpec], go_on: threading.Event
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        for name in "ab":
            await rig.models.load(name)
        upgrade = rig.tasks.create_task(rig.run())
        await rig.models.until(lambda: len(rig.models.pool.managed_models["a"].all_runners) == 2)
        try:
            rig.models.apply(specs[0], with_context(specs[1], 600))
            await rig.models.until(lambda: not rig.models["b"].is_outdated and rig.models["b"].serves)
            assert rig.state == "proving"
        finally:
            go_on.set()
        await upgrade
        assert set(rig.builds().values()) == {"new-server"}


@async_test
async def test_smaller_budget_ends_the_proof(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs, capacity=2.5) as rig:
        await rig.models.load("a")
        refusal = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.requests > 0)
        options = rig.models.pool.options
        budget = {"ram": int(1.5 * rig.models.needs_bytes)}
        rig.models.pool.apply_options(replace(options, budget=budget))
        assert "was needed to stay within the budget" in (await refusal).message
        assert await rig.models.ask("a").served_by() == 1


@async_test
async def test_crash_of_another_replica_refuses_the_build(tmp_path: Path, tiny_model: Path) -> None:
    spec = spec_of(file_of(tmp_path, "a", tiny_model), replicas=2)
    async with upgraded(tmp_path, spec) as rig:
        await rig.models.load("a")
        old = [runner.pid for runner in rig.models["a"].runners]
        refusal = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.requests > 0)
        kill(rig.new_processes("a")[1])
        assert "its server ended" in (await refusal).message
        assert [runner.pid for runner in rig.models["a"].runners] == old


@async_test
async def test_replica_that_serves_is_compared(tmp_path: Path, tiny_model: Path) -> None:
    """The first one of the old build has failed."""
    spec = spec_of(file_of(tmp_path, "a", tiny_model), replicas=2)
    policy = Policy(drain_timeout_s=5.0, restart=RestartPolicy(most_crashes=0))
    async with upgraded(tmp_path, spec, policy=policy) as rig:
        await rig.models.load("a")
        first = rig.models["a"].runners[0]
        kill(first)
        await rig.models.until(lambda: first.instance.state is State.FAILED)
        upgrade = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.requests > 0)
        await rig.models.unload("a")
        await upgrade


@async_test
async def test_smaller_plan_does_not_prove_a_build(tmp_path: Path, specs: list[ModelSpec]) -> None:
    """The new server lacks memory at its first start, and would serve with another KV cache."""
    async with upgraded(tmp_path, with_context(specs[0], 4096)) as rig:
        await rig.models.load("a")
        refused = await rig.refusal("out_of_memory=host", f"once={tmp_path / 'once'}")
        assert "is not proven: memory was too small for the same plan twice" in refused.message
        assert await rig.models.ask("a").served_by() == 1


@async_test
async def test_leak_of_a_server_in_a_script_is_seen(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        path = Path(rig.build("leak_bytes=2000000")).with_name("script")
        path.write_text(f'#!/bin/sh\n{shlex.quote(rig.build("leak_bytes=2000000"))} "$@"\nexit $?\n')
        path.chmod(0o755)
        with pytest.raises(BuildRefused, match="its memory has grown by"):
            async with asyncio.timeout(LONGEST_PROOF_S):
                await rig.upgrade.upgrade(str(path))


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_downloaded_model_proves_a_build(tmp_path: Path, tiny_model: Path) -> None:
    path = file_of(tmp_path, "a", tiny_model)
    spec = ModelSpec("a", "org/a-GGUF:Q4", settings=Settings(alias="a", ctx_size=512, parallel=1))

    async def fetch(_reference: str, _listener: object) -> Path:
        return path

    async with upgraded(tmp_path, spec, fetch=fetch) as rig:
        await rig.models.load("a")
        await rig.run()
        assert rig.upgrade.status()["model"] == "a"
        assert rig.builds() == {"a": "new-server"}


@async_test
async def test_stop_does_not_wait_for_the_proof(tmp_path: Path, specs: list[ModelSpec]) -> None:
    """A server waits for its open request, which would be that of the proof."""
    policy = Policy(drain_timeout_s=5.0, stop_timeout_s=10 * PATIENCE_S)
    async with upgraded(tmp_path, *specs, policy=policy) as rig:
        await rig.models.load("a")
        refusal = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.requests > 0)
        await rig.models.unload("a")
        assert "was changed or unloaded during the proof" in (await refusal).message
        await rig.models.load("a")
        stopped = rig.tasks.create_task(stopped_upgrade(rig))
        await rig.models.until(lambda: rig.requests > 0 and rig.state == "proving")
        rig.models.pool.ask_stop()
        async with asyncio.timeout(PATIENCE_S):
            await rig.models.pool.ended()
        await stopped


@async_test
async def test_restart_ends_the_proof(tmp_path: Path, specs: list[ModelSpec]) -> None:
    policy = Policy(drain_timeout_s=5.0, stop_timeout_s=10 * PATIENCE_S)
    async with upgraded(tmp_path, *specs, policy=policy) as rig:
        await rig.models.load("a")
        refusal = rig.tasks.create_task(rig.refusal())
        await rig.models.until(lambda: rig.requests > 0)
        rig.models["a"].runners[0].post(RestartRequested())
        assert "is not proven" in (await refusal).message
        assert await rig.models.ask("a").served_by() == 2
        assert rig.builds()["a"] == "old-server"


async def stopped_upgrade(rig: Rig) -> None:
    with pytest.raises(Stopping):
        await rig.run()


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_stop_during_the_rollout_is_no_success(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        for name in "ab":
            await rig.models.load(name)
        stopped = rig.tasks.create_task(stopped_upgrade(rig))
        await rig.models.until(lambda: rig.state == "rolling_out")
        rig.models.pool.ask_stop()
        await rig.models.pool.ended()
        await stopped
        assert rig.used == []


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_model_that_no_build_can_load_refuses_none(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        for name in "ab":
            await rig.models.load(name)
        before = rig.models.pids("b")
        os.unlink(specs[1].source)  # noqa: PTH108
        await rig.run()
        assert rig.state == "watching"
        assert "'b' gets the build with its next load" in rig.upgrade.status()["reason"]
        assert rig.models.pids("b") == before
        assert await rig.models.ask("a").served_by() == 1


@pytest.mark.extended
@pytest.mark.usefixtures("short_proof")
@async_test
async def test_model_that_does_not_load_with_the_old_build_proves_none(
    tmp_path: Path, specs: list[ModelSpec]
) -> None:
    async with upgraded(tmp_path, specs[0], fakes=["exit=load:1"]) as rig:
        refused = await rig.refusal()
        assert "'a' does not load with the old build" in refused.message


@async_test
async def test_bug_returns_all_models_to_the_old_build(
    tmp_path: Path, specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        monkeypatch.setattr(verdict, "REQUESTS", 24)
        monkeypatch.setattr(verdict, "LEAST_SPEED", 0.01)
        monkeypatch.setattr(rig.models.pool, "set_runtime", broken)
        with pytest.raises(LlamasupError, match="Internal error in llamasup: ZeroDivisionError"):
            await rig.run()
        assert rig.state == "refused"
        assert set(rig.builds().values()) == {"old-server"}


def broken(*_arguments: object) -> None:
    raise ZeroDivisionError


# --- after the rollout


def kill(runner: InstanceRunner) -> None:
    assert runner.pid is not None
    os.kill(runner.pid, signal.SIGKILL)


async def crash(rig: Rig, model: str) -> None:
    """And wait until the model serves again."""
    runner = rig.models[model].runners[0]
    generation = runner.instance.generation
    kill(runner)
    async with asyncio.timeout(PATIENCE_S):
        await runner.until(
            lambda instance: instance.generation > generation and instance.state is State.READY
        )


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_old_build_returns_if_crashes_rise(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        await rig.run()
        await crash(rig, "a")
        assert rig.state == "watching"  # one may be chance
        kill(rig.models["a"].runners[0])
        await rig.models.until(lambda: rig.state == "returned")
        assert rig.used[-1] == str(tmp_path / "old-server")
        assert "crashed 2 times" in str(rig.upgrade.status()["reason"])
        assert await rig.models.ask("a").served_by() == 1
        assert rig.models["a"].spec.runtime == str(tmp_path / "old-server")


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_build_is_kept_when_the_watch_ends(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs, watch_s=0.1) as rig:
        await rig.models.load("a")
        await rig.run()
        await rig.models.until(lambda: rig.state == "kept")


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_upgrade_that_fails_does_not_end_the_watch(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        await rig.run()
        with pytest.raises(RuntimeMissing):
            await rig.upgrade.upgrade(str(tmp_path / "missing"))
        with pytest.raises(UsageInvalid):
            await rig.upgrade.upgrade(rig.used[0])
        assert rig.state == "watching"
        worse = install(tmp_path / "worse-server", "die_at=10")
        with pytest.raises(BuildRefused):
            await rig.upgrade.upgrade(str(worse))
        await crash(rig, "a")
        kill(rig.models["a"].runners[0])
        await rig.models.until(lambda: rig.state == "returned")
        assert rig.used[-1] == str(tmp_path / "old-server")
        assert Path(rig.upgrade.status()["runtime"]["path"]).name == "new-server"


@pytest.mark.extended
@pytest.mark.usefixtures("short_proof")
@async_test
async def test_starts_that_fail_are_no_crashes_of_the_build(tmp_path: Path, specs: list[ModelSpec]) -> None:
    """Neither build can load the model b."""
    fails = ("exit=load:1", "above_ctx=520")
    async with upgraded(tmp_path, specs[0], with_context(specs[1], 600), fakes=fails) as rig:
        await rig.models.load("a")
        await rig.run(*fails)
        with pytest.raises(LlamasupError):
            await rig.models.load("b")
        assert rig.state == "watching"


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_step_down_is_no_crash_of_the_build(tmp_path: Path, specs: list[ModelSpec]) -> None:
    """The first loads of the model b lack memory."""
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        await rig.run()
        rig.build("out_of_memory=host")
        with suppress(LlamasupError):
            await rig.models.load("b")
        assert rig.models["b"].runners[0].instance.generation > 1
        assert rig.state == "watching"
        assert rig.models.pool.crashes.count(rig.used[0], 0.0) == 0


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_crashes_of_refused_builds_are_not_those_of_the_old_one(
    tmp_path: Path, specs: list[ModelSpec]
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        for _ in range(2):
            await rig.refusal("die_at=10")
        await rig.run()
        await crash(rig, "a")
        kill(rig.models["a"].runners[0])
        await rig.models.until(lambda: rig.state == "returned")


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_model_that_cannot_return_keeps_the_new_build(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        await rig.run()
        no_server(tmp_path / "old-server")
        await crash(rig, "a")
        kill(rig.models["a"].runners[0])
        await rig.models.until(lambda: rig.state == "returned")
        assert "old-server" in str(rig.upgrade.status()["remedy"])
        assert not any("returns to its old build" in text for text in rig.texts("a"))
        assert await rig.models.ask("a").served_by() == 3


@pytest.mark.usefixtures("short_proof")
@async_test
async def test_bug_in_the_return_ends_no_other_task(
    tmp_path: Path, specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        await rig.models.load("a")
        await rig.run()
        monkeypatch.setattr(rig.models.pool, "set_runtime", broken)
        await crash(rig, "a")
        kill(rig.models["a"].runners[0])
        await rig.models.until(lambda: rig.state == "returned")
        assert "bug in llamasup" in str(rig.upgrade.status()["reason"])


@async_test
async def test_preview_shows_the_changes_of_each_plan(tmp_path: Path, specs: list[ModelSpec]) -> None:
    async with upgraded(tmp_path, *specs) as rig:
        shown = await rig.upgrade.preview(without_flag(rig.build(), "--metrics"))
        flags = {flag["flag"]: flag for flag in shown["models"][0]["flags"]}
        assert flags["--metrics"] == {"flag": "--metrics", "before": "", "after": None}
        assert [model["id"] for model in shown["models"]] == ["a", "b"]
        assert rig.models["a"].runners == []
