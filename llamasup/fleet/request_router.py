"""Ray Serve's choice of a replica for a request that enters at Serve: the rule of fronts. Imports Ray."""

from __future__ import annotations

import random
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llamasup.fleet.messages import routing_load
from llamasup.pool.replicas.affinity import Affinity
from llamasup.pool.replicas.conversation import Conversation, read_conversation

__all__ = ["FORWARD", "PromptRouter"]

FORWARD: Final = "forward"
"""The method of a replica that takes requests of clients. The last of its arguments is the body."""
_CONVERSATION: Final = "_llamasup_conversation"


class PromptRouter(RequestRouter):  # type: ignore[misc]  # Ray is an optional package
    """The replica with the beginning of the prompt in its cache, unless it is much busier; else the least
    busy one (``Affinity``). If Serve cannot reach it: the one of two others that has fewer requests, as with
    Serve's own router.

    Serve (2.60) makes one for each handle: it knows the requests of the ingress. A replica reports the
    requests of fronts (``record_routing_stats``).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._affinity: Affinity[ReplicaID] = Affinity()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._affinity.keep(self.curr_replicas.keys())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if len(candidate_replicas) == 1:  # most models: no prompt has to be read
            chosen = candidate_replicas[0]
        else:
            by_id = {replica.replica_id: replica for replica in candidate_replicas}
            for replica_id in by_id:
                self._affinity.add(replica_id)
            loads = [(replica_id, self._load(replica)) for replica_id, replica in by_id.items()]
            chosen = by_id[self._affinity.pick(loads, _conversation_of(pending_request))]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before a second attempt
        others = [replica for replica in candidate_replicas if replica is not chosen]
        return [[chosen], random.sample(others, min(2, len(others)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve could reach this replica, which need not be the chosen one."""
        if len(self.curr_replicas) > 1:
            self._affinity.add(replica_id)
            self._affinity.note(replica_id, _conversation_of(pending_request))

    def _load(self, replica: RunningReplica) -> float:
        return routing_load(replica.routing_stats, self.replica_queue_len_cache.get(replica.replica_id))


def _conversation_of(pending: PendingRequest | None) -> Conversation | None:
    """Read once: Serve asks again for each attempt, and a body may have 32 MiB."""
    if pending is None or pending.metadata.call_method != FORWARD or not pending.args:
        return None
    kept = vars(pending)  # it has no hash, so no weak map can have it
    if _CONVERSATION not in kept:
        kept[_CONVERSATION] = read_conversation(pending.args[-1])
    found: Conversation | None = kept[_CONVERSATION]
    return found
