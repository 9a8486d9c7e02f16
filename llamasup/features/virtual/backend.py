"""The proxy's backend with virtual models: the names of the config, in front of the names of the models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route, Work
from llamasup.core.models.access import ResolvedModel, unknown_model, unnamed_model
from llamasup.core.models.names import folded
from llamasup.core.models.virtual import Candidate, candidates_of, spellings_of
from llamasup.core.pool.catalog.model_listing import encode_list, encode_one
from llamasup.core.proxy.backend import Backend, ModelList, ModelRoute, ServedModel
from llamasup.core.queueing.wait_estimate import ServedLoad
from llamasup.core.settings.sections import VirtualEntry
from llamasup.features.virtual.choice import Option, choose, explain_virtual, listed_virtual

__all__ = ["Models", "VirtualBackend", "VirtualListing"]


class Listing(ModelList, Protocol):
    """A ``ModelList`` that is not encoded yet."""

    def entries(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> Iterator[dict[str, Any]]: ...
    def entry(self, model: str) -> dict[str, Any]: ...


class LoadedModel(ServedModel, Protocol):
    def load(self) -> ServedLoad: ...


class KnownRoute(Protocol):
    """The route to a model that is not virtual."""

    @property
    def model(self) -> ResolvedModel: ...
    @property
    def served(self) -> LoadedModel: ...


class Models(Backend, Protocol):
    """The backend with the models themselves."""

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> KnownRoute | HttpError: ...
    def listing(self) -> Listing: ...


class Resolve(Protocol):
    def __call__(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | HttpError: ...


_Known = tuple[Candidate, KnownRoute]


class _VirtualRoute(Struct, frozen=True):
    """A ``VirtualRoute``. ``known``: the models that exist; ``candidate`` is the chosen
    one, with the id of the model.
    """

    name: str
    model: ResolvedModel
    served: ServedModel
    candidate: Candidate
    known: Sequence[_Known]

    def for_work(self, work: Work | None) -> _VirtualRoute:
        """The best of all models is also the best of those for this work, if it is one of them."""
        if work is None or work in self.model.works:
            return self
        suited = [(candidate, route) for candidate, route in self.known if work in route.model.works]
        return _chosen(self.name, suited) if suited else self

    @property
    def target(self) -> str:
        return self.candidate.model

    def rewrite(self, body: bytes, route: Route) -> bytes | HttpError:
        from llamasup.features.virtual.rewrite import rewritten  # here, to keep the start short

        return rewritten(body, route, self.name, self.candidate)


class _PlainRoute(Struct, frozen=True):
    """A ``ModelRoute`` to a model that is not virtual."""

    model: ResolvedModel
    served: ServedModel


def _chosen(name: str, known: Sequence[_Known]) -> _VirtualRoute:
    index = 0 if len(known) == 1 else choose([route.served.load() for _, route in known]).index
    candidate, route = known[index]
    own = replace(candidate, model=route.model.id)
    return _VirtualRoute(name, ResolvedModel((name,), route.model.works, True), route.served, own, known)


class VirtualBackend:
    """A ``Backend``. A name in ``models`` is found without a call of this class while there are no virtual
    models.
    """

    def __init__(self, models: Models, entries: Mapping[str, VirtualEntry]) -> None:
        self._models = models
        self._candidates: Mapping[str, tuple[Candidate, ...]] = {}
        self._spellings: Mapping[str, str] = {}
        self._entries: Mapping[str, VirtualEntry] = {}
        self.resolve: Resolve = models.resolve
        self.apply(entries)

    def apply(self, entries: Mapping[str, VirtualEntry]) -> None:
        """Serve these virtual models from now on. They have no ``virtual_mistakes``."""
        self._entries = entries
        self._candidates = candidates_of(entries)
        self._spellings = spellings_of(entries)
        self.resolve = self._resolve if entries else self._models.resolve

    # --- Backend ----------------------------------------------------------------------------------------
    def _resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | HttpError:
        name = None if model is None else self.named(model)
        if name is not None:
            return unknown_model(name) if local else self._route(name, create=create)
        route = self._models.resolve(model, create=create, local=local)
        if isinstance(route, HttpError) or (own := self.with_own_names(route.model)) is route.model:
            return route
        if self.named(route.model.id) is not None:
            return unnamed_model(tuple(self._entries)) if model is None else unknown_model(model)
        return _PlainRoute(own, route.served)

    def readiness(self) -> HttpError | None:
        return self._models.readiness()

    def listing(self) -> Listing:
        own = self._models.listing()
        return VirtualListing(own, self) if self._entries else own

    def node_listing(self, seen: Callable[[ResolvedModel], ResolvedModel | None] | None = None) -> bytes:
        """List the models for other nodes, which have virtual models of their own, and see neither those of
        this node nor what they hide.
        """
        return self._models.node_listing(self._seen(seen) if self._entries else seen)

    def _seen(
        self, seen: Callable[[ResolvedModel], ResolvedModel | None] | None
    ) -> Callable[[ResolvedModel], ResolvedModel | None]:
        def own(model: ResolvedModel) -> ResolvedModel | None:
            if self.named(model.id) is not None:
                return None
            model = self.with_own_names(model)
            return model if seen is None else seen(model)

        return own

    # --- virtual models ---------------------------------------------------------------------------------
    def named(self, name: str) -> str | None:
        """Return the virtual model with this name in any spelling."""
        return name if name in self._entries else self._spellings.get(folded(name))

    def with_own_names(self, model: ResolvedModel) -> ResolvedModel:
        """Return the model without the names that lead to virtual models: a key for such a name is no key for
        it.
        """
        names = model.names
        if not any(map(self.named, names)):
            return model
        return replace(model, names=tuple(name for name in names if self.named(name) is None))

    def why(self, name: str, why_of: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the answer of ``GET models/{id}/why`` for a virtual model. ``why_of``: that of a model."""
        routes = self._routes(name, create=False)
        known = [route for _, route in routes if not isinstance(route, HttpError)]
        missing = [candidate.model for candidate, route in routes if isinstance(route, HttpError)]
        options = [Option(route.model.id, route.served.load(), route.model.works) for route in known]
        found = explain_virtual(name, options, missing)
        own = why_of(options[choose([option.load for option in options]).index].model) if options else {}
        return {
            "model": name,
            "state": own.get("state", "stopped"),
            "sentences": [*found.sentences, *own.get("sentences", ())],
            "change": [*found.change, *own.get("change", ())],
            "decisions": own.get("decisions", []),
        }

    def _routes(self, name: str, *, create: bool) -> list[tuple[Candidate, KnownRoute | HttpError]]:
        candidates = self._candidates[name]
        create = create and len(candidates) == 1
        return [(candidate, self._models.resolve(candidate.model, create=create)) for candidate in candidates]

    def _route(self, name: str, *, create: bool = False) -> _VirtualRoute | HttpError:
        routes = self._routes(name, create=create)
        known = [(candidate, route) for candidate, route in routes if not isinstance(route, HttpError)]
        if not known:
            first = next(route for _, route in routes if isinstance(route, HttpError))
            return replace(first, message=f"The virtual model {name!r} has no model: {first.message}")
        return _chosen(name, known)

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def listed(self) -> Iterator[tuple[str, VirtualEntry, _VirtualRoute | HttpError]]:
        """Return each virtual model, and where a request for it goes now."""
        return map(self.listed_one, self._entries)

    def listed_one(self, name: str) -> tuple[str, VirtualEntry, _VirtualRoute | HttpError]:
        return name, self._entries[name], self._route(name)


