"""``GET /v1/models`` for another llamasup node: the models of this node, with their load (pure).

A node asks once a second (docs/fleet.md), so the answer has only the models that its key may use, and nothing
of other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from llamasup._version import __version__
from llamasup.http.routes import Work
from llamasup.settings.names import why_not_a_name

__all__ = ["READY", "NodeListing", "NodeModel", "encode_listing", "read_listing"]

READY = "ready"
MAX_MODELS = 10_000


class NodeModel(Struct, frozen=True, omit_defaults=True):
    """A model of a node. ``state``: see ``pool/state.py``. ``slots``: its permits, all processes together; 0
    while none serves. ``busy``: the taken ones; ``queued``: the requests that wait for one.
    ``percent`` and ``eta_s``: of its load. ``problem``: why it cannot be loaded. ``entry``: the model in
    ``/v1/models`` of the node.
    """

    id: str
    aliases: tuple[str, ...] = ()
    state: str = "stopped"
    works: tuple[Work, ...] = tuple(Work)
    slots: int = 0
    busy: int = 0
    queued: int = 0
    ctx_size: int | None = None
    percent: float | None = None
    eta_s: float | None = None
    problem: str = ""
    entry: dict[str, Any] = {}

    @property
    def serves(self) -> bool:
        return self.state == READY and self.slots > 0

    @property
    def can_serve(self) -> bool:
        """Whether it serves, or would after a load."""
        return not self.problem and self.state not in ("failed", "broken")


class NodeListing(Struct, frozen=True):
    """``node``: the id of the process, which is new at each start."""

    node: str
    models: tuple[NodeModel, ...] = ()
    version: str = ""


_encode = msgspec.json.Encoder().encode


class _Listing(Struct):
    node: str
    models: list[NodeModel] = []
    version: str = ""


_decode = msgspec.json.Decoder(_Listing).decode


def encode_listing(node: str, models: Iterable[NodeModel]) -> bytes:
    return _encode(NodeListing(node, tuple(models), __version__))


def read_listing(content: bytes) -> NodeListing:
    """The listing of another node. Raises ValueError for another answer; leaves out invalid names."""
    try:
        found = _decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(found.models) > MAX_MODELS:
        raise ValueError(f"it has more than {MAX_MODELS} models")
    models: dict[str, NodeModel] = {}
    for model in found.models:
        if not why_not_a_name(model.id):
            aliases = tuple(alias for alias in model.aliases if not why_not_a_name(alias))
            models.setdefault(model.id, msgspec.structs.replace(model, aliases=aliases))
    return NodeListing(found.node, tuple(models.values()), found.version)
