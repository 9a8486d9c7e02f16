"""``GET /v1/models``: every model, loaded or not, for clients of OpenAI and of llama.cpp (pure).

The keys are OpenAI's (``id``, ``object``, ``created``, ``owned_by``), those of llama-server and its router
(``aliases``, ``tags``, ``status``, ``architecture``, ``meta``; b11434), and our own in ``llamasup``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.models.access import ResolvedModel, output_modalities
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.cheapest_set import RAM
from llamasup.core.pool.eviction_policy import Phase

# The values of llama.cpp's router. Requests wait for a model that is being unloaded.
_STATUS = {
    Phase.ABSENT: "unloaded",
    Phase.LOADING: "loading",
    Phase.RESIDENT: "loaded",
    Phase.CORDONED: "loaded",
    Phase.UNLOADING: "unloaded",
    Phase.FAILED: "unloaded",
}
_encode = msgspec.json.Encoder().encode


def encode_list(entries: Iterable[dict[str, Any]]) -> bytes:
    """The body of ``/v1/models`` with these entries."""
    return _encode({"object": "list", "data": list(entries)})


def encode_one(entry: dict[str, Any]) -> bytes:
    """The body of ``/v1/models/{id}`` with this entry."""
    return _encode(entry)


class ListedModel(Struct, frozen=True):
    """One model at one moment. ``state``: see ``pool/shown_state.py``. ``ctx_size``: the context of one
    request, if the model is loaded; ``problem``: why it cannot be loaded; ``sees``: it accepts images.
    ``needs``: bytes by device that it uses while it is loaded; ``unload_in_s``: when it is unloaded without
    another request.
    """

    spec: ModelSpec
    model: ResolvedModel
    phase: Phase = Phase.ABSENT
    state: str = "stopped"
    ctx_size: int | None = None
    problem: str = ""
    sees: bool = False
    needs: Mapping[str, int] = {}
    unload_in_s: float | None = None


class ModelListing:
    """The models at one moment. Encoded when it is read: a thousand models take 3 ms and half a megabyte."""

    __slots__ = ("_default", "_ids", "_look")

    def __init__(
        self, ids: Iterable[str], look: Callable[[str], ListedModel], default: str | None = None
    ) -> None:
        """``look``: id → model. The default model comes first: llama-server's web interface, and others
        without a choice, take the first.
        """
        self._ids = ids
        self._look = look
        self._default = default

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        """The list of the models that are ``allowed``; None: all."""
        return encode_list(self.entries(allowed))

    def entries(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> Iterator[dict[str, Any]]:
        """The entries of ``all``, not encoded."""
        ids = sorted(self._ids, key=lambda model: model != self._default)
        listed = (entry for entry in map(self._look, ids) if allowed is None or allowed(entry.model))
        return map(self._entry, listed)

    def one(self, model: str) -> bytes:
        """One model by its id."""
        return encode_one(self.entry(model))

    def entry(self, model: str) -> dict[str, Any]:
        """One model by its id, not encoded."""
        return self._entry(self._look(model))

    def _entry(self, listed: ListedModel) -> dict[str, Any]:
        spec, facts = listed.spec, listed.spec.listed
        problem = listed.problem or spec.problem
        status: dict[str, Any] = {"value": _STATUS[listed.phase]}
        if problem:
            status["failed"] = True
        entry: dict[str, Any] = {
            "id": spec.id,
            "object": "model",
            "created": _created(spec),
            "owned_by": "llamasup",
            "aliases": spec.aliases,
            "tags": (),
            "status": status,
            "architecture": {
                "input_modalities": ("text", "image") if listed.sees else ("text",),
                "output_modalities": output_modalities(facts, listed.model.works),
            },
        }
        size_bytes = sum(size for _, size, _ in spec.identity) or (facts.file_bytes if facts else None)
        if facts is not None:
            entry["meta"] = {
                **({} if listed.ctx_size is None else {"n_ctx": listed.ctx_size}),
                "n_ctx_train": facts.context_length,
                "n_embd": facts.embedding_length,
                "n_params": facts.parameters,
                "n_vocab": facts.vocab_size,
                "size": facts.weights_bytes,
                "ftype": facts.quantization,
            }
        entry["llamasup"] = {
            "state": listed.state,
            "class": None if facts is None else facts.model_class.value,
            "context": listed.ctx_size or spec.settings.ctx_size,
            "size_bytes": size_bytes,
            "default": spec.id == self._default,
            "problem": spec.public_problem(problem) if problem else None,
            **({} if facts is None else _abilities(facts)),
            **_residence(listed),
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


def _residence(listed: ListedModel) -> dict[str, Any]:
    """The memory of a loaded model, and the time that it stays loaded."""
    if _STATUS[listed.phase] != "loaded":
        return {}
    needs = listed.needs
    return {
        "memory_bytes": sum(needs.values()),
        "gpu_bytes": sum(size for device, size in needs.items() if device != RAM),
        "unload_in_s": None if listed.unload_in_s is None else round(max(0.0, listed.unload_in_s), 1),
    }


def _created(spec: ModelSpec) -> int:
    """The time of its newest file, in seconds since 1970; 0 without a file."""
    return max((time_ns for _, _, time_ns in spec.identity), default=0) // 1_000_000_000
