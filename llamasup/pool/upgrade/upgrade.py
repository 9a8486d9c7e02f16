"""Owns one upgrade: reads the new build, proves it with one model, rolls it out, and watches it for an hour.

Each model changes its build with an ordinary rollout of the pool. It imports asyncio, and reads the clock.
``verdict.py`` and ``plans.py`` decide.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from llamasup.errors import BuildRefused, Conflict, DoesNotFit, LlamasupError, UsageInvalid
from llamasup.llama_server.inspect import Runtime, find_runtime
from llamasup.planning.memory.shares import remaining
from llamasup.pool.model import ManagedModel
from llamasup.pool.pool import Pool
from llamasup.pool.upgrade import plans
from llamasup.pool.upgrade.compare import compare
from llamasup.pool.upgrade.plans import PlanChange
from llamasup.pool.upgrade.proof import prove
from llamasup.pool.upgrade.verdict import (
    REQUESTS,
    WATCH_S,
    Accepted,
    Refused,
    Trial,
    after_crashes,
    agreement,
    speed_of,
)
from llamasup.pool.why import recording
from llamasup.supervision.runner import InstanceRunner

__all__ = ["Upgrade"]

_log = logging.getLogger(__name__)

State = Literal[
    "none", "reading", "proving", "rolling_out", "watching", "kept", "refused", "returning", "returned"
]
_UNDER_WAY = frozenset({"reading", "proving", "rolling_out", "returning"})


class _Build(Struct, frozen=True):
    """``choice``: as ``--runtime`` names it."""

    choice: str
    path: str
    version: str

    @classmethod
    def of(cls, runtime: Runtime) -> _Build:
        choice = runtime.path if runtime.kind == "binary" else runtime.kind
        return cls(choice, runtime.path, runtime.version)

    def __str__(self) -> str:
        return f"{self.path} ({self.version})" if self.version else self.path

    def as_json(self) -> dict[str, str]:
        return {"path": self.path, "version": self.version}


class _Report(Struct, frozen=True):
    state: State = "none"
    old: _Build | None = None
    new: _Build | None = None
    changes: tuple[PlanChange, ...] = ()
    model: str = ""
    trial: Trial = Trial()
    reason: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """docs/upgrade.md"""
        trial, pairs = self.trial, self.trial.pairs
        speed = speed_of(pairs)
        return {
            "state": self.state,
            "runtime": None if self.new is None else self.new.as_json(),
            "before": None if self.old is None else self.old.as_json(),
            "model": self.model or None,
            "reason": self.reason,
            "remedy": self.remedy,
            "proof": {
                "requests": trial.answered,
                "speed": round(speed.gain, 3) if speed.pairs else None,
                "text": round(agreement(pairs), 3) if pairs else None,
                "memory_bytes": trial.memory_bytes[-1] if trial.memory_bytes else None,
            },
            "models": [change.as_json() for change in self.changes],
        }


class Upgrade:
    """``models``: those that are served. ``tasks``: that run as long as the pool. ``on_runtime`` is called
    with each build that serves all models from now on. Call all methods in the event loop's thread.
    """

    def __init__(
        self,
        pool: Pool,
        models: Callable[[], Iterable[ManagedModel]],
        tasks: Callable[[], asyncio.TaskGroup],
        on_runtime: Callable[[Runtime], None],
        *,
        watch_s: float = WATCH_S,
    ) -> None:
        self._pool = pool
        self._models = models
        self._tasks = tasks
        self._on_runtime = on_runtime
        self._watch_s = watch_s
        self._report = _Report()
        self._verdicts: list[Accepted | Refused] = []
        self._watching: asyncio.Task[None] | None = None
        pool.proof = self._prove

    def status(self) -> Mapping[str, Any]:
        return self._report.as_json()

    async def preview(self, choice: str) -> Mapping[str, Any]:
        """What ``upgrade`` would change in the plans. Raises BuildRefused."""
        old, new = await self._builds(choice)
        report = _Report("none", _Build.of(old), _Build.of(new), await self._compare(old, new))
        _refuse_problems(report)
        return report.as_json()

    async def upgrade(self, choice: str) -> Mapping[str, Any]:
        """Serve all models with this build. Raises BuildRefused if it does not prove itself; then all models
        have the old one. It goes on if the caller gives up.
        """
        if self._report.state in _UNDER_WAY:
            raise Conflict(
                "An upgrade is under way.",
                remedy="Wait for its end; `llamasup upgrade` shows how far it is.",
            )
        self.close()
        self._report = _Report("reading")
        error = await asyncio.shield(self._tasks().create_task(self._caught(choice), name="upgrade"))
        if error is not None:
            raise error
        return self.status()

    async def _caught(self, choice: str) -> LlamasupError | None:
        """The error, which must not end the other tasks."""
        try:
            await self._upgrade(choice)
        except LlamasupError as error:
            self._change("refused", reason=error.message, remedy=error.remedy)
            _log.warning("upgrade: %s", error.message)
            return error
        except Exception as error:
            _log.exception("the upgrade failed")
            self._change("refused", reason="There is a bug in llamasup; its log has the traceback.")
            return LlamasupError(
                f"Internal error in llamasup: {type(error).__name__}.", remedy="See its log."
            )
        return None

    def close(self) -> None:
        """End the watch."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    # --- the steps

    async def _upgrade(self, choice: str) -> None:
        old, new = await self._builds(choice)
        before, after = _Build.of(old), _Build.of(new)
        self._report = _Report("reading", before, after, await self._compare(old, new))
        _refuse_problems(self._report)
        managed = self._canary()
        self._change("proving", model=managed.spec.id)
        if not managed.serves:
            await self._pool.load(managed)
        began_s = monotonic()
        why = await self._prove_with(managed, before, after)
        serves_since_s = monotonic()
        self._change("rolling_out", reason=why)
        await self._roll_out_to_all(before, after, why)
        self._use(new)
        self._change("watching")
        _log.info("upgrade: all models are served with %s", after)
        watch = self._watch(old, began_s, serves_since_s)
        self._watching = self._tasks().create_task(watch, name="upgrade/watch")

    async def _builds(self, choice: str) -> tuple[Runtime, Runtime]:
        options = self._pool.options
        new = await asyncio.to_thread(find_runtime, choice, options.environ)
        old = await asyncio.to_thread(find_runtime, options.runtime, options.environ)
        if os.path.realpath(new.path) == os.path.realpath(old.path):  # noqa: ASYNC240 - it was just read
            raise UsageInvalid(
                f"{new.path} is the build that llamasup runs.",
                remedy="Put the new build into its own folder, so that llamasup can return to the old one.",
            )
        return old, new

    async def _compare(self, old: Runtime, new: Runtime) -> tuple[PlanChange, ...]:
        options = self._pool.options
        specs = [managed.spec for managed in self._models()]
        builds = _Build.of(old).choice, _Build.of(new).choice
        return await asyncio.to_thread(compare, specs, options.budget, options.environ, *builds)

    def _canary(self) -> ManagedModel:
        """The model that the build is proven with. Raises BuildRefused."""
        changes = {change.id: change for change in self._report.changes}
        models = {managed.spec.id: managed for managed in self._models() if managed.spec.id in changes}
        chosen = plans.choose(
            plans.Candidate(
                changes[id_],
                managed.serves,
                managed.served.in_flight,
                remaining(self._pool.remaining_for(managed), [changes[id_].needs_before]),
                bool(managed.spec.settings.rpc),
            )
            for id_, managed in models.items()
        )
        if chosen is None:
            raise BuildRefused(
                "The new build cannot prove itself: no model that generates text fits into memory twice.",
                remedy="Unload models, or raise memory in the config, and try again.",
            )
        return models[chosen]

    async def _prove_with(self, managed: ManagedModel, before: _Build, after: _Build) -> str:
        """Why the build may serve. Raises BuildRefused; then the model has its old build."""
        verdicts = self._verdicts = []
        error = await self._roll_out(managed, after, unproven=True)
        verdict = verdicts[-1] if verdicts else None
        if error is None and isinstance(verdict, Accepted):
            self._pool.use_runtime(managed, after.choice)
            self._note("upgrade", managed, after, verdict.why)
            return verdict.why
        await self._roll_out(managed, before)
        refused = verdict if isinstance(verdict, Refused) else self._unfinished(managed, error)
        self._note("keep", managed, after, refused.why)
        raise _refusal(after, refused)

    def _unfinished(self, managed: ManagedModel, error: LlamasupError | None) -> Refused:
        """Why there is no verdict."""
        model, answered = managed.spec.id, self._report.trial.answered
        if error is None:
            return Refused(f"{model!r} was unloaded, or llamasup was stopped", judged=False)
        cause = error.message.rstrip(".")
        if isinstance(error, DoesNotFit):
            return Refused(cause, judged=False)
        if answered:
            return Refused(f"its server ended ({cause}) at request {answered + 1} of {REQUESTS}")
        return Refused(f"{model!r} does not start with it: {cause}")

    async def _prove(self, new: InstanceRunner, old: InstanceRunner) -> LlamasupError | None:
        """The ``Proof`` of the pool."""

        def on_trial(trial: Trial) -> None:
            self._report = replace(self._report, trial=trial)

        after = self._report.new
        assert after is not None  # only an upgrade makes an unproven build
        try:
            verdict = await prove(new, old, on_trial)
        except Exception:
            _log.exception("the proof of a build failed")
            verdict = Refused(
                "the proof failed because of a bug in llamasup; its log has the traceback", False
            )
        self._verdicts.append(verdict)
        if isinstance(verdict, Accepted):
            return None
        return _refusal(after, verdict)

    async def _roll_out_to_all(self, before: _Build, after: _Build, why: str) -> None:
        """Raises BuildRefused; then all models have the old build."""
        while (managed := self._with_other(after)) is not None:
            error = await self._roll_out(managed, after)
            if error is not None:
                self._note("keep", managed, after, error.message.removesuffix("."))
                await self._return(before, f"{managed.spec.id} does not start with the new one")
                model = managed.spec.id
                raise _refusal(
                    after, Refused(f"{model!r} does not start with it: {error.message.rstrip('.')}")
                )
            self._note("upgrade", managed, after, why)

    def _with_other(self, build: _Build) -> ManagedModel | None:
        return next((one for one in self._models() if one.spec.runtime != build.choice), None)

    async def _roll_out(
        self, managed: ManagedModel, build: _Build, *, unproven: bool = False
    ) -> LlamasupError | None:
        """Wait until the processes of the model, if it has any, are of this build."""
        self._pool.use_runtime(managed, build.choice, unproven=unproven)
        rollout = managed.rollout
        if not managed.rolling_out or rollout is None:
            return None
        return await asyncio.shield(rollout)

    async def _return(self, build: _Build, why: str) -> list[LlamasupError]:
        """Serve all models with the old build again. Returns the errors of those that keep the new one."""
        self._change("returning", reason=why)
        errors = []
        while (managed := self._with_other(build)) is not None:
            if (error := await self._roll_out(managed, build)) is not None:
                errors.append(error)
            self._note("return", managed, build, why)
        return errors

    def _use(self, runtime: Runtime) -> None:
        self._pool.set_runtime(_Build.of(runtime).choice)
        self._on_runtime(runtime)

    # --- after the rollout

    async def _watch(self, old: Runtime, began_s: float, serves_since_s: float) -> None:
        """Count the crashes, and put the old build back if they rise."""
        try:
            why = await self._until_crashes_rise(began_s, serves_since_s)
        except TimeoutError:
            self._change("kept")
            return
        finally:
            self._watching = None
        _log.warning("upgrade: %s is put back: %s", _Build.of(old), why)
        errors = await self._return(_Build.of(old), why)
        self._use(old)
        remedy = errors[0].message if errors else "Report the crashes to the project llama.cpp."
        self._change("returned", reason=why, remedy=remedy)

    async def _until_crashes_rise(self, began_s: float, serves_since_s: float) -> str:
        """Why they have risen. Raises TimeoutError when the build may stay."""
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._watch_s):
            while True:
                crashes = self._pool.crashes
                before = sum(began_s - self._watch_s <= at_s < began_s for at_s in crashes.times_s)
                after = sum(at_s >= serves_since_s for at_s in crashes.times_s)
                if why := after_crashes(before, after):
                    return why
                await crashes.another()

    # --- reports

    def _change(self, state: State, **changes: Any) -> None:
        self._report = replace(self._report, state=state, **changes)

    def _note(self, kind: recording.BuildKind, managed: ManagedModel, build: _Build, why: str) -> None:
        now = datetime.now(UTC)
        self._pool.decisions.add(recording.build_changed(now, managed.spec.id, kind, str(build), why))


def _refuse_problems(report: _Report) -> None:
    """Raises BuildRefused if a model has no plan with the new build."""
    problems = [(change.id, change.problem) for change in report.changes if change.problem is not None]
    if problems:
        model, first = problems[0]
        raise BuildRefused(
            f"The build {report.new} is refused: {model!r} has no plan with it: {first.message.rstrip('.')}.",
            remedy=first.remedy,
            details=tuple(f"{id_}: {error.message}" for id_, error in problems[1:]),
        )


def _refusal(build: _Build, verdict: Refused) -> BuildRefused:
    if verdict.judged:
        return BuildRefused(
            f"The build {build} is refused: {verdict.why}.", remedy="Use another build; the old one serves."
        )
    return BuildRefused(f"The build {build} is not proven: {verdict.why}.", remedy="Try again later.")
