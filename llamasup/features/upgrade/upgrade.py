"""Owns one upgrade: reads the new build, proves it with one model, rolls it out, and watches it for an hour.

Each model changes its build with an ordinary rollout of the pool. It imports asyncio, and reads the clock.
``verdict.py`` decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.inspect import Runtime, find_runtime
from llamasup.core.planning.memory.shares import remaining
from llamasup.core.pool.estimate import estimate_model
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.model_states import ModelState
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.why import recording
from llamasup.core.supervision.not_serving import lacks_memory
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.errors import (
    BuildRefused,
    BuildUnproven,
    Conflict,
    LlamasupError,
    RuntimeMissing,
    Stopping,
    UsageInvalid,
)
from llamasup.features.upgrade.proof import compare, prove
from llamasup.features.upgrade.verdict import (
    REQUESTS,
    WATCH_S,
    Accepted,
    Candidate,
    PlanChange,
    Refused,
    Trial,
    after_crashes,
    agreement,
    choose,
    refusal,
    shown_failure,
    speed_of,
)

__all__ = ["Upgrade"]

_log = logging.getLogger(__name__)

State = Literal[
    "none", "reading", "proving", "rolling_out", "watching", "kept", "refused", "returning", "returned"
]
_BUG = "There is a bug in llamasup; its log has the traceback."


class _Swap(Struct, frozen=True):
    """A change from ``old`` to ``new``."""

    old: Runtime
    new: Runtime


def _named(build: Runtime) -> str:
    return f"{build.path} ({build.version})" if build.version else build.path


def _as_json(build: Runtime | None) -> dict[str, str] | None:
    return None if build is None else {"path": build.path, "version": build.version}


class _Report(Struct, frozen=True):
    state: State = "none"
    old: Runtime | None = None
    new: Runtime | None = None
    changes: tuple[PlanChange, ...] = ()
    model: str = ""
    trial: Trial = Trial()
    reason: str = ""
    remedy: str = ""
    refused: Refused | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object of docs/upgrade.md."""
        trial, pairs = self.trial, self.trial.pairs
        speed = speed_of(pairs)
        return {
            "state": self.state,
            "runtime": _as_json(self.new),
            "before": _as_json(self.old),
            "model": self.model or None,
            "reason": self.reason,
            "remedy": self.remedy,
            "proof": {
                "requests": trial.answered,
                "speed": round(speed.gain, 3) if speed.pairs else None,
                "text": round(agreement(pairs), 3) if pairs else None,
                "memory_bytes": trial.memory_bytes[-1] if trial.memory_bytes else None,
                **shown_failure(self.refused),
            },
            "models": [change.as_json() for change in self.changes],
        }


