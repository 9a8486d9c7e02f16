"""Ray Serve's choice of a replica for a request that enters at Serve: the rule of fronts. Imports Ray."""

from __future__ import annotations

import math
import random
import time
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llamasup.core.pool.replicas.affinity import Affinity
from llamasup.core.pool.replicas.conversation import Conversation, read_conversation
from llamasup.fleet.messages import is_asleep, routing_load

FORWARD: Final = "forward"
"""The method of a replica that takes requests of clients. The last of its arguments is the body."""
_CONVERSATION: Final = "_llamasup_conversation"
_CHOSEN: Final = "_llamasup_chosen"
_REPORTED_S: Final = 5.0
"""After this time, Serve's routers know that a replica is awake: it reports each second, and they learn it up
to three seconds late.
"""


class PromptRouter(RequestRouter):  # type: ignore[misc]  # Ray is an optional package
    """The replica with the beginning of the prompt in its cache, unless it is full or much busier; else the
    least busy one (``Affinity``). If Serve cannot reach it: one of the others, the least busy one first.

    Serve (2.60) makes one for each handle: it knows the requests of the ingress. A replica reports the
    requests of fronts (``record_routing_stats``).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._affinity: Affinity[ReplicaID] = Affinity()
        self._asleep: set[ReplicaID] = set()  # by the reports
        # When a request last chose a replica, and when Serve last reached one with a request.
        self._chosen_s: dict[ReplicaID, float] = {}
        self._reached_s: dict[ReplicaID, float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note new replicas and reports. A sleeping replica has lost its caches."""
        super().update_replicas(replicas)
        known = self.curr_replicas
        for times in (self._chosen_s, self._reached_s):
            for gone in times.keys() - known.keys():
                del times[gone]
        asleep = {replica_id for replica_id, replica in known.items() if is_asleep(replica.routing_stats)}
        emptied = {
            replica_id
            for replica_id in asleep
            if replica_id not in self._asleep or not self._may_be_awake(replica_id)
        }
        self._affinity.keep(known.keys() - emptied)
        self._asleep = asleep

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before a second attempt
            self._take_back(pending_request)  # Serve reached no replica of its first attempt
        if len(candidate_replicas) == 1:  # most models: no prompt has to be read
            return [candidate_replicas]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        for replica_id in by_id:
            self._affinity.add(replica_id)
        loads = {replica_id: self._load(replica) for replica_id, replica in by_id.items()}
        # A request at a full replica waits for it, even when another replica has a free slot.
        free = [(replica_id, load) for replica_id, load in loads.items() if load < 1.0]
        picked = self._affinity.pick(free or list(loads.items()), _conversation_of(pending_request))
        chosen = by_id.pop(picked)
        if pending_request is not None:
            vars(pending_request)[_CHOSEN] = chosen.replica_id
        self._chosen_s[chosen.replica_id] = time.monotonic()
        others = list(by_id)
        random.shuffle(others)  # equal ones in any order
        others.sort(key=loads.__getitem__)
        return [[chosen], *([by_id[replica_id]] for replica_id in others[:2])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve could reach this replica, which need not be the chosen one."""
        self._take_back(pending_request)
        if replica_id in self.curr_replicas and len(self.curr_replicas) > 1:
            self._affinity.add(replica_id)
            self._affinity.note(replica_id, _conversation_of(pending_request))
            self._reached_s[replica_id] = time.monotonic()

    def _take_back(self, pending_request: PendingRequest) -> None:
        """Forget its choice: the chosen replica was reached (``_reached_s``), or got no request."""
        chosen = vars(pending_request).pop(_CHOSEN, None)
        if chosen is not None:
            self._chosen_s.pop(chosen, None)

    def _may_be_awake(self, replica_id: ReplicaID) -> bool:
        """Whether a report that it sleeps can be older than a request that it got."""
        since_s = time.monotonic() - _REPORTED_S
        return any(times.get(replica_id, -math.inf) > since_s for times in (self._chosen_s, self._reached_s))

    def _load(self, replica: RunningReplica) -> float:
        sent = self.replica_queue_len_cache.get(replica.replica_id)
        return routing_load(replica.routing_stats, sent, woken=self._may_be_awake(replica.replica_id))


def _conversation_of(pending: PendingRequest | None) -> Conversation | None:
    """Read the conversation once: Serve makes several attempts, and a body may have 32 MiB."""
    if pending is None or pending.metadata.call_method != FORWARD or not pending.args:
        return None
    kept = vars(pending)  # it has no hash, so no weak map can have it
    if _CONVERSATION not in kept:
        kept[_CONVERSATION] = read_conversation(pending.args[-1])
    found: Conversation | None = kept[_CONVERSATION]
    return found
