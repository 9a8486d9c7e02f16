"""Predicts a load of a model with other settings: the memory, and the models that it would evict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.pool.eviction_policy import Cordon, Evict, ModelSnapshot, Phase, Reject, Snapshot, decide


class Consequences(Struct, frozen=True):
    """The effects of a load. ``evicts``: ids of the models that would be unloaded. ``rejected``: why it could
    never be loaded.
    """

    evicts: tuple[str, ...] = ()
    rejected: str = ""


def consequences(snapshot: Snapshot, id_: str, needs: Mapping[str, int]) -> Consequences:
    """The consequences of a request for the model ``id_`` (a key of the snapshot), if it needed ``needs``.

    Idle models are evicted first. If they are not enough, the request waits until busy ones may be evicted,
    and then until those may go that are loading or have just been loaded.
    """
    now_s = snapshot.now_s
    others = {key: model for key, model in snapshot.models.items() if key != id_}
    after_loads = {key: _long_loaded(model) for key, model in others.items()}
    asked = replace(
        snapshot.models[id_], needs=needs, phase=Phase.ABSENT, in_flight=0, waiting=1, old_replicas={}
    )
    found = Consequences()
    for waiting_since_s, held in ((now_s, others), (-math.inf, others), (-math.inf, after_loads)):
        models = {**held, id_: replace(asked, waiting_since_s=waiting_since_s)}
        found = _read(decide(replace(snapshot, models=models)), id_)
        if found.evicts or found.rejected:
            break
    return found


def _long_loaded(model: ModelSnapshot) -> ModelSnapshot:
    """The model after its load and its time slice."""
    if model.phase is Phase.LOADING or model.phase is Phase.RESIDENT:
        return replace(model, phase=Phase.RESIDENT, resident_since_s=-math.inf)
    return model


def _read(actions: tuple[object, ...], id_: str) -> Consequences:
    evicts = tuple(
        action.id for action in actions if isinstance(action, Evict | Cordon) and action.for_id == id_
    )
    rejected = next((a.reason for a in actions if isinstance(a, Reject) and a.id == id_), "")
    return Consequences(evicts, rejected)


def needed_and_free(needs: Mapping[str, int], free: Mapping[str, int]) -> Mapping[str, Any]:
    """Compare, by device, the bytes that a model needs with the bytes that are free without an eviction."""
    return {
        name: {
            "needed_bytes": needs.get(name, 0),
            "free_bytes": free.get(name, 0),
            "fits": needs.get(name, 0) <= free.get(name, 0),
        }
        for name in dict.fromkeys((*free, *needs))
    }
