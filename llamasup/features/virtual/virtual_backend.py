"""The proxy's backend with virtual models: the names of the config, in front of the names of the models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.config.config_keys import Config
from llamasup.core.control.interface import ExplainedModels
from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route, Work
from llamasup.core.models.access import ListedModel, ResolvedModel, unknown_model, unnamed_model
from llamasup.core.models.names import folded
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.proxy.backend import Backend, ModelRoute, ServedModel
from llamasup.errors import Conflict
from llamasup.features.virtual.choice import Option, choose, explain_virtual, listed_virtual
from llamasup.features.virtual.settings import (
    VIRTUAL_MODELS,
    Candidate,
    VirtualEntry,
    candidates_of,
    spellings_of,
)


class Models(Backend, ExplainedModels, Protocol):
    """The models behind the virtual ones."""


class Resolve(Protocol):
    def __call__(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | HttpError: ...


_Known = tuple[Candidate, ModelRoute]


class _VirtualRoute(Struct, frozen=True):
    """A ``VirtualRoute``. ``known``: the models that exist; ``candidate`` is the chosen
    one, with the id of the model.
    """

    name: str
    model: ResolvedModel
    served: ServedModel
    candidate: Candidate
    known: Sequence[_Known]
    entry: VirtualEntry

    def for_work(self, work: Work | None) -> _VirtualRoute:
        """The best of all models is also the best model for this work, if it can do this work."""
        if work is None or work in self.model.works:
            return self
        suited = [(candidate, route) for candidate, route in self.known if work in route.model.works]
        return _chosen(self.name, self.entry, suited) if suited else self

    @property
    def target(self) -> str:
        return self.candidate.model

    def rewrite(self, body: bytes, route: Route) -> bytes | HttpError:
        from llamasup.features.virtual.rewrite import rewritten  # here, to keep the start short

        return rewritten(body, route, self.name, self.candidate)

    def listed(self) -> ListedModel:
        target = next(route for _, route in self.known if route.model.id == self.target)
        return ListedModel(
            self.model, lambda model: listed_virtual(self.entry, target.listed().entry(), "", model)
        )


class _PlainRoute(Struct, frozen=True):
    """A ``ModelRoute`` to a model that is not virtual, without the names of virtual models."""

    model: ResolvedModel
    served: ServedModel
    backend: VirtualBackend
    route: ModelRoute

    def listed(self) -> ListedModel:
        return self.backend.with_own_names(self.route.listed())


def _chosen(name: str, entry: VirtualEntry, known: Sequence[_Known]) -> _VirtualRoute:
    index = 0 if len(known) == 1 else choose([route.served.load() for _, route in known]).index
    candidate, route = known[index]
    own = replace(candidate, model=route.model.id)
    model = replace(route.model, names=(name,), is_virtual=True)
    return _VirtualRoute(name, model, route.served, own, known, entry)


class VirtualBackend:
    """A ``CatalogFront``. While there are no virtual models, a name in ``models`` is found without a call of
    this class. The control API explains virtual models, and cannot load them.
    """

    lists_models = True

    def __init__(self, models: Models, config: Config) -> None:
        self.node = models.node
        self._models = models
        self._candidates: Mapping[str, tuple[Candidate, ...]] = {}
        self._spellings: Mapping[str, str] = {}
        self._entries: Mapping[str, VirtualEntry] = {}
        self.resolve: Resolve = models.resolve
        self.apply(config)

    def apply(self, config: Config) -> None:
        """Serve the virtual models of the config from now on. They have no ``virtual_mistakes``."""
        self._entries = entries = config.of(VIRTUAL_MODELS)
        self._candidates = candidates_of(entries)
        self._spellings = spellings_of(entries)
        self.resolve = self._resolve if entries else self._models.resolve

    # --- Backend ----------------------------------------------------------------------------------------
    def _resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | HttpError:
        name = None if model is None else self._named(model)
        if name is not None:
            return unknown_model(name) if local else self._route(name, create=create)
        route = self._models.resolve(model, create=create, local=local)
        if isinstance(route, HttpError) or (own := self._own_names(route.model)) is route.model:
            return route
        if self._named(route.model.id) is not None:
            return unnamed_model(tuple(self._entries)) if model is None else unknown_model(model)
        return _PlainRoute(own, route.served, self, route)

    def readiness(self) -> HttpError | None:
        return self._models.readiness()

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        """List the models, and then the virtual ones. Other nodes have virtual models of their own, and see
        neither those of this node nor what they hide.
        """
        for known in self._models.models(for_node=for_node):
            if self._named(known.model.id) is None:
                yield self.with_own_names(known)
        for name, entry in () if for_node else self._entries.items():
            route = self._route(name)
            if isinstance(route, HttpError):
                yield ListedModel(ResolvedModel((name,)), partial(listed_virtual, entry, None, route.message))
            else:
                yield route.listed()

    def with_own_names(self, listed: ListedModel) -> ListedModel:
        return replace(listed, model=self._own_names(listed.model))

    # --- virtual models ---------------------------------------------------------------------------------
    def _named(self, name: str) -> str | None:
        """Return the virtual model with this name in any spelling."""
        return name if name in self._entries else self._spellings.get(folded(name))

    def _own_names(self, model: ResolvedModel) -> ResolvedModel:
        """Return the model without the names that lead to virtual models: a key for such a name is no key for
        it.
        """
        names = model.names
        if not any(map(self._named, names)):
            return model
        return replace(model, names=tuple(name for name in names if self._named(name) is None))

    def why(self, name: str) -> Mapping[str, Any]:
        if (virtual := self._named(name)) is None:
            return self._models.why(name)
        routes = self._routes(virtual, create=False)
        known = [route for _, route in routes if not isinstance(route, HttpError)]
        missing = [candidate.model for candidate, route in routes if isinstance(route, HttpError)]
        options = [Option(route.model.id, route.served.load(), route.model.works) for route in known]
        found = explain_virtual(virtual, options, missing)
        chosen = choose([option.load for option in options]).index if options else 0
        own = self._models.why(options[chosen].model) if options else {}
        return {
            "model": virtual,
            "state": own.get("state", ShownState.STOPPED.value),
            "sentences": [*found.sentences, *own.get("sentences", ())],
            "change": [*found.change, *own.get("change", ())],
            "decisions": own.get("decisions", []),
        }

    def refuse(self, what: str, name: str) -> None:
        if (virtual := self._named(name)) is None:
            self._models.refuse(what, name)
            return
        raise Conflict(
            f"{virtual!r} is a virtual model, which has no process of its own.",
            remedy=f"Name a model that it stands for; `llamasup why {virtual}` lists them.",
        )

    def _routes(self, name: str, *, create: bool) -> list[tuple[Candidate, ModelRoute | HttpError]]:
        candidates = self._candidates[name]
        create = create and len(candidates) == 1
        return [(candidate, self._models.resolve(candidate.model, create=create)) for candidate in candidates]

    def _route(self, name: str, *, create: bool = False) -> _VirtualRoute | HttpError:
        routes = self._routes(name, create=create)
        known = [(candidate, route) for candidate, route in routes if not isinstance(route, HttpError)]
        if not known:
            first = next(route for _, route in routes if isinstance(route, HttpError))
            return replace(first, message=f"The virtual model {name!r} has no model: {first.message}")
        return _chosen(name, self._entries[name], known)