class VirtualListing:
    """A ``Listing``: the models, and then the virtual ones."""

    def __init__(self, models: Listing, backend: VirtualBackend) -> None:
        self._models = models
        self._backend = backend

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        return encode_list(self.entries(allowed))

    def one(self, model: str) -> bytes:
        return encode_one(self.entry(model))

    def entries(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> Iterator[dict[str, Any]]:
        own = self._backend.with_own_names
        may_see = None if allowed is None else lambda model: allowed(own(model))
        for known in self._models.entries(may_see):
            if self._backend.named(known["id"]) is None:
                yield self._shown(known)
        for name, entry, route in self._backend.listed():
            model = ResolvedModel((name,)) if isinstance(route, HttpError) else route.model
            if allowed is None or allowed(model):
                yield self._entry(name, entry, route)

    def entry(self, model: str) -> dict[str, Any]:
        if model not in self._backend.names:
            return self._shown(self._models.entry(model))
        return self._entry(*self._backend.listed_one(model))

    def _shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry of a model, without the aliases that lead to virtual models."""
        aliases = entry.get("aliases", ())
        return {**entry, "aliases": tuple(alias for alias in aliases if self._backend.named(alias) is None)}

    def _entry(self, name: str, entry: VirtualEntry, route: _VirtualRoute | HttpError) -> dict[str, Any]:
        if isinstance(route, HttpError):
            return listed_virtual(name, entry, None, route.message)
        return listed_virtual(name, entry, self._models.entry(route.candidate.model))
