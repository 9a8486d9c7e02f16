"""Finds the slots of llama-server that work on a request (pure).

llama-server (b11434) numbers the tasks of its slots in the order in which their requests arrived, and does
not say whose they are. So the requests that hold permits are matched with the slots by their order. If their
numbers differ, because a request has just come or gone, no request gets a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from llamasup.core.llama_server.answers import SlotProgress
from llamasup.core.proxy.live.state import LivePhase, LiveRequest
from llamasup.core.queueing.endpoint import Endpoint, Lease


def slots_of(
    endpoint: Endpoint, unsent: Collection[Lease], slots: Sequence[SlotProgress]
) -> Mapping[Lease, Sequence[SlotProgress]]:
    """The slots of each request. ``unsent``: leases of requests that llama-server does not have yet.

    ``slots`` are the busy ones, in the order of their tasks.
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
