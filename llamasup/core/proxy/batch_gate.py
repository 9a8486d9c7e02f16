"""Lets the requests of batches through while no other client uses a model, and ends them when one comes.

A batch sends a refused or ended request again, so no request waits here. ``queueing/batch_lane.py`` decides
when the lane is open, and when a batch gets a turn although it is closed. A turn uses only a free slot: it
ends as soon as another client's request has to wait.
"""

from __future__ import annotations

from typing import Final, Protocol

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.observability.counters import GAVE_WAY
from llamasup.core.proxy.request import Request
from llamasup.core.queueing.batch_lane import TURN_AFTER_S, BatchLane

WAITS: Final = HttpError(
    503,
    "other clients use the models; a batch waits until they pause",
    "unavailable_error",
    "batch_waits",
    "send it again later",
)
PREEMPTED: Final = HttpError(
    503,
    "another client needs the models, and this request is of a batch",
    "unavailable_error",
    "batch_preempted",
    "send it again later",
)


class _Interruptible(Protocol):
    def interrupt(self, error: HttpError, outcome: str) -> None: ...


class BatchGate:
    """For one proxy. ``others``: the requests of other clients for a model, in flight or waiting.

    ``is_used``: there was a request of a batch. Before, the proxy itself counts ``others``, and notes the end
    of the last one (``last_s``).
    """

    def __init__(self) -> None:
        self._lane = BatchLane()
        self._running: dict[Request, _Interruptible] = {}
        self._turn: Request | None = None  # the request of a batch that runs together with other clients
        self._turn_began_s = 0.0
        self.others = 0
        self.is_used = False
        self.last_s = float("-inf")

    def __repr__(self) -> str:
        return f"<BatchGate: {len(self._running)} of batches, {self.others} others>"

    def enter(self, request: Request, connection: _Interruptible, now_s: float) -> HttpError | None:
        """A request for a model arrives. Returns the refusal if it is of a batch that has to wait."""
        if request.in_lane:  # its body was forwarded, and is buffered now
            return None
        if not request.is_batch:
            request.in_lane = True
            self.others += 1
            self._lane.arrived(now_s)
            if self._running:
                self._end_running(now_s)
            return None
        if not self.is_used:
            self.is_used = True
            self._lane.ended(self.last_s)
        wait_s = self._lane.opens_in_s(now_s, self.others)
        if not wait_s:
            self._lane.served()
        elif self._turn is not None:
            return replace(WAITS, retry_after_s=wait_s)
        elif turn_in_s := self._lane.turn_in_s(now_s):
            return replace(WAITS, retry_after_s=min(wait_s, turn_in_s))
        else:
            self._turn, self._turn_began_s = request, now_s
        request.in_lane = True
        self._running[request] = connection
        return None

    def leave(self, request: Request, now_s: float) -> None:
        """The request has finished."""
        request.in_lane = False
        if self._running.pop(request, None) is None:
            self.others -= 1
            self._lane.ended(now_s)
        elif request is self._turn:
            self._turn = None
            self._lane.turn_ended(now_s, now_s - self._turn_began_s)

    def may_wait(self, request: Request) -> HttpError | None:
        """A request finds no free slot, or its model is not loaded. Returns the refusal if it has a turn;
        the turn of a batch ends for a request of another client.
        """
        turn = self._turn
        if turn is None:
            return None
        if request is turn:
            return replace(WAITS, retry_after_s=TURN_AFTER_S)
        if not request.is_batch:
            self._running[turn].interrupt(replace(PREEMPTED, retry_after_s=TURN_AFTER_S), GAVE_WAY)
        return None

    def _end_running(self, now_s: float) -> None:
        error = replace(PREEMPTED, retry_after_s=self._lane.opens_in_s(now_s, self.others))
        for request, connection in tuple(self._running.items()):
            if request is not self._turn:
                connection.interrupt(error, GAVE_WAY)
