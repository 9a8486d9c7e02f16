"""The models that are served, by their names: what the proxy leases from, and what may change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from llamasup.errors import LlamasupError, ModelUnknown
from llamasup.http.heads import HttpError
from llamasup.models.access import MeantModel, ambiguous_model, meant_by, unknown_model, unnamed_model
from llamasup.models.diff import Changes, changes
from llamasup.models.registry import Registry, Unknown
from llamasup.models.spec import ModelSpec
from llamasup.pool.catalog.listing import ListedModel, ModelListing
from llamasup.pool.catalog.status import state_of_tenancy
from llamasup.pool.model import Tenancy
from llamasup.pool.policy import Phase
from llamasup.pool.pool import Pool
from llamasup.pool.rollout import remove, renew
from llamasup.queueing.endpoint import Lease, Unavailable
from llamasup.queueing.wait_queue import WaitingRoom
from llamasup.supervision.runner import STOPPING

__all__ = ["Catalog", "Invite"]

Invite = Callable[[str], ModelSpec | None]
_MOST_INVITED = 100  # names that clients make up where downloads on demand are allowed


class Catalog:
    """A ``Backend`` of many models. All methods are for the event loop's thread.

    ``invite`` makes a model of a name that nobody has said anything of, where that is allowed.
    """

    def __init__(self, registry: Registry, pool: Pool, invite: Invite | None = None) -> None:
        self.pool = pool
        self._invite = invite
        self._invited: dict[str, None] = {}  # their ids, in the order that they came
        self.registry = Registry({}, {}, None)
        self._by_name: dict[str, Tenancy] = {}  # every name that was asked for in its own spelling
        self._meant: dict[str, MeantModel] = {}  # by id
        self._unready: Unavailable | None = _STARTING
        pool.when_sized = self._sized
        self.apply(registry)

    # --- Backend: what the proxy asks -------------------------------------------------------------------

    def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        tenancy = self._by_name.get(model) if model is not None else self._default
        if tenancy is None:
            # Work for a model may have it downloaded; who asks about one, or may not use it, has not.
            tenancy = self.find(model, invite=infers)
            if tenancy is None:
                return self._why_unknown(model)
        return tenancy.served.lease(infers=infers, body=body)

    def room(self, model: str | None) -> WaitingRoom:
        tenancy = self.find(model)
        assert tenancy is not None  # its lease was asked for before
        return tenancy.served.room

    def readiness(self) -> Unavailable | None:
        return STOPPING if self.pool.stopping else self._unready

    def meant(self, model: str | None) -> MeantModel | None:
        tenancy = self.find(model)
        return None if tenancy is None else self._meant[tenancy.spec.id]

    def listing(self) -> ModelListing:
        ids = (*self.registry.specs, *self._invited)
        return ModelListing(ids, self._listed, self.registry.default)

    def tenancies(self) -> Iterator[Tenancy]:
        """In the order of the registry."""
        return (self.pool.tenancies[id_] for id_ in (*self.registry.specs, *self._invited))

    # --- names ------------------------------------------------------------------------------------------

    def find(self, model: str | None, *, invite: bool = False) -> Tenancy | None:
        """The model of this name, or of one that means the same; None names the default one. ``invite``: or
        one that could be downloaded.
        """
        if model is None:
            return self._default
        if (tenancy := self._by_name.get(model)) is not None:
            return tenancy
        found = self.registry.find(model)
        if not isinstance(found, Unknown):
            return self.pool.tenancies.get(found.id)
        return self._invitee(model) if invite and found.refused is None else None

    def _invitee(self, name: str) -> Tenancy | None:
        spec = None if self._invite is None else self._invite(name)
        if spec is None or not self._has_room_for_one():
            return None
        self._invited[spec.id] = None
        self._by_name[name] = tenancy = self.pool.add(spec)
        self._meant[spec.id] = meant_by(spec)
        return tenancy

    def _sized(self, tenancy: Tenancy) -> None:
        """Of two that were invited one is enough, where it turns out that they are one file."""
        if tenancy.spec.id not in self._invited:
            return
        found = tenancy.found
        for id_ in self._invited:
            other = self.pool.tenancies[id_]
            if other is not tenancy and other.sized is not None and found.is_file_of(other.found):
                self._dismiss(tenancy, other)
                spec = replace(other.spec, aliases=(*other.spec.aliases, *tenancy.spec.names))
                self.pool.retouch(other, spec)
                self._by_name |= dict.fromkeys(spec.names, other)
                self._meant[id_] = meant_by(spec)
                return

    def _dismiss(self, tenancy: Tenancy, heir: Tenancy | None = None) -> None:
        """One that was invited, with all its names."""
        for name in tenancy.spec.names:
            self._by_name.pop(name, None)
        del self._invited[tenancy.spec.id], self._meant[tenancy.spec.id]
        remove(self.pool, tenancy, heir)

    def known(self, model: str, *, invite: bool = False) -> Tenancy:
        """As ``find``. Raises ModelUnknown, with near names."""
        tenancy = self.find(model, invite=invite)
        if tenancy is None:
            unknown = self._unknown(model)
            if unknown.refused is not None:
                raise ModelUnknown(f"{unknown.refused.message}.", remedy=unknown.refused.remedy)
            error = self._refusal(model)
            remedy = error.remedy if unknown.near else "llamasup ps --all lists those that do."
            raise ModelUnknown(f"{error.message}.", remedy=remedy)
        return tenancy

    @property
    def _default(self) -> Tenancy | None:
        default = self.registry.default
        return None if default is None else self.pool.tenancies.get(default)

    def _refusal(self, model: str | None) -> HttpError:
        if model is None:
            return unnamed_model(tuple(id_ for id_, spec in self.registry.specs.items() if not spec.problem))
        unknown = self._unknown(model)
        return unknown_model(model, unknown.near) if unknown.refused is None else ambiguous_model(model)

    def _unknown(self, model: str) -> Unknown:
        found = self.registry.find(model)
        return found if isinstance(found, Unknown) else Unknown(model)

    def _why_unknown(self, model: str | None) -> Unavailable:
        error = self._refusal(model)
        return Unavailable(error.status, error.message, error.type, error.cause, error.remedy)

    def _listed(self, id_: str) -> ListedModel:
        tenancy = self.pool.tenancies[id_]
        plan = next((runner.plan for runner in tenancy.runners if runner.plan is not None), None)
        spec = tenancy.spec
        if spec.listed is None and tenancy.facts is not None:
            spec = replace(spec, listed=tenancy.facts)
        return ListedModel(
            spec,
            self._meant[tenancy.spec.id],
            tenancy.phase,
            state_of_tenancy(tenancy),
            None if plan is None or not tenancy.serves else plan.ctx_size,
            "" if tenancy.error is None else tenancy.error.message,
            sees=tenancy.sized is not None and tenancy.sized.launch.sees,
        )

    # --- from start to change ---------------------------------------------------------------------------

    async def preload(self) -> Mapping[str, LlamasupError]:
        """Load what is to be there from the start; ready from then on. Returns why those are not there that
        could not be loaded.
        """
        asked = [each for each in self.pool.tenancies.values() if each.spec.stay.preload]
        failed: dict[str, LlamasupError] = {}

        async def load(tenancy: Tenancy) -> None:
            try:
                await self.pool.load(tenancy)
            except LlamasupError as error:
                failed[tenancy.spec.id] = error

        async with asyncio.TaskGroup() as tasks:
            for tenancy in asked:
                tasks.create_task(load(tenancy), name=f"{tenancy.spec.id}/preload")
        self._unready = None
        return failed

    def _has_room_for_one(self) -> bool:
        """Of those that were invited the oldest goes that is not there: most likely it never was anywhere."""
        if sum(len(self.pool.tenancies[id_].spec.names) for id_ in self._invited) < _MOST_INVITED:
            return True
        for id_ in self._invited:
            tenancy = self.pool.tenancies[id_]
            if tenancy.phase in {Phase.ABSENT, Phase.FAILED} and not (tenancy.wanted or tenancy.sizing):
                self._dismiss(tenancy)
                return True
        return False

    def apply(self, registry: Registry) -> Changes:
        """Serve these models from now on. Those that are as before are not touched (S16), and one that has
        another id by now is the same model: who waits for it and what it does go on.
        """
        pool, tenancies = self.pool, self.pool.tenancies
        before = {each.spec.id: each for each in self.tenancies()}
        # What was invited is known by now, if it was downloaded to where it is looked for.
        self._invited = {id_: None for id_ in self._invited if registry.meant(id_) is None}
        after = {**registry.specs, **{id_: tenancies[id_].spec for id_ in self._invited}}
        found = changes(
            {id_: each.spec for id_, each in before.items()},
            after,
            running={id_: each.found for id_, each in before.items() if each.holds},
            meant=registry.meant,
        )
        renamed = dict(found.renamed)
        carried: list[str] = []
        for id_, new in renamed.items():
            if new not in tenancies:
                carried.append(new)
                pool.rename(before.pop(id_), new)
        for id_ in found.added:
            if id_ not in carried:
                pool.add(after[id_])
        for id_ in found.removed:
            if id_ in before:
                heir = renamed.get(id_)
                remove(pool, before[id_], None if heir is None else tenancies[heir])
        for id_ in (*found.retouched, *found.changed, *carried):
            tenancy, spec = tenancies[id_], after[id_]
            if spec.started_as in (tenancy.spec.started_as, tenancy.found.started_as):
                pool.retouch(tenancy, spec)
            else:
                renew(pool, tenancy, spec)
        self.registry = registry
        # What the registry calls something counts more than what a client has.
        ids = (*self._invited, *registry.specs)
        self._by_name = {name: tenancies[id_] for id_ in ids for name in tenancies[id_].spec.names}
        self._meant = {each.spec.id: meant_by(each.spec) for each in self.tenancies()}
        return found


_STARTING = Unavailable(503, "Models are being loaded", cause="loading", retry_after_s=1.0)
