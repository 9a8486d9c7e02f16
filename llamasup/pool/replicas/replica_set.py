"""One model and those who wait for it: its processes come and go, its queue stays.

Says which process gets a request, and why none does where it is so. It starts and ends nothing: whoever owns
it adds runners and removes them, and shuts the gate while they are changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from llamasup.queueing.endpoint import BUSY, Endpoint, Lease, Serving, Unavailable
from llamasup.queueing.wait_estimate import retry_after_s
from llamasup.queueing.wait_queue import QueueEntry, RequestQueue
from llamasup.supervision.runner import NOT_RUNNING, InstanceRunner
from llamasup.supervision.states import Policy

if TYPE_CHECKING:
    from llamasup.pool.replicas.load_balancer import LoadBalancer

__all__ = ["ReplicaSet"]


class ReplicaSet:
    """``policy`` says who may wait, and for how long. All methods are for the event loop's thread.

    ``when_wanted`` hears of each request that begins to wait while nothing serves, or would if it might;
    ``when_left`` of each that goes unserved, with what it was told, if it was; ``when_idle`` each time that
    the last of its leases has ended. They are called from within a request's callbacks: they may shut, open,
    add and remove, and should do no more than take note.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        when_wanted: Callable[[], None] | None = None,
        when_left: Callable[[Unavailable | None], None] | None = None,
        once_idle: Callable[[], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.room = RequestQueue(
            self.serving,
            timeout_s=policy.wait_timeout_s,
            most=policy.max_queued,
            choose=self._choose,
            when_wanted=when_wanted,
            when_left=when_left,
        )
        self.runners: tuple[InstanceRunner, ...] = ()
        self.idle_since_s = 0.0
        """When the last request in flight ended (monotonic); 0: there was none. Kept for ``when_idle``."""
        self._only: InstanceRunner | None = None
        self._shut: Unavailable | None = None
        self._absent: Unavailable | None = None
        self._again_at_s: float | None = None  # when it is tried again, of which ``absent`` tells
        self._when_idle = once_idle
        self._clock = clock
        self._choice: LoadBalancer | None = None  # while there are several processes

    # --- what the proxy asks

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        """As ``Backend.lease``. The path of every request: one process, and it is the runner's answer."""
        if self._shut is not None:
            return self._shut
        if self._only is not None:
            lease = self._only.lease(infers=infers)
            return lease if isinstance(lease, Lease) or lease is BUSY else self._why_not()
        state = self.serving()
        if isinstance(state, Unavailable):
            return state
        able = self._healthy(state)
        if infers:
            able = tuple(each for each in able if each.busy < each.max_concurrent)
        return self._pick(able, infers=infers, body=body).lease(infers=infers) if able else BUSY

    def serving(self) -> Serving:
        """What serves now; or why nothing does, and whether one may wait for it."""
        if self._shut is not None:
            return self._shut
        found = tuple(endpoint for runner in self.runners if (endpoint := runner.endpoint) is not None)
        return found or self._why_not()

    @property
    def answered(self) -> int:
        """Responses that came to their end, of the generations that there are."""
        return sum(runner.answered for runner in self.runners)

    @property
    def in_flight(self) -> int:
        return sum(runner.in_flight for runner in self.runners)

    # --- what its owner does

    def add(self, runner: InstanceRunner) -> None:
        """Before it is started; it was made with ``room``."""
        if self._when_idle is not None:
            runner.on_idle = self._vacant
        self._have(*self.runners, runner)

    def remove(self, runner: InstanceRunner) -> None:
        """It has ended, or is about to. May be repeated."""
        self._have(*(each for each in self.runners if each is not runner))

    def shut(self, why: Unavailable) -> None:
        """Lease nothing from now on: those who come wait, or are refused, as ``why`` says."""
        self._shut = why
        self.room.changed()

    def open(self) -> None:
        self._shut = None
        self.room.changed()

    def allow(self, policy: Policy) -> None:
        """Who may wait from now on, how long, and how many are served at once; those who are, are."""
        self.room.allow(timeout_s=policy.wait_timeout_s, most=policy.max_queued)
        for runner in self.runners:
            runner.set_policy(policy)
        self.room.changed()

    @property
    def is_shut(self) -> bool:
        return self._shut is not None

    @property
    def absent(self) -> Unavailable | None:
        """What is told while no process serves, starts or says why not. None: what the last one says."""
        return self._absent

    @absent.setter
    def absent(self, why: Unavailable | None) -> None:
        self._absent, self._again_at_s = why, None
        self.room.changed()

    def fail(self, why: Unavailable, again_at_s: float) -> None:
        """``absent`` for now: it is tried again for whoever comes after that (monotonic)."""
        self._absent, self._again_at_s = why, again_at_s
        self.room.changed()

    # --- within

    def _have(self, *runners: InstanceRunner) -> None:
        self.runners = runners
        self._only = runners[0] if len(runners) == 1 else None
        if len(runners) < 2:
            self._choice = None
        elif self._choice is None:
            from llamasup.pool.replicas.load_balancer import LoadBalancer

            self._choice = LoadBalancer()
        self.room.changed()

    def _vacant(self, endpoint: Endpoint) -> None:
        self.idle_since_s = endpoint.idle_since_s
        if self._when_idle is not None and not self.in_flight:
            self._when_idle()

    def _why_not(self) -> Unavailable:
        """Of several processes the one speaks that can be hoped for most."""
        staying = [runner.unavailable() for runner in self.runners if not runner.is_ending]
        if staying:
            return min(staying, key=_retry_priority)
        if self._absent is not None:
            if self._again_at_s is None:
                return self._absent
            return replace(self._absent, retry_after_s=retry_after_s(self._again_at_s - self._clock()))
        return self.runners[-1].unavailable() if self.runners else NOT_RUNNING

    def _healthy(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        """Those that broke nothing off just now, if there are any."""
        if not any(each.ejected_until_s for each in endpoints):
            return endpoints
        now_s = self._clock()
        return tuple(each for each in endpoints if each.ejected_until_s <= now_s) or endpoints

    def _choose(self, entry: QueueEntry, endpoints: Sequence[Endpoint]) -> Endpoint:
        return self._pick(endpoints, infers=entry.needs_permit, body=entry.waiter.body)

    def _pick(self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes) -> Endpoint:
        """One of those that can take it. Bodies are read only for models that have several processes, but
        then also while one alone serves: what it is given now it is to be given again.
        """
        if self._choice is None:
            return endpoints[0]
        return self._choice.pick(endpoints, infers=infers, body=body)


def _retry_priority(why: Unavailable) -> tuple[bool, float]:
    """Whoever may be waited for, and comes first; of those who may not, one that says what to do."""
    if why.may_wait:
        return False, why.retry_after_s or 0.0
    return True, not why.remedy
