"""The processes of one model behind one queue, which outlives them.

Decides which process gets a request, or why none does. Its owner adds and removes runners, and pauses it
while they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.endpoint import BUSY, Endpoint, Lease, Serving, permits_of
from llamasup.core.queueing.request_queue import Preference, QueueEntry, RequestQueue
from llamasup.core.queueing.wait_estimate import ServedLoad, retry_after_s
from llamasup.core.settings.model import Repairs
from llamasup.core.supervision.not_serving import NOT_RUNNING
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy

if TYPE_CHECKING:
    from llamasup.core.pool.replicas.load_balancer import LoadBalancer


class ReplicaSet:
    """The processes of one model and their queue, which ``policy`` limits. Call all methods in the thread of
    the event loop.

    ``on_wanted`` and ``on_unserved``: see ``RequestQueue``. ``on_idle`` is called each time the last lease
    ends. A request's callbacks call them: they may pause, resume, add and remove, and must return quickly.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        on_wanted: Callable[[], None] | None = None,
        on_unserved: Callable[[HttpError | None], None] | None = None,
        on_idle: Callable[[], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.queue = RequestQueue(
            self.serving,
            timeout_s=policy.wait_timeout_s,
            max_waiting=policy.max_queued,
            continues_streams=policy.continue_streams,
            choose=self._choose,
            prefer=self._prefer,
            on_wanted=on_wanted,
            on_unserved=on_unserved,
        )
        self.repairs = _prepared(policy.repairs)
        self.runners: tuple[InstanceRunner, ...] = ()
        self.idle_since_s = 0.0
        """The end of the last request in flight (monotonic); 0: there was none. Recorded with ``on_idle``."""
        self._only: InstanceRunner | None = None
        self._paused: HttpError | None = None
        self.unavailable_reason: HttpError | None = None
        """The reason while no process serves, starts or has its own; None: that of the last process."""
        self._retry_at_s: float | None = None  # the time of the next try, for ``unavailable_reason``
        self._on_idle = on_idle
        self._clock = clock
        self._balancer: LoadBalancer | None = None  # while there are several processes

    def __repr__(self) -> str:
        paused = ", paused" if self.is_paused else ""
        return f"<ReplicaSet of {list(self.runners)!r}, {self.queue!r}{paused}>"

    # --- for the proxy
    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        """Lease an endpoint. It is on the path of every request, so a single process answers itself."""
        if self._paused is not None:
            return self._paused
        if self._only is not None:
            lease = self._only.lease(infers=infers)
            return lease if type(lease) is Lease or lease is BUSY else self._unavailable()
        state = self.serving()
        if isinstance(state, HttpError):
            return state
        eligible = self._healthy(state)
        if infers:
            eligible = tuple(endpoint for endpoint in eligible if endpoint.busy < endpoint.max_concurrent)
        return self._pick(eligible, infers=infers, body=body).lease(infers=infers) if eligible else BUSY

    def serving(self) -> Serving:
        """The endpoints that serve, or why none does."""
        if self._paused is not None:
            return self._paused
        found = tuple(endpoint for runner in self.runners if (endpoint := runner.endpoint) is not None)
        return found or self._unavailable()

    def load(self) -> ServedLoad:
        state, waiting = self.serving(), len(self.queue)
        has_room = not self.queue.is_full
        if not isinstance(state, HttpError):
            slots, free = permits_of(state)
            return ServedLoad(slots, free, waiting, can_serve=has_room or free > 0)
        loads = state.queueable and bool(self.runners)
        return ServedLoad(0, 0, waiting, loads, state.eta_s, state.queueable and has_room)

    @property
    def answered(self) -> int:
        """The completed responses of the current generations."""
        return sum(runner.answered for runner in self.runners)

    @property
    def in_flight(self) -> int:
        return sum(runner.in_flight for runner in self.runners)

    # --- for its owner
    def attach(self, runner: InstanceRunner) -> None:
        """Call this, or ``add``, before the start of a runner that has this ``queue``."""
        if self._on_idle is not None:
            runner.on_idle = self._endpoint_idle

    def add(self, runner: InstanceRunner) -> None:
        """Send it requests as soon as it serves. May be repeated."""
        if runner not in self.runners:
            self.attach(runner)
            self._set_runners(*self.runners, runner)

    def remove(self, runner: InstanceRunner) -> None:
        """The runner has stopped, or will. May be repeated."""
        self._set_runners(*(other for other in self.runners if other is not runner))

    def pause(self, why: HttpError) -> None:
        """Grant no leases: new requests queue, or are rejected if ``why`` is not queueable."""
        self._paused = why
        self.queue.changed()

    def resume(self) -> None:
        self._paused = None
        self.queue.changed()

    def apply_policy(self, policy: Policy) -> None:
        """Use these limits for new requests."""
        self.queue.set_limits(
            timeout_s=policy.wait_timeout_s,
            max_waiting=policy.max_queued,
            continues_streams=policy.continue_streams,
        )
        self.repairs = _prepared(policy.repairs)
        for runner in self.runners:
            runner.set_policy(policy)
        self.queue.changed()

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def explain(self, why: HttpError | None, retry_at_s: float | None = None) -> None:
        """Set ``unavailable_reason``. ``retry_at_s``: the time of the next try (monotonic), if one is due."""
        self.unavailable_reason, self._retry_at_s = why, retry_at_s
        self.queue.changed()

    # --- private
    def _set_runners(self, *runners: InstanceRunner) -> None:
        self.runners = runners
        self._only = runners[0] if len(runners) == 1 else None
        if len(runners) < 2:
            self._balancer = None
        elif self._balancer is None:
            from llamasup.core.pool.replicas.load_balancer import LoadBalancer

            self._balancer = LoadBalancer()
        self.queue.changed()

    def _endpoint_idle(self, endpoint: Endpoint) -> None:
        self.idle_since_s = endpoint.idle_since_s
        if self._on_idle is not None and not self.in_flight:
            self._on_idle()

    def _unavailable(self) -> HttpError:
        """The reason of the process that is likely to serve first."""
        staying = [runner.unavailable() for runner in self.runners if not runner.is_ending]
        if staying:
            return min(staying, key=_retry_priority)
        why = self.unavailable_reason
        if why is not None:
            if self._retry_at_s is None:
                return why
            return replace(why, retry_after_s=retry_after_s(self._retry_at_s - self._clock()))
        return self.runners[-1].unavailable() if self.runners else NOT_RUNNING

    def _healthy(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        """The endpoints that are not ejected, or all if all are."""
        if not any(endpoint.ejected_until_s for endpoint in endpoints):
            return endpoints
        now_s = self._clock()
        return tuple(endpoint for endpoint in endpoints if endpoint.ejected_until_s <= now_s) or endpoints

    def _choose(self, entry: QueueEntry, endpoints: Sequence[Endpoint]) -> Endpoint:
        return endpoints[0] if self._balancer is None else self._balancer.pick_for(entry, endpoints)

    def _prefer(self, serving: Sequence[Endpoint]) -> Preference | None:
        return None if self._balancer is None else self._balancer.preference(serving)

    def _pick(self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes) -> Endpoint:
        """Pick one of ``endpoints``. The balancer of several processes also sees requests while only one
        serves, so that their next turns go to the same process.
        """
        if self._balancer is None:
            return endpoints[0]
        return self._balancer.pick(endpoints, infers=infers, body=body)


def _prepared(repairs: Repairs) -> Repairs:
    if repairs.json:
        from llamasup.core.llama_server.schema_check import (
            import_package,  # here, because few models need it
        )

        import_package()
    return repairs


def _retry_priority(why: HttpError) -> tuple[bool, float]:
    """Queueable reasons first, the shortest wait first; then reasons with a remedy."""
    if why.queueable:
        return False, why.retry_after_s or 0.0
    return True, not why.remedy
