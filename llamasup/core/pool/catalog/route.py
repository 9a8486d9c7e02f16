"""Where the requests for one model go: the value that a catalog returns for a name."""

from __future__ import annotations

from msgspec import Struct

from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.replicas.replica_set import ReplicaSet


class ModelRoute(Struct, frozen=True):
    model: ResolvedModel
    served: ReplicaSet
