"""Many models in the memory there is: starts and ends their servers as ``core.residency`` says.

The pool owns every model, all their processes and the only timer. It decides nothing about who stays: after
everything that happens the policy is shown the world, and its verdicts are carried out (``deciding``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar, assert_never

from llamasup.errors import Conflict, DoesNotFit, LlamasupError, ModelUnknown, Stopping
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import left_of
from llamasup.pool.model import (
    Sized,
    Tenancy,
    Wish,
    absent,
    as_unavailable,
    making_room,
    policy_for,
    share_of,
)
from llamasup.pool.options import PoolOptions
from llamasup.pool.policy import (
    Evict,
    Load,
    Phase,
    Refuse,
    Resume,
    Verdict,
    WakeAt,
    World,
    Yield,
    decide,
)
from llamasup.pool.processes import Runners
from llamasup.pool.replicas.replica_set import ServedModel
from llamasup.pool.sizing import Fetch, Sizer
from llamasup.pool.unload import at_rest, end, freed
from llamasup.queueing.endpoint import Unavailable
from llamasup.supervision.events import Bus, LoadFailed, ModelLeaves, Notice, StateChanged
from llamasup.supervision.failure import failure_of, lacks_memory
from llamasup.supervision.runner import STOPPING, InstanceRunner
from llamasup.supervision.states import KillAsked, Policy, StartAsked, State, StopAsked
from llamasup.system.timers import Alarm

__all__ = ["WISH_S", "Pool", "decide_now"]


T = TypeVar("T")

# A model that could not be loaded is tried again for the first request that comes after so long. Memory that
# somebody else has taken may soon be free; a broken file is mended by people, who can say so (`load`).
RETRY_AFTER_MEMORY_S = 10.0
RETRY_AFTER_FAILURE_S = 300.0
WISH_S = 60.0
"""How long a model is wanted for a request that was told to come again, from when it should: who does not,
does not want it any more."""


class Pool:
    """All models of one llamasup. All methods are for the event loop's thread."""

    def __init__(self, options: PoolOptions, runners: Runners, bus: Bus, fetch: Fetch | None = None) -> None:
        """``fetch`` has a model here that is somewhere else; it raises a LlamasupError where it cannot."""
        self._sizer = Sizer(fetch, bus, lambda: self.options)
        self.options = options
        self.bus = bus
        self.runners = runners
        self.stopping = False
        self.running = asyncio.Event()
        self.swapping = asyncio.Lock()
        """One model at a time is changed: then there is room beside the old one more often."""
        self.tenancies: dict[str, Tenancy] = {}
        self.when_sized: Callable[[Tenancy], None] | None = None
        """Hears of each model of which it is known by now what it is."""
        # Wanted, or with a process: all that the policy has to see. Those that are served no more, too.
        self.active: dict[Tenancy, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._deciding = False
        self.alarm = Alarm(self.decide_soon)
        bus.listen(self._notice)

    # --- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. However it ends, no child is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.running.set()
                self.decide_soon()
                await self._loop.create_future()
        finally:
            self.stopping = True
            self.alarm.stop()
            for tenancy in self._all():
                tenancy.served.shut(STOPPING)

    def ask_stop(self, *, now: bool = False) -> None:
        """End all servers: kindly, or at once. No model is started any more."""
        self.stopping = True
        self.alarm.stop()
        for tenancy in self._all():
            tenancy.served.shut(STOPPING)
            tenancy.settle_claims(_stopping())
            tenancy.stop_sizing()
            for runner in tenancy.all_runners:
                runner.post(KillAsked() if now else StopAsked())

    async def ended(self) -> None:
        """Wait until no server is left, and none will start by itself."""
        for tenancy in self._all():
            for runner in tenancy.all_runners:
                await runner.until(at_rest)

    def _all(self) -> Iterable[Tenancy]:
        return dict.fromkeys((*self.tenancies.values(), *self.active))

    def use(self, options: PoolOptions) -> None:
        """From now on. What is loaded in memory that there is no longer goes as soon as it is idle."""
        before, self.options = self.options, options
        if options.budget != before.budget:
            for tenancy in self.tenancies.values():
                self.forget_failure(tenancy)
                if tenancy.phase is Phase.ABSENT:
                    tenancy.sized = None  # in another budget another plan may fit
        if options.policy != before.policy:
            for tenancy in self._all():
                tenancy.served.allow(self._policy_for(tenancy, tenancy.sized))
        self.decide_soon()

    # --- models -----------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec) -> Tenancy:
        """A model that can be loaded from now on."""
        served = ServedModel(
            policy=policy_for(spec, self.options.policy),
            when_wanted=lambda: self._asked_for(tenancy),
            when_left=lambda why: self._left(tenancy, why),
            when_idle=lambda: self._idle(tenancy),
        )
        tenancy = Tenancy(spec, served)
        served.absent = absent(spec)
        self.tenancies[spec.id] = tenancy
        return tenancy

    def forget(self, tenancy: Tenancy) -> None:
        """It has no process any more, and gets none."""
        self.runners.drop(tenancy, tenancy.all_runners)
        tenancy.runners = []
        self.active.pop(tenancy, None)
        if self.tenancies.get(tenancy.spec.id) is tenancy:
            del self.tenancies[tenancy.spec.id]
        self.decide_soon()

    def rename(self, tenancy: Tenancy, id_: str) -> None:
        """The same model under another id, which is free: its processes and those who wait stay with it."""
        del self.tenancies[tenancy.spec.id]
        tenancy.spec = replace(tenancy.spec, id=id_)
        self.tenancies[id_] = tenancy
        self.runners.rename(tenancy.all_runners, id_)
        if tenancy.error is None:
            tenancy.served.absent = absent(tenancy.spec)

    def retouch(self, tenancy: Tenancy, spec: ModelSpec) -> None:
        """Something else is said of it. Its processes stay as they are."""
        tenancy.spec = spec
        tenancy.served.allow(self._policy_for(tenancy, tenancy.sized))
        self.decide_soon()

    async def load(self, tenancy: Tenancy) -> None:
        """Until it serves. Raises why it cannot."""
        if self.stopping:
            raise _stopping()
        if tenancy.removed:
            raise ModelUnknown(f"{tenancy.spec.id} is served no more.", remedy="Name another one.")
        if tenancy.phase is Phase.RESIDENT:
            return
        claim: asyncio.Future[None] = self._loop.create_future()
        self.claim(tenancy, claim)
        try:
            await claim
        finally:
            if claim in tenancy.claims:  # whoever asked gave up
                tenancy.claims.remove(claim)
                self.decide_soon()

    def claim(self, tenancy: Tenancy, claim: asyncio.Future[None]) -> None:
        """Have it loaded for whoever waits for ``claim``."""
        self.forget_failure(tenancy)
        if not tenancy.claims:
            tenancy.claims_since_s = monotonic()
        tenancy.claims.append(claim)
        self.want(tenancy)

    async def unload(self, tenancy: Tenancy) -> None:
        """Until its memory is free. What is in flight has a drain's time; who waits has it loaded again."""
        self.forget_failure(tenancy)
        tenancy.comes_back, tenancy.wish = False, None
        tenancy.unloaded = True
        tenancy.settle_claims(
            Conflict(
                f"{tenancy.spec.id} was unloaded meanwhile.", remedy="Load it again if it is to be served."
            )
        )
        self.decide_soon()  # it may still be downloaded, for nobody
        if tenancy.phase is not Phase.ABSENT:
            await asyncio.shield(self.leave(tenancy, "asked"))

    def forget_failure(self, tenancy: Tenancy) -> None:
        """Let it be tried again."""
        if tenancy.phase is Phase.FAILED:
            self.runners.drop(tenancy, tenancy.runners)
            tenancy.runners = []
            tenancy.error = None
            # What it was made from may be gone, and can perhaps be downloaded again.
            tenancy.stop_sizing()
            tenancy.sized = None
            tenancy.served.absent = absent(tenancy.spec)

    def make_runners(self, tenancy: Tenancy, sized: Sized) -> list[InstanceRunner]:
        """Of what was sized, with the limits that hold now; at rest."""
        assert self._tasks is not None
        return self.runners.make(
            tenancy,
            sized,
            self._policy_for(tenancy, sized),
            self._tasks,
            share=lambda: share_of(sized.spec, self.left_for(tenancy)),
            when_measured=lambda: self._measured(tenancy),
        )

    def _policy_for(self, tenancy: Tenancy, sized: Sized | None) -> Policy:
        return policy_for(tenancy.spec, self.options.policy, None if sized is None else sized.spec)

    def left_for(self, tenancy: Tenancy) -> Mapping[str, int]:
        """What the others leave of the budget, and what ran of it before. Called in the threads that plan,
        too.
        """
        others = (each.needs for each in tuple(self.active) if each is not tenancy and each.holds)
        return left_of(self.options.budget, (*others, tenancy.outgoing_needs))

    async def size(self, tenancy: Tenancy, spec: ModelSpec) -> Sized:
        """See what it takes, and fetch it before if it is not here. Raises what these raise."""
        return await self._sizer.size(tenancy, spec)

    def begin_sizing(self, tenancy: Tenancy, what: str) -> asyncio.Task[Sized | LlamasupError]:
        """As it is now: what it was before is of no use any more. Cancelled once nobody wants to know."""
        tenancy.stop_sizing()
        name = f"{tenancy.spec.id}/{what}"
        task = tenancy.sizing = self.start(self._sized(tenancy, tenancy.spec), name)

        def over(_: object) -> None:
            if tenancy.sizing is task:
                tenancy.sizing = None
            self.decide_soon()

        task.add_done_callback(over)
        return task

    def size_soon(self, tenancy: Tenancy, what: str) -> None:
        """It has its size then, or cannot be loaded for now."""
        spec = tenancy.spec

        def over(task: asyncio.Task[Sized | LlamasupError]) -> None:
            outcome = None if task.cancelled() or tenancy.removed else task.result()
            if isinstance(outcome, Sized) and outcome.is_of(tenancy.spec):
                tenancy.sized = outcome
                if self.when_sized is not None:
                    self.when_sized(tenancy)
            elif isinstance(outcome, LlamasupError) and tenancy.spec is spec and tenancy.sized is None:
                self.fail(tenancy, outcome)
                self.bus.publish(LoadFailed(spec.id, outcome))

        self.begin_sizing(tenancy, what).add_done_callback(over)

    async def _sized(self, tenancy: Tenancy, spec: ModelSpec) -> Sized | LlamasupError:
        try:
            return await self.size(tenancy, spec)
        except LlamasupError as error:
            return error

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task that ends with the pool."""
        assert self._tasks is not None
        return self._tasks.create_task(work, name=name)

    # --- what happens -----------------------------------------------------------------------------------

    def _asked_for(self, tenancy: Tenancy) -> None:
        """A request waits for it; or would, and may not: then it is loaded for when it comes again."""
        if not tenancy.claims and not len(tenancy.served.room):
            self._wish(tenancy, tenancy.served.absent)
        self.want(tenancy)

    def _left(self, tenancy: Tenancy, why: Unavailable | None) -> None:
        """A request waits for it no more, unserved. Who was told when it will be here may come then."""
        if why is not None and why.cause == "downloading":
            self._wish(tenancy, why)
        self.decide_soon()

    def _wish(self, tenancy: Tenancy, told: Unavailable | None) -> None:
        now_s = monotonic()
        since_s = now_s if tenancy.wish is None else tenancy.wish.since_s
        again_s = now_s if told is None else now_s + (told.retry_after_s or 0.0)
        tenancy.wish = Wish(since_s, again_s + WISH_S)

    def want(self, tenancy: Tenancy) -> None:
        """Somebody waits for it, or has a wish."""
        tenancy.unloaded = False
        if not tenancy.removed:
            self.active[tenancy] = None
            self.decide_soon()

    def _idle(self, tenancy: Tenancy) -> None:
        """Its last request is over."""
        tenancy.count_use()
        if tenancy.yielding or any(each.wanted and not each.serves for each in self.active):
            self.decide_soon()
        elif tenancy.spec.stay.ttl_s < float("inf"):
            self.alarm.ring_at(monotonic() + tenancy.spec.stay.ttl_s)

    def _notice(self, notice: Notice) -> None:
        tenancy = self.tenancies.get(notice.model) if isinstance(notice, StateChanged) else None
        if tenancy is None or not isinstance(notice, StateChanged):
            return
        # Of its name: it may be what was served under it before.
        states = {runner.instance.state for runner in tenancy.runners}
        if states - {State.STOPPED}:
            tenancy.starting = False
        if notice.state is State.READY and State.READY in states:
            tenancy.resident_since_s = monotonic()
        self.decide_soon()

    def fail(self, tenancy: Tenancy, error: LlamasupError, why: Unavailable | None = None) -> None:
        """It cannot be loaded for now: those who wait for it hear why (as its server said it, if it had one),
        and nobody else notices (S17).
        """
        tenancy.error, tenancy.wish = error, None
        tenancy.retry_at_s = monotonic() + _retry_after_s(error)
        tenancy.served.fail(as_unavailable(error, tenancy.spec, why), tenancy.retry_at_s)
        for runner in tenancy.runners:
            if not runner.instance.at_rest:
                runner.post(StopAsked())  # none of them tries by itself in memory that is not its own
        tenancy.settle_claims(error)
        self.alarm.ring_at(tenancy.retry_at_s)

    def _measured(self, tenancy: Tenancy) -> None:
        """A load has taught what the model really takes."""
        if not (tenancy.sizing or tenancy.changing or tenancy.is_outdated or self.stopping):
            self.size_soon(tenancy, "measure")

    # --- deciding ---------------------------------------------------------------------------------------

    def decide_soon(self) -> None:
        """In the loop's next round: many requests may come in this one."""
        if not self._deciding:
            self._deciding = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        if self._tasks is not None and not self.stopping:
            decide_now(self)

    def leave(self, tenancy: Tenancy, reason: str, for_id: str = "") -> asyncio.Task[None]:
        """End its servers; from now on none of them gets a request. Done when their memory is free."""
        if tenancy.departure is None:
            self.bus.publish(ModelLeaves(tenancy.spec.id, reason, for_id))
            if tenancy.renewing:
                tenancy.stop_sizing()  # what it was to be next is looked at when it is loaded again
            tenancy.yielding, tenancy.leaving = False, True
            tenancy.served.shut(making_room(tenancy.spec, for_id))
            tenancy.departure = self.start(self._see_off(tenancy), f"{tenancy.spec.id}/leave")
        return tenancy.departure

    async def _see_off(self, tenancy: Tenancy) -> None:
        try:
            async with freed(tenancy.sized):
                await end(tenancy.all_runners)
        finally:
            tenancy.leaving = tenancy.starting = False
            tenancy.departure = None
            if not (self.stopping or tenancy.removed):
                tenancy.served.open()
            self.decide_soon()


def _stopping() -> Stopping:
    return Stopping("llamasup is stopping.", remedy="Start it again.")


def _retry_after_s(error: LlamasupError) -> float:
    return RETRY_AFTER_MEMORY_S if lacks_memory(error) else RETRY_AFTER_FAILURE_S


_REFUSED = "Make it smaller (ctx_size, parallel), pin fewer, or allow more (memory, max_loaded, groups)."


def decide_now(pool: Pool) -> None:
    now_s = monotonic()
    for tenancy in tuple(pool.active):
        if not tenancy.removed:
            _look_at(pool, tenancy, now_s)
    tenants = {each.key: each.tenant() for each in pool.active if each.sized is not None}
    for verdict in decide(World(now_s, tenants, pool.options.budget, pool.options.residency)):
        _carry_out(pool, verdict)


def _look_at(pool: Pool, tenancy: Tenancy, now_s: float) -> None:
    """What follows from how it is, whatever else is loaded."""
    _look_at_wish(pool, tenancy, now_s)
    if tenancy.serves:
        _serves(tenancy)
    if tenancy.phase is Phase.FAILED:
        if tenancy.error is None:
            runner = next(each for each in tenancy.runners if each.instance.state is State.FAILED)
            pool.fail(tenancy, failure_of(runner.instance), runner.unavailable())
        if tenancy.retry_at_s > now_s:
            pool.alarm.ring_at(tenancy.retry_at_s)
            return
        pool.forget_failure(tenancy)
    if tenancy.sized is not None and tenancy.phase is Phase.ABSENT and tenancy.is_outdated:
        pool.runners.drop(tenancy, tenancy.runners)
        tenancy.runners, tenancy.sized = [], None
    if tenancy.phase is Phase.ABSENT and not tenancy.wanted:
        if tenancy.sizing is None:
            del pool.active[tenancy]
        elif tenancy.sized is None:
            tenancy.stop_sizing()
    elif tenancy.sized is None and not (tenancy.sizing or tenancy.changing):
        pool.size_soon(tenancy, "size")


def _look_at_wish(pool: Pool, tenancy: Tenancy, now_s: float) -> None:
    if tenancy.wish is not None:
        if tenancy.wish.until_s <= now_s:
            tenancy.wish = None
        else:
            pool.alarm.ring_at(tenancy.wish.until_s)


def _serves(tenancy: Tenancy) -> None:
    """Whoever waits for no more than that has it; what was wrong with it is over."""
    tenancy.wish = None
    if tenancy.error is not None:
        tenancy.error = None
        tenancy.served.absent = absent(tenancy.spec)
    tenancy.settle_claims()


def _carry_out(pool: Pool, verdict: Verdict) -> None:
    match verdict:
        case Load(id_):
            _begin(pool, pool.tenancies[id_])
        case Evict(id_, reason, for_id):
            pool.leave(pool.tenancies[id_], reason, for_id)
        case Yield(id_, for_id):
            tenancy = pool.tenancies[id_]
            tenancy.yielding = True
            tenancy.served.shut(making_room(tenancy.spec, for_id))
        case Resume(id_):
            tenancy = pool.tenancies[id_]
            tenancy.yielding = False
            tenancy.served.open()
            _serves(tenancy)
        case Refuse(id_, reason):
            refused = DoesNotFit(f"{id_} does not fit: {reason}.", remedy=_REFUSED)
            pool.fail(pool.tenancies[id_], refused)
            pool.bus.publish(LoadFailed(id_, refused))
        case WakeAt(at_s):
            pool.alarm.ring_at(at_s)
        case _ as unreachable:
            assert_never(unreachable)


def _begin(pool: Pool, tenancy: Tenancy) -> None:
    if not tenancy.runners:
        assert tenancy.sized is not None  # nothing is loaded that was not sized
        tenancy.runners = pool.make_runners(tenancy, tenancy.sized)
    tenancy.starting = True
    for runner in tenancy.runners:
        runner.post(StartAsked())
