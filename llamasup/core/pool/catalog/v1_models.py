"""A model in ``GET /v1/models``, for clients and for other llamasup nodes (pure).

For clients, the keys are OpenAI's (``id``, ``object``, ``created``, ``owned_by``), the keys of llama-server
and its router (``aliases``, ``tags``, ``status``, ``architecture``, ``meta``; b11434), and our own in
``llamasup``.

A node asks once a second (docs/peers.md). It gets the models of this node that its key may use, with their
load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.http.routes import Work
from llamasup.core.models.access import ResolvedModel, output_modalities
from llamasup.core.pool.cheapest_set import RAM
from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.pool.shown_state import ListedStatus, ShownState
from llamasup.core.settings.names import why_not_a_name, why_not_an_alias

# --- for clients


def entry_of(info: ModelInfo, model: ResolvedModel) -> dict[str, Any]:
    """The model in the list, and at ``/v1/models/{id}``, with the names of ``model``."""
    spec, facts = info.spec, info.facts
    status: dict[str, Any] = {"value": info.listed_status.value, "args": ()}
    if info.problem:
        codes = (process.exit.code for process in info.processes if process.exit is not None)
        status |= {"failed": True, "exit_code": next(codes, None) or 1}
    entry: dict[str, Any] = {
        "id": spec.id,
        "object": "model",
        # The time of its newest file, in seconds since 1970; 0 without a file.
        "created": max((time_ns for _, _, time_ns in spec.identity), default=0) // 1_000_000_000,
        "owned_by": "llamasup",
        "aliases": model.names[1:],
        "tags": (),
        "status": status,
        "architecture": {
            "input_modalities": ("text", "image") if info.sees else ("text",),
            "output_modalities": output_modalities(facts, model.works),
        },
        "source": "cache" if spec.is_remote else "models_dir",
        "can_remove": False,  # with this API
    }
    size_bytes = sum(size for _, size, _ in spec.identity) or (facts.file_bytes if facts else None)
    ctx_size = info.served_ctx_size
    if facts is not None:
        entry["meta"] = {
            **({} if ctx_size is None else {"n_ctx": ctx_size}),
            "n_ctx_train": facts.context_length,
            "n_embd": facts.embedding_length,
            "n_params": facts.parameters,
            "n_vocab": facts.vocab_size,
            "size": facts.weights_bytes,
            "ftype": facts.quantization,
        }
    engine = spec.engine
    entry["llamasup"] = {
        **({} if engine is None else {"kind": engine.kind, "routes": engine.routes}),
        "state": info.state.value,
        "class": None if facts is None else facts.model_class.value,
        "context": ctx_size or spec.settings.ctx_size,
        "size_bytes": size_bytes,
        "default": info.is_default,
        "problem": info.public_problem or None,
        **({} if facts is None else _abilities(facts)),
        **_residence(info),
    }
    return entry


def _abilities(facts: ModelFacts) -> dict[str, Any]:
    """The abilities of a model by its file. Its chat template decides about tools and thinking."""
    template = facts.chat_template
    return {
        "family": facts.architecture,
        "tools": template.tools,
        "thinking": template.reasoning,
        "insert": (facts.fim.prefix, facts.fim.suffix, facts.fim.middle) if facts.fim.usable else (),
    }


def _residence(info: ModelInfo) -> dict[str, Any]:
    """The memory of a loaded model, and the time that it stays loaded."""
    if info.listed_status is not ListedStatus.LOADED:
        return {}
    needs = info.needs
    return {
        "memory_bytes": sum(needs.values()),
        "gpu_bytes": sum(size for device, size in needs.items() if device != RAM),
        "unload_in_s": None if info.unload_in_s is None else round(max(0.0, info.unload_in_s), 1),
    }


# --- for other nodes

MAX_MODELS = 1000
MAX_ALIASES = 32
MAX_MODEL_BYTES = 16 << 10  # 32 aliases of the longest names have 8 KiB, the other fields 1 KiB
_SLICE = 20  # models that are decoded at once: 10 ms, whatever they contain
_MAX_LETTERS = 1000  # of a problem
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_STATES = frozenset(ShownState)


class NodeModel(Struct, frozen=True, omit_defaults=True):
    """A model of a node. ``state``: a ``ShownState``. ``slots``: its permits, all processes together; 0
    while none serves. ``busy``: the taken ones; ``queued``: the requests that wait for one. ``percent`` and
    ``eta_s``: of its load. ``problem``: why it cannot be loaded. ``entry``: the model in ``/v1/models`` of
    the node.
    """

    id: str
    aliases: tuple[str, ...] = ()
    state: str = ShownState.STOPPED.value
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
        return self.state == ShownState.READY and self.slots > 0

    @property
    def can_serve(self) -> bool:
        """Whether it serves, or would after a load."""
        return not self.problem and self.state not in (ShownState.FAILED, ShownState.BROKEN)


def node_model_of(info: ModelInfo, model: ResolvedModel) -> NodeModel:
    """The model in the listing for another node, with the names of ``model``."""
    why = info.unavailable
    return NodeModel(
        model.id,
        model.names[1:],
        info.state.value,
        model.works,
        slots=info.permits,
        busy=info.busy,
        queued=info.queued,
        ctx_size=info.served_ctx_size,
        percent=None if why is None else why.percent,
        eta_s=None if why is None else why.eta_s,
        problem=info.public_problem,
        entry=entry_of(info, model),
    )


class NodeListing(Struct, frozen=True):
    """The models of one node. ``node``: the id of the process, which is new at each start. ``left_out``: how
    many of its models are not among ``models``, because there are too many.
    """

    node: str
    models: tuple[NodeModel, ...] = ()
    version: str = ""
    left_out: int = 0


class _Unread(Struct):
    """A listing whose models are not decoded yet: most of the time goes into making their values."""

    node: str
    models: list[msgspec.Raw] = []
    version: str = ""


_decode = msgspec.json.Decoder(_Unread).decode
_decode_model = msgspec.json.Decoder(NodeModel).decode


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
    state = model.state if model.state in _STATES else ShownState.STOPPED.value
    return msgspec.structs.replace(model, aliases=aliases, state=state, problem=model.problem[:_MAX_LETTERS])
