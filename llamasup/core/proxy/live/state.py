"""Describes what a request does now: its phase, its place in the queue, its tokens (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.answers import SlotProgress
from llamasup.core.observability.counters import HeldSlots
from llamasup.core.proxy.request import Request
from llamasup.core.queueing.endpoint import Endpoint, Lease


class LivePhase(StrEnum):
    """``ended`` is the phase of a finished request in a list that also has those in flight."""

    LOADING = "loading"  # waits until its model serves
    QUEUED = "queued"  # its model serves, and all slots are taken
    SENDING = "sending"  # its body arrives, or is being sent to llama-server
    PROMPT = "prompt"  # llama-server has the request, and has produced nothing
    GENERATING = "generating"
    ANSWERING = "answering"  # work without a slot, such as counting tokens
    ENDED = "ended"


class LiveRequest(Struct, frozen=True, kw_only=True):
    """One request in flight, as the control API shows it. Contains no prompt and no key (X13).

    ``node``: the other node that works on it. ``key``: the name of its key; None: without one. ``client``:
    its address; empty for a Unix socket.
    ``age_s``: since it arrived; ``phase_s``: since its phase began, as far as that is known. ``position``,
    ``expected_wait_s`` and ``eta_s`` (the same) are of a request that waits. ``percent`` is how much of the
    prompt is done, or of the load of its model. The token counts are those of llama-server, and None if it
    does not show which slot has the request.
    """

    id: str
    method: str
    path: str
    model: str | None
    key: str | None
    client: str
    phase: LivePhase
    age_s: float
    phase_s: float | None = None
    generation: int = 0
    node: str | None = None
    jobs: int = 1
    replayed: bool = False
    position: int | None = None
    expected_wait_s: float | None = None
    percent: float | None = None
    eta_s: float | None = None
    tokens_prompt: int | None = None
    tokens_completion: int | None = None
    tokens_per_s: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0


class InFlight(Struct, frozen=True):
    """``lease``: its lease, if it has one, to find its slots.

    ``first_byte_s``: when its answer began (monotonic); 0: not yet.
    """

    request: LiveRequest
    lease: Lease | None = None
    first_byte_s: float = 0.0


class LiveConnection(Protocol):
    """A client connection, as the control API needs it: to show its request, or to cancel it."""

    def live(self, now: float) -> InFlight | None:
        """The request in flight, if any. ``now``: monotonic."""
        ...

    def held_slots(self) -> HeldSlots | None:
        """The slots that the request in flight holds; cheaper than ``live``."""
        ...

    def waits_since(self) -> float:
        """Since when the request in flight waits for a model or a slot (monotonic); 0: it does not."""
        ...

    def interrupt(self, error: HttpError, outcome: str) -> None:
        """Abort the request in flight, if any, with ``error``. Its record gets ``outcome``."""
        ...


def phase_of(*, needs_permit: bool, is_sent: bool, has_answer: bool) -> LivePhase:
    """The phase of a request that has a lease. ``is_sent``: llama-server has its last byte."""
    if not is_sent:
        return LivePhase.SENDING
    if not needs_permit:
        return LivePhase.ANSWERING
    return LivePhase.GENERATING if has_answer else LivePhase.PROMPT


def described(
    request: Request, phase: LivePhase, now_s: float, *, model: str | None = None, since_s: float = 0.0
) -> LiveRequest:
    """The fields that every request has. ``since_s``: when its phase began (monotonic); 0: not known."""
    began_s = request.received_at or since_s or now_s
    return LiveRequest(
        id=request.id.decode("ascii"),
        method=request.head.method.decode("ascii"),
        path=request.head.path.decode("latin-1"),
        model=model,
        key=None if request.key is None else request.key.name,
        client=request.peer,
        phase=phase,
        age_s=now_s - began_s,
        phase_s=now_s - since_s if since_s else None,
        jobs=request.jobs,
        bytes_in=request.body_bytes,
    )


# --- the slots of llama-server


def slots_of(
    endpoint: Endpoint, unsent: Collection[Lease], slots: Sequence[SlotProgress]
) -> Mapping[Lease, Sequence[SlotProgress]]:
    """The slots of each request. ``unsent``: leases of requests that llama-server does not have yet.
    ``slots`` are the busy ones, in the order of their tasks.

    llama-server (b11434) numbers the tasks of its slots in the order in which their requests arrived, and
    does not say whose they are. So the requests that hold permits are matched with the slots by their order.
    If their numbers differ, because a request has just come or gone, no request gets a slot.
    """
    leases = [lease for lease in endpoint.working() if lease not in unsent]
    if sum(lease.weight for lease in leases) != len(slots):
        return {}
    found, at = {}, 0
    for lease in leases:
        found[lease] = slots[at : at + lease.weight]
        at += lease.weight
    return found


def with_progress(
    request: LiveRequest, slots: Sequence[SlotProgress], tokens_per_s: float | None
) -> LiveRequest:
    """``request`` with the progress of its slots."""
    prompt = sum(slot.prompt or 0 for slot in slots)
    done = sum(slot.done or 0 for slot in slots)
    decoded = sum(slot.decoded for slot in slots)
    return replace(
        request,
        phase=LivePhase.GENERATING if decoded else request.phase,
        percent=round(100 * done / prompt, 1) if prompt and not decoded else None,
        tokens_prompt=prompt or None,
        tokens_completion=decoded,
        tokens_per_s=tokens_per_s,
    )
