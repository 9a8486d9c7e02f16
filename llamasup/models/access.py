"""The model that a request means: its names, what it does, and why a request may not have it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamasup.auth.keys import ApiKey
from llamasup.gguf.facts import ModelClass, ModelFacts
from llamasup.http.heads import HttpError
from llamasup.http.routes import Work
from llamasup.models.names import pattern
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.context import has_kv_cache

__all__ = [
    "ResolvedModel",
    "ambiguous_model",
    "forbidden_model",
    "may_use",
    "resolved",
    "unfit_model",
    "unknown_model",
    "unnamed_model",
]

_MAX_SHOWN = 10  # names in a message
_MAX_LETTERS = 80  # of a name that a client made up

_ALL = tuple(Work)
# With one of these, what the file is says nothing of what its server does.
_GIVES_PURPOSE = ("--embedding", "--rerank", "--pooling")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """``names``: its id, then its aliases. ``works``: what it may be asked for (no set: in each request the
    hash of an enumeration's member would be taken in Python).
    """

    names: tuple[str, ...]
    works: tuple[Work, ...] = _ALL

    @property
    def id(self) -> str:
        return self.names[0]


def resolved(spec: ModelSpec) -> ResolvedModel:
    return ResolvedModel(spec.names, _works_of(spec.listed, spec.settings.extra))


def _works_of(facts: ModelFacts | None, extra: Sequence[str]) -> tuple[Work, ...]:
    """What its llama-server does not refuse (b11434). All where that is not known."""
    if facts is None or any(word.startswith(_GIVES_PURPOSE) for word in extra):
        return _ALL
    does = {
        Work.TEXT: has_kv_cache(facts) or any(facts.recurrent_layers),  # embedding models of this kind, too
        Work.EMBEDDINGS: facts.model_class in (ModelClass.ENCODER, ModelClass.RERANKER),
        Work.RERANKING: facts.model_class is ModelClass.RERANKER,
    }
    return tuple(work for work, is_so in does.items() if is_so) or _ALL


def may_use(key: ApiKey | None, meant: ResolvedModel) -> bool:
    """Whether this key may use this model: by any of its names."""
    if key is None or not key.models:
        return True
    return any(pattern(each).fullmatch(name) for each in key.models for name in meant.names)


# --- refusals --------------------------------------------------------------------------------------


def unknown_model(name: str, near: Sequence[str] = ()) -> HttpError:
    """404. ``near``: what may have been meant, the nearest first.

    The cause is OpenAI's own word: LiteLLM, and what is built on it, looks for it in the text, and takes
    every other ``invalid_request_error`` for a bad request whatever its status is.
    """
    return HttpError(
        404,
        f"The model {_shown(name)} does not exist here",
        cause="model_not_found",
        remedy=f"did you mean {_listed(near, 'or')}?" if near else "GET /v1/models lists those that do",
    )


def ambiguous_model(name: str) -> HttpError:
    """404: several files have this name. Where they lie is nothing to clients."""
    return HttpError(
        404,
        f"Several files are called {_shown(name)}, and none of them is served",
        cause="model_not_found",
        remedy="ask whoever runs this server: llamasup's log says which files these are",
    )


def unnamed_model(ids: Sequence[str]) -> HttpError:
    """400: a request names no model, and there is no default. ``ids`` of those that there are."""
    return HttpError(
        400,
        "The request names no model, and there is no default one",
        cause="model_unnamed",
        remedy=f'say which in "model": {_listed(ids, "or")}' if ids else "no model is served: add one",
    )


_WORDS = {
    Work.TEXT: "generates no text",
    Work.EMBEDDINGS: "gives no embeddings",
    Work.RERANKING: "does not rerank",
}


def unfit_model(meant: ResolvedModel, work: Work) -> HttpError:
    """400: this model never does that. llama-server would answer 500 or 501, once it was loaded for it."""
    does = _listed([each.value for each in meant.works], "and")
    return HttpError(
        400,
        f"The model {meant.id!r} {_WORDS[work]}",
        cause="model_purpose",
        remedy=f"it is for {does}; GET /v1/models says what each model is for (class)",
    )


def forbidden_model(key: ApiKey, name: str | None) -> HttpError:
    """403, whether there is such a model or not: a key learns nothing of models that it may not use."""
    what = "the default model" if name is None else f"the model {_shown(name)}"
    return HttpError(
        403,
        f"the key {key.name!r} may not use {what}",
        type="permission_error",
        cause="key_models",
        remedy=f"name one that it may: {_listed(key.models, 'or')}",
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= _MAX_LETTERS else name[:_MAX_LETTERS] + "…")


def _listed(names: Sequence[str], conjunction: str) -> str:
    """``a, b or c``; the first few where there are many."""
    shown = list(names[:_MAX_SHOWN])
    if len(names) > _MAX_SHOWN:
        return f"{', '.join(shown)}, … ({len(names)} in all)"
    return f" {conjunction} ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else "".join(shown)