class Upgrade:
    """Upgrades the build. ``models`` are those that are served. ``tasks``: that run as long as the pool.
    ``on_runtime`` is called with each build that serves all models from now on. Call all methods in the event
    loop's thread.
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
        self._upgrading: asyncio.Task[LlamasupError | None] | None = None
        self._watching: asyncio.Task[None] | None = None
        pool.proof = self._prove

    def status(self) -> Mapping[str, Any]:
        return self._report.as_json()

    async def preview(self, choice: str) -> Mapping[str, Any]:
        """Return what ``upgrade`` would change in the plans. A model with a ``problem`` refuses the build."""
        new = await self._find(choice)
        swap = _Swap(await self._find(self._pool.options.runtime), new)
        self._refuse_running(swap)
        return _Report("none", swap.old, swap.new, await self._compare(swap)).as_json()

    async def upgrade(self, choice: str) -> Mapping[str, Any]:
        """Serve all models with this build. Raises BuildRefused if it does not prove itself; then all models
        have the old one. It continues if the caller gives up. A build that serves is watched until
        another one serves.
        """
        if self._under_way is not None or self._report.state == "returning":
            raise Conflict(
                "An upgrade is under way.",
                remedy="Wait until it has finished; `llamasup upgrade` shows its progress.",
            )
        self._upgrading = self._tasks().create_task(self._caught(choice), name="upgrade")
        error = await asyncio.shield(self._upgrading)
        if error is not None:
            raise error
        return self.status()

    async def _caught(self, choice: str) -> LlamasupError | None:
        """The error, which must not end the other tasks."""
        swap: _Swap | None = None
        try:
            new = await self._find(choice)
            try:
                old = await self._find(self._pool.options.runtime)
            except RuntimeMissing as missing:
                await self._take(new, missing)
                return None
            found = _Swap(old, new)
            self._refuse_running(found)
            swap = found
            self._report = _Report("reading", swap.old, swap.new)
            await self._upgrade(swap)
        except LlamasupError as error:
            if swap is not None:  # otherwise nothing has begun
                self._change("refused", reason=error.message, remedy=error.remedy)
            said = (f"llama-server said: {line}" for line in error.lines)
            _log.warning("upgrade: %s", " ".join((error.message, error.remedy, *error.details, *said)))
            return error
        except Exception as error:
            _log.exception("the upgrade failed")
            if swap is not None:
                with suppress(Exception):
                    await self._return(swap.old, _BUG)
                self._change("refused", reason=_BUG)
            return LlamasupError(
                f"Internal error in llamasup: {type(error).__name__}.", remedy="See its log."
            )
        return None

    @property
    def _under_way(self) -> asyncio.Task[LlamasupError | None] | None:
        return None if self._upgrading is None or self._upgrading.done() else self._upgrading

    def close(self) -> None:
        """End the watch."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    # --- the steps

    async def _upgrade(self, swap: _Swap) -> None:
        before, after = swap.old, swap.new
        self._change("reading", changes=await self._compare(swap))
        _refuse_problems(after, self._report.changes)
        managed = self._canary()
        self._change("proving", model=managed.spec.id)
        if not managed.serves:
            await self._load(managed)
        began_s = monotonic()
        why = await self._prove_with(managed, before, after)
        serves_since_s = monotonic()
        self._change("rolling_out", reason=why)
        left = await self._roll_out_to_all(before, after, why)
        self.close()
        self._use(swap.new)
        self._change("watching", reason="; ".join((why, *left)))
        _log.info("upgrade: all models are served with %s", _named(after))
        watch = self._watch(self._report, swap, began_s, serves_since_s)
        self._watching = self._tasks().create_task(watch, name="upgrade/watch")

    async def _load(self, managed: ManagedModel) -> None:
        """Load the model with the old build. Raises BuildUnproven."""
        try:
            await self._pool.load(managed)
        except LlamasupError as error:
            if self._pool.stopping:
                raise
            raise BuildUnproven(
                f"The new build cannot prove itself: {managed.spec.id!r} does not load with the old build: "
                f"{error.message}",
                remedy=error.remedy,
            ) from error

    async def _find(self, choice: str | None) -> Runtime:
        """The build, whose path is that of its file: a link to it may change while it serves."""
        environ = self._pool.options.environ
        found = await asyncio.to_thread(find_runtime, choice, environ)
        real = os.path.realpath(found.path)  # noqa: ASYNC240 - it was just read
        if found.kind == "embedded" or real == found.path:
            return found
        return await asyncio.to_thread(find_runtime, real, environ)

    def _refuse_running(self, swap: _Swap) -> None:
        if swap.new.path == swap.old.path:
            raise UsageInvalid(
                f"{swap.new.path} is the build that llamasup runs.",
                remedy="Put the new build into its own folder, so that llamasup can return to the old one.",
            )

    async def _take(self, new: Runtime, missing: RuntimeMissing) -> None:
        """Serve all models with the new build without a proof: with the file of the old one gone, nothing
        can be compared, and its servers cannot start again.
        """
        why = f"without a proof, because the old build is gone: {missing.message.rstrip('.')}"
        _log.warning("upgrade: the models get %s %s", _named(new), why)
        self.close()
        self._report = _Report("rolling_out", new=new, reason=why)
        while (managed := self._with_other(new)) is not None:
            if await self._roll_out(managed, new) is None:
                self._note("upgrade", managed, new, why)
        self._use(new)
        self._change("kept")

    async def _compare(self, swap: _Swap) -> tuple[PlanChange, ...]:
        """A downloaded model is read from its file here, which is known once it was loaded."""
        options = self._pool.options
        specs = [managed.found for managed in self._models()]
        builds = swap.old.choice, swap.new.choice
        return await asyncio.to_thread(compare, specs, options.budget, options.environ, *builds)

    def _canary(self) -> ManagedModel:
        """The model that the build is proven with. Raises BuildUnproven."""
        changes = {change.id: change for change in self._report.changes}
        models = {managed.spec.id: managed for managed in self._models() if managed.spec.id in changes}
        chosen = choose(
            Candidate(
                changes[id_],
                managed.serves,
                managed.served.in_flight,
                remaining(self._pool.remaining_for(managed), [changes[id_].needs_before]),
                bool(managed.spec.settings.rpc),
            )
            for id_, managed in models.items()
        )
        if chosen is None:
            raise BuildUnproven(
                "The new build cannot prove itself: no model that generates text fits into memory twice.",
                remedy="Unload models, or raise memory in the config. Load a model that is downloaded once. "
                "Then try again.",
            )
        return models[chosen]

    async def _prove_with(self, managed: ManagedModel, before: Runtime, after: Runtime) -> str:
        """Return why the build may serve. Raises BuildRefused; then the model has its old build."""
        verdicts = self._verdicts = []
        error = await self._roll_out(managed, after, unproven=True)
        verdict = verdicts[-1] if verdicts else None
        if isinstance(verdict, Accepted):
            self._pool.use_runtime(managed, after.choice)
            self._note("upgrade", managed, after, verdict.why)
            return verdict.why
        if isinstance(verdict, Refused):
            refused = verdict
        else:
            refused = await self._unfinished(managed, before, error)
        await self._roll_out(managed, before)
        self._note("keep", managed, after, refused.why)
        self._report = replace(self._report, refused=refused)
        raise refusal(_named(after), refused)

    async def _unfinished(
        self, managed: ManagedModel, before: Runtime, error: LlamasupError | None
    ) -> Refused:
        """Return why there is no verdict."""
        model, answered = managed.spec.id, self._report.trial.answered
        if error is None:
            return Refused(f"{model!r} was changed or unloaded during the proof", judged=False)
        cause = error.message.rstrip(".")
        if isinstance(error, BuildRefused) or not await self._is_of_build(managed, before, error):
            return Refused(cause, judged=False)
        if answered:
            why = f"its server ended ({cause}) at request {answered + 1} of {REQUESTS}"
            return Refused(why, lines=error.lines)
        return Refused(f"{model!r} does not start with it: {cause}", lines=error.lines)

    async def _is_of_build(self, managed: ManagedModel, before: Runtime, error: LlamasupError) -> bool:
        """Whether the old build can load the model that has failed with ``error``, as far as is known."""
        if lacks_memory(error) or managed.state is ModelState.FAILED:
            return False  # FAILED: the old build was tried again
        options, spec = self._pool.options, managed.found
        if spec.is_remote:
            return True
        try:
            await asyncio.to_thread(estimate_model, spec, options.budget, before.choice, options.environ)
        except LlamasupError:
            return False
        return True

    async def _prove(self, new: InstanceRunner, old: InstanceRunner) -> LlamasupError | None:
        """The ``Proof`` of the pool."""

        def on_trial(trial: Trial) -> None:
            self._report = replace(self._report, trial=trial)

        after, verdicts = self._report.new, self._verdicts
        assert after is not None  # only an upgrade makes an unproven build
        try:
            verdict = await prove(new, old, on_trial)
        except Exception:
            _log.exception("the proof of a build failed")
            verdict = Refused(
                "the proof failed because of a bug in llamasup; its log has the traceback", False
            )
        verdicts.append(verdict)
        if isinstance(verdict, Accepted):
            return None
        return refusal(_named(after), verdict)

    async def _roll_out_to_all(self, before: Runtime, after: Runtime, why: str) -> list[str]:
        """The models that no build can load now, with their errors. Raises BuildRefused; then all models have
        the old build.
        """
        left = []
        while (managed := self._with_other(after)) is not None:
            error = await self._roll_out(managed, after)
            if error is None:
                self._note("upgrade", managed, after, why)
                continue
            model, cause = managed.spec.id, error.message.rstrip(".")
            self._note("keep", managed, after, cause)
            if await self._is_of_build(managed, before, error):
                await self._return(before, f"{model} does not start with the new one")
                why = f"{model!r} does not start with it: {cause}"
                refused = Refused(why, lines=error.lines)
                self._report = replace(self._report, refused=refused)
                raise refusal(_named(after), refused)
            left.append(f"{model!r} gets the build with its next load; now it cannot be loaded: {cause}")
        return left

    def _with_other(self, build: Runtime) -> ManagedModel | None:
        return next((one for one in self._models() if one.spec.runtime != build.choice), None)

    async def _roll_out(
        self, managed: ManagedModel, build: Runtime, *, unproven: bool = False
    ) -> LlamasupError | None:
        """Wait until the processes of the model, if it has any, are of this build. Raises Stopping."""
        self._pool.use_runtime(managed, build.choice, unproven=unproven)
        rollout = managed.rollout
        error = None
        if managed.rolling_out and rollout is not None:
            error = await asyncio.shield(rollout)
        if self._pool.stopping:
            raise Stopping("llamasup is stopping.", remedy="Start it again.")
        return error

    async def _return(self, build: Runtime, why: str) -> list[LlamasupError]:
        """Serve all models with the old build again. Returns the errors of those that keep the new one."""
        self._change("returning", reason=why)
        errors = []
        while (managed := self._with_other(build)) is not None:
            if (error := await self._roll_out(managed, build)) is not None:
                errors.append(error)
            else:
                self._note("return", managed, build, why)
        return errors

    def _use(self, runtime: Runtime) -> None:
        self._pool.set_runtime(runtime.choice)
        self._on_runtime(runtime)

    # --- after the rollout

    async def _watch(self, report: _Report, swap: _Swap, began_s: float, serves_since_s: float) -> None:
        """Count the crashes, and return to the old build if they rise. It must not end the other tasks."""
        try:
            why = await self._until_crashes_rise(swap, began_s, serves_since_s)
            while (upgrading := self._under_way) is not None:
                await asyncio.wait([upgrading])  # a newer build that serves ends this watch
            await self._return_to(report, swap, why)
        except TimeoutError:
            if self._report is report:
                self._change("kept")
        except LlamasupError as error:
            self._change("returned", reason=error.message, remedy=error.remedy)
        except Exception:
            _log.exception("the return to the old build failed")
            self._change("returned", reason=_BUG)

    async def _return_to(self, report: _Report, swap: _Swap, why: str) -> None:
        _log.warning("upgrade: the models return to %s: %s", _named(swap.old), why)
        self._report = report
        errors = await self._return(swap.old, why)
        self._use(swap.old)
        remedy = errors[0].message if errors else "Report the crashes to the project llama.cpp."
        self._change("returned", reason=why, remedy=remedy)

    async def _until_crashes_rise(self, swap: _Swap, began_s: float, serves_since_s: float) -> str:
        """Return why the crashes have risen. Raises TimeoutError when the build may stay."""
        crashes, before, after = self._pool.crashes, swap.old.choice, swap.new.choice
        old_ones = crashes.count(before, began_s - self._watch_s, began_s)
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._watch_s):
            while not (why := after_crashes(old_ones, crashes.count(after, serves_since_s))):
                await crashes.another()
        return why

    # --- reports

    def _change(self, state: State, **changes: Any) -> None:
        self._report = replace(self._report, state=state, **changes)

    def _note(self, kind: recording.BuildKind, managed: ManagedModel, build: Runtime, why: str) -> None:
        now = datetime.now(UTC)
        self._pool.decisions.add(recording.build_changed(now, managed.spec.id, kind, _named(build), why))


def _refuse_problems(build: Runtime, changes: Iterable[PlanChange]) -> None:
    """Raises BuildRefused if a model has no plan with the new build."""
    problems = [(change.id, change.problem) for change in changes if change.problem is not None]
    if problems:
        model, first = problems[0]
        raise BuildRefused(
            f"The build {_named(build)} is refused: {model!r} has no plan with it: "
            f"{first.message.rstrip('.')}.",
            remedy=first.remedy,
            details=tuple(f"{id_}: {error.message}" for id_, error in problems[1:]),
        )
