"""The model of a request: its names, the work it can do, and the reasons to refuse the request (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Work, works_of
from llamasup.core.models.names import pattern
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.kv_cache import has_kv_cache
from llamasup.core.settings.model import Engine

_MAX_LISTED = 10  # names in a message
_MAX_LETTERS = 80  # of an unknown name in a message

_ALL = tuple(Work)
# With one of these flags the file does not decide what its server does.
_GIVES_PURPOSE = ("--embedding", "--rerank", "--pooling")


class ResolvedModel(Struct, frozen=True):
    """The model that a request names, with its id and aliases (``names``) and the work that it can do.

    ``works`` is not a set, because the hash of an enum member costs a Python call per request. ``is_virtual``
    is true if the config makes the model a name for another one. ``engine``: the program that serves it, if
    it is not llama-server.
    """

    names: tuple[str, ...]
    works: tuple[Work, ...] = _ALL
    is_virtual: bool = False
    engine: Engine | None = None

    @property
    def id(self) -> str:
        return self.names[0]


class ListedModel(Struct, frozen=True):
    """A model in a list. ``render`` makes its entry, under the names of the model that it is given."""

    model: ResolvedModel
    render: Callable[[ResolvedModel], Any]

    def entry(self) -> Any:
        return self.render(self.model)


def resolved(spec: ModelSpec) -> ResolvedModel:
    if (engine := spec.engine) is not None:
        return ResolvedModel(spec.names, works_of(engine.answers), engine=engine)
    return ResolvedModel(spec.names, _works_of(spec.listed, spec.settings.extra))


def _works_of(facts: ModelFacts | None, extra: Sequence[str]) -> tuple[Work, ...]:
    """The work that its llama-server does not refuse (b11434, b11549); all work if that is not known."""
    if facts is None or any(word.startswith(_GIVES_PURPOSE) for word in extra):
        return _ALL
    remembers = has_kv_cache(facts) or any(facts.recurrent_layers)  # also some embedding models
    does = {
        Work.TEXT: remembers and not facts.only_decides,
        Work.EMBEDDINGS: facts.model_class in (ModelClass.ENCODER, ModelClass.RERANKER),
        Work.RERANKING: facts.model_class is ModelClass.RERANKER,
        Work.DECISIONS: facts.model_class is ModelClass.DECISION,
    }
    return tuple(work for work, can in does.items() if can) or _ALL


def output_modalities(facts: ModelFacts | None, works: Sequence[Work]) -> tuple[str, ...]:
    """The results of a model, as llama.cpp lists them: decisions alone, even if the model can chat."""
    if facts is not None and facts.decision:
        return ("decisions",)
    return ("text",) if Work.TEXT in works else ("embeddings",) if works else ()


def may_use(key: ApiKey | None, model: ResolvedModel) -> bool:
    """Whether the key allows the model by any of its names."""
    return key is None or not key.models or allows(key.models, model.names)


def allows(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(pattern(allowed).fullmatch(name) for allowed in patterns for name in names)


# --- refusals --------------------------------------------------------------------------------------


def unknown_model(name: str, near: Sequence[str] = ()) -> HttpError:
    """Make the 404 for an unknown model. ``near`` are similar names, the nearest first.

    The cause is OpenAI's: LiteLLM looks for it in the text, and takes every other ``invalid_request_error``
    for a bad request, whatever its status.
    """
    return HttpError(
        404,
        f"The model {_shown(name)} does not exist",
        cause="model_not_found",
        remedy=f"did you mean {_listed(near, 'or')}?" if near else "GET /v1/models lists the models",
    )


def ambiguous_model(name: str, others: Sequence[str]) -> HttpError:
    """Make the 404 for a name of several files. ``others`` are the names under which they are served.

    Clients do not see their paths.
    """
    return HttpError(
        404,
        f"Several files have the name {_shown(name)}, so none of them is served"
        + (" under it" if others else ""),
        cause="model_not_found",
        remedy=f"use {_listed(others, 'or')}"
        if others
        else "ask the administrator of this server: llamasup's log lists the files",
    )


def unnamed_model(ids: Sequence[str]) -> HttpError:
    """Make the 400 for a request that names no model, without a default. ``ids``: the available models."""
    return HttpError(
        400,
        "The request names no model, and there is no default model",
        cause="model_unnamed",
        remedy=f'set "model" to {_listed(ids, "or")}' if ids else "no model is served: add one",
    )


_CANNOT = {
    Work.TEXT: "generates no text",
    Work.EMBEDDINGS: "gives no embeddings",
    Work.RERANKING: "does not rerank",
    Work.DECISIONS: "makes no decisions",
}


def unfit_model(model: ResolvedModel, work: Work) -> HttpError:
    """Make the 400 for a model that cannot do this work.

    llama-server would answer 500 or 501 after a load.
    """
    does = _listed([work.value for work in model.works], "and")
    return HttpError(
        400,
        f"The model {model.id!r} {_CANNOT[work]}",
        cause="model_purpose",
        remedy=f"it is for {does}; GET /v1/models shows the class of each model",
    )


def unserved_path(model: ResolvedModel, path: str) -> HttpError:
    """Make the 404 for a path that the program of the model does not serve, by its entry in the config."""
    routes = model.engine.routes if model.engine is not None else ()
    return HttpError(
        404,
        f"The model {model.id!r} does not serve {path[:_MAX_LETTERS]!r}",
        "not_found_error",
        "unserved_path",
        f"it serves {_listed(routes, 'and')}; `routes` in the config names its paths",
    )


def forbidden_model(key: ApiKey, name: str | None) -> HttpError:
    """Make the 403. A key learns nothing about models that it may not use, not even whether they exist."""
    what = "the default model" if name is None else f"the model {_shown(name)}"
    return HttpError(
        403,
        f"the key {key.name!r} may not use {what}",
        type="permission_error",
        cause="key_models",
        remedy=f"use a model that the key allows: {_listed(key.models, 'or')}",
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= _MAX_LETTERS else name[:_MAX_LETTERS] + "…")


def _listed(names: Sequence[str], conjunction: str) -> str:
    """``a, b or c``; the first few of many."""
    shown = list(names[:_MAX_LISTED])
    if len(names) > _MAX_LISTED:
        return f"{', '.join(shown)}, … ({len(names)} in all)"
    return f" {conjunction} ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else "".join(shown)
