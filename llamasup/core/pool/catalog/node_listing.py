"""``GET /v1/models`` for another llamasup node: the models of this node, with their load (pure).

A node asks once a second (docs/fleet.md), so the answer has only the models that its key may use, and nothing
of other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from llamasup._version import __version__
from llamasup.core.http.routes import Work
from llamasup.core.pool.shown_state import STATES
from llamasup.core.settings.names import why_not_a_name, why_not_an_alias
from llamasup.core.supervision.states import State

READY = "ready"
MAX_MODELS = 1000
MAX_ALIASES = 32
MAX_MODEL_BYTES = 16 << 10  # 32 aliases of the longest names have 8 KiB, the other fields 1 KiB
_SLICE = 20  # models that are decoded at once: 10 ms, whatever they contain
_MAX_LETTERS = 1000  # of a problem
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class NodeModel(Struct, frozen=True, omit_defaults=True):
    """A model of a node. ``state``: see ``pool/shown_state.py``. ``slots``: its permits, all processes
    together; 0 while none serves. ``busy``: the taken ones; ``queued``: the requests that wait for one.
    ``percent`` and ``eta_s``: of its load. ``problem``: why it cannot be loaded. ``entry``: the model in
    ``/v1/models`` of the node.
    """

    id: str
    aliases: tuple[str, ...] = ()
    state: str = "stopped"
    works: tuple[Work, ...] = tuple(Work)
    slots: _Count = 0
    busy: _Count = 0
    queued: _Count = 0
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
    """The models of one node. ``node``: the id of the process, which is new at each start. ``left_out``: how
    many of its models are not among ``models``, because there are too many.
    """

    node: str
    models: tuple[NodeModel, ...] = ()
    version: str = ""
    left_out: int = 0


_encode = msgspec.json.Encoder().encode


class _Unread(Struct):
    """A listing whose models are not decoded yet: most of the time goes into making their values."""

    node: str
    models: list[msgspec.Raw] = []
    version: str = ""


_decode = msgspec.json.Decoder(_Unread).decode
_decode_model = msgspec.json.Decoder(NodeModel).decode


def encode_listing(node: str, models: Iterable[NodeModel]) -> bytes:
    return _encode({"node": node, "models": list(models), "version": __version__})


def read_listing(content: bytes) -> NodeListing:
    """The listing of another node. Raises ValueError for another answer.

    Leaves out invalid names, and what is beyond ``MAX_MODELS``, ``MAX_MODEL_BYTES`` and ``MAX_ALIASES``. A
    model in an unknown state counts as stopped.
    """
    *_, whole = read_in_slices(content)
    return whole


def read_in_slices(content: bytes) -> Iterator[NodeListing]:
    """Read a listing in short steps. Each one returns what is read so far, the last one all."""
    try:
        found = _decode(content)
        read = [raw for raw in found.models[:MAX_MODELS] if len(memoryview(raw)) <= MAX_MODEL_BYTES]
        listing = NodeListing(found.node, (), found.version, len(found.models) - len(read))
        yield listing
        models: dict[str, NodeModel] = {}
        for number, raw in enumerate(read, 1):
            model = _decode_model(raw)
            if not why_not_a_name(model.id):
                models.setdefault(model.id, _bounded(model))
            if number % _SLICE == 0 or number == len(read):
                yield msgspec.structs.replace(listing, models=tuple(models.values()))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _bounded(model: NodeModel) -> NodeModel:
    aliases = tuple(alias for alias in model.aliases[:MAX_ALIASES] if not why_not_an_alias(alias))
    state = model.state if model.state in STATES else State.STOPPED.value
    return msgspec.structs.replace(model, aliases=aliases, state=state, problem=model.problem[:_MAX_LETTERS])
