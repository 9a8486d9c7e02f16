"""Ray Serve's choice of a replica for a request that enters at Serve: the rule of fronts. Imports Ray."""

from __future__ import annotations

import random
import time
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llamasup.fleet.messages import is_asleep, routing_load
from llamasup.pool.replicas.affinity import Affinity
from llamasup.pool.replicas.conversation import Conversation, read_conversation

__all__ = ["FORWARD", "PromptRouter"]

FORWARD: Final = "forward"
"""The method of a replica that takes requests of clients. The last of its arguments is the body."""
_CONVERSATION: Final = "_llamasup_conversation"
_WAKES: Final = "_llamasup_wakes"
_WAKES_S: Final = 5.0
"""By then, a replica that was woken has reported it: each second to Serve, which tells it to its routers."""


class PromptRouter(RequestRouter):  # type: ignore[misc]  # Ray is an optional package
    """The replica with the beginning of the prompt in its cache, unless it is much busier; else the least
    busy one (``Affinity``). If Serve cannot reach it: one of the others, the least busy one first.

    Serve (2.60) makes one for each handle: it knows the requests of the ingress. A replica reports the
    requests of fronts (``record_routing_stats``).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._affinity: Affinity[ReplicaID] = Affinity()
        self._woken_s: dict[ReplicaID, float] = {}  # when a sleeping replica got a request

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls it also for new reports. One that sleeps has lost its caches."""
        super().update_replicas(replicas)
        known = self.curr_replicas
        self._woken_s = {
            replica_id: at_s
            for replica_id, at_s in self._woken_s.items()
            if replica_id in known and self._is_woken(replica_id)
        }
        self._affinity.keep(
            [
                replica_id
                for replica_id, replica in known.items()
                if not is_asleep(replica.routing_stats) or replica_id in self._woken_s
            ]
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before a second attempt
        if len(candidate_replicas) == 1:  # most models: no prompt has to be read
            return [candidate_replicas]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        for replica_id in by_id:
            self._affinity.add(replica_id)
        loads = {replica_id: self._load(replica) for replica_id, replica in by_id.items()}
        chosen = by_id.pop(self._affinity.pick(list(loads.items()), _conversation_of(pending_request)))
        wakes = self._note_waking(chosen)
        if wakes and pending_request is not None:
            vars(pending_request)[_WAKES] = chosen.replica_id
        others = list(by_id)
        random.shuffle(others)  # equal ones in any order
        others.sort(key=loads.__getitem__)
        return [[chosen], *([by_id[replica_id]] for replica_id in others[:2])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve could reach this replica, which need not be the chosen one."""
        chosen = vars(pending_request).pop(_WAKES, replica_id)
        if chosen != replica_id:
            self._woken_s.pop(chosen, None)  # it sleeps on
        replica = self.curr_replicas.get(replica_id)
        if replica is not None and len(self.curr_replicas) > 1:
            self._affinity.add(replica_id)
            self._affinity.note(replica_id, _conversation_of(pending_request))
            self._note_waking(replica)

    def _note_waking(self, replica: RunningReplica) -> bool:
        """Whether it has slept until now."""
        if not is_asleep(replica.routing_stats):
            return False
        before = self._is_woken(replica.replica_id)
        self._woken_s[replica.replica_id] = time.monotonic()
        return not before

    def _is_woken(self, replica_id: ReplicaID) -> bool:
        woken_s = self._woken_s.get(replica_id)
        return woken_s is not None and time.monotonic() - woken_s < _WAKES_S

    def _load(self, replica: RunningReplica) -> float:
        sent = self.replica_queue_len_cache.get(replica.replica_id)
        return routing_load(replica.routing_stats, sent, woken=self._is_woken(replica.replica_id))


def _conversation_of(pending: PendingRequest | None) -> Conversation | None:
    """Read once: Serve asks again for each attempt, and a body may have 32 MiB."""
    if pending is None or pending.metadata.call_method != FORWARD or not pending.args:
        return None
    kept = vars(pending)  # it has no hash, so no weak map can have it
    if _CONVERSATION not in kept:
        kept[_CONVERSATION] = read_conversation(pending.args[-1])
    found: Conversation | None = kept[_CONVERSATION]
    return found
