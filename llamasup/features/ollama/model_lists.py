"""The models for ``/api/tags``, ``/api/ps`` and ``/api/show``, made of the list of ``/v1/models`` (pure).

So a key sees the models that it may use, including virtual models and models of other nodes.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from llamasup.core.models.access import ListedModel
from llamasup.core.pool.shown_state import ListedStatus
from llamasup.features.ollama.requests import Features

_NEVER: Final = "9999-12-31T23:59:59Z"
_LAST_S: Final = 253_402_300_799  # the last second of that year, since 1970
_MAX_STAY_S: Final = 100 * 365 * 86_400.0
_encode = msgspec.json.Encoder().encode


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Status(msgspec.Struct):
    value: str = ListedStatus.UNLOADED.value


class _Architecture(msgspec.Struct):
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)


class _Meta(msgspec.Struct):
    n_ctx: _Count | None = None
    n_ctx_train: _Count = 0
    n_embd: _Count = 0
    n_params: _Count = 0
    n_vocab: _Count = 0
    ftype: str = ""


class _Own(msgspec.Struct):
    context: _Count | None = None
    size_bytes: _Count | None = None
    family: str | None = None
    tools: bool | None = None
    thinking: bool | None = None
    insert: tuple[int, ...] | None = None
    memory_bytes: _Count | None = None
    gpu_bytes: _Count | None = None
    unload_in_s: float | None = None
    virtual: Any = None


class Entry(msgspec.Struct):
    """An entry of ``/v1/models``, with the fields that are needed here. Another node may leave fields out."""

    id: str
    created: _Count = 0
    status: _Status = msgspec.field(default_factory=_Status)
    architecture: _Architecture = msgspec.field(default_factory=_Architecture)
    meta: _Meta = msgspec.field(default_factory=_Meta)
    llamasup: _Own = msgspec.field(default_factory=_Own)


def read_listed(listed: ListedModel) -> Entry:
    """Read an entry. Of one that another node has written differently, only the id counts."""
    try:
        return msgspec.convert(listed.entry(), Entry)
    except msgspec.ValidationError:
        return Entry(listed.model.id)


def features_of(model: Entry) -> Features:
    insert = model.llamasup.insert
    return Features(
        model.llamasup.thinking, model.llamasup.tools, insert if insert is None or len(insert) == 3 else ()
    )


def tags(models: list[Entry]) -> bytes:
    """Answer ``GET /api/tags``: all models."""
    return _encode({"models": [{**_base(model), "modified_at": _modified_at(model)} for model in models]})


def running(models: list[Entry], now: datetime) -> bytes:
    """Answer ``GET /api/ps``: the loaded models. A virtual model has no memory of its own."""
    real = (model for model in models if model.llamasup.virtual is None)
    loaded = (model for model in real if model.status.value == ListedStatus.LOADED)
    return _encode({"models": [{**_base(model), **_residence(model, now)} for model in loaded]})


def _residence(model: Entry, now: datetime) -> dict[str, Any]:
    own = model.llamasup
    left_s = own.unload_in_s
    if left_s is None or left_s > _MAX_STAY_S:
        ends = _NEVER
    else:
        ends = _utc(now + timedelta(seconds=max(0.0, left_s)))
    found: dict[str, Any] = {"expires_at": ends, "size_vram": own.gpu_bytes or 0}
    if own.memory_bytes:
        found["size"] = own.memory_bytes
    if context := model.meta.n_ctx or own.context:
        found["context_length"] = context
    return found


def shown(model: Entry) -> bytes:
    """Answer ``POST /api/show``: one model."""
    own, meta = model.llamasup, model.meta
    family = own.family or ""
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": model.id,  # VS Code Copilot shows it as the name
        "general.parameter_count": meta.n_params,
    }
    if family:
        info |= {
            f"{family}.context_length": meta.n_ctx_train,
            f"{family}.embedding_length": meta.n_embd,
            f"{family}.vocab_size": meta.n_vocab,
        }
    context = meta.n_ctx or own.context
    return _encode(
        {
            "modelfile": f"# llamasup serves the file of {model.id!r}; there is no Modelfile\n",
            "parameters": "" if context is None else f"num_ctx {context}",
            "template": "",
            "details": _details(model),
            "model_info": info,
            "capabilities": _capabilities(model),
            "modified_at": _modified_at(model),
        }
    )


def _capabilities(model: Entry) -> list[str]:
    own = model.llamasup
    results = model.architecture.output_modalities
    if "text" not in results:
        return ["embedding"] if "embeddings" in results else []
    has = {
        "completion": True,
        "vision": "image" in model.architecture.input_modalities,
        "tools": own.tools,
        "thinking": own.thinking,
        "insert": bool(own.insert),
    }
    return [name for name, is_there in has.items() if is_there]


def _base(model: Entry) -> dict[str, Any]:
    name = shown_name(model.id)
    return {
        "name": name,
        "model": name,
        "size": model.llamasup.size_bytes or 0,
        "digest": _digest(model),
        "details": _details(model),
    }


def _details(model: Entry) -> dict[str, Any]:
    family = model.llamasup.family or ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameters(model.meta.n_params),
        "quantization_level": model.meta.ftype,
    }


def _parameters(count: int) -> str:
    """Write ``7.6B``, ``494.0M``."""
    if not count:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _digest(model: Entry) -> str:
    """Return a digest, not of the content, which would take minutes to read, but of what identifies the file.
    It changes with the file, which is what clients use it for.
    """
    known = f"{model.id}\n{model.created}\n{model.llamasup.size_bytes}\n{model.meta.n_params}"
    return hashlib.sha256(known.encode()).hexdigest()


def _modified_at(model: Entry) -> str:
    return _utc(datetime.fromtimestamp(min(model.created, _LAST_S), UTC))


def _utc(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


_LATEST: Final = ":latest"


def shown_name(id_: str) -> str:
    """Return the id of a model with a tag. Clients compare the names of a list with those that users
    write.
    """
    return id_ if ":" in id_ else id_ + _LATEST


def spellings(name: str) -> tuple[str, ...]:
    """Return the names under which a model may be served, the first preferred: ``qwen3:4b`` may be
    ``qwen3-4b``.
    """
    if name.endswith(_LATEST):
        return name, name.removesuffix(_LATEST)
    base, colon, tag = name.rpartition(":")
    return (name, f"{base}-{tag}") if colon else (name,)
