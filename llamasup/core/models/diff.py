"""The differences between two registries (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct

from llamasup.core.models.spec import ModelSpec

_NONE: Mapping[str, ModelSpec] = MappingProxyType({})


class Changes(Struct, frozen=True):
    """The ids of the models that differ.

    ``changed`` models need new processes; ``retouched`` ones keep theirs.

    ``renamed``: (removed id, id of the model that has its names now). ``settings``: other config keys that
    changed and take effect now. ``next_start``: config keys that changed and take effect at the next start.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    retouched: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def new(self) -> tuple[str, ...]:
        """The added models without the new ids of renamed ones."""
        successors = {new for _, new in self.renamed}
        return tuple(id_ for id_ in self.added if id_ not in successors)

    @property
    def gone(self) -> tuple[str, ...]:
        """The removed models without the old ids of renamed ones."""
        renamed = {old for old, _ in self.renamed}
        return tuple(id_ for id_ in self.removed if id_ not in renamed)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.retouched)


Resolve = Callable[[str], ModelSpec | None]


def _nothing(_name: str) -> None:
    return None


def changes(
    before: Mapping[str, ModelSpec],
    after: Mapping[str, ModelSpec],
    *,
    running: Mapping[str, ModelSpec] = _NONE,
    resolve: Resolve = _nothing,
) -> Changes:
    """Compare two registries.

    ``running`` are the specs of the models that hold memory, with their downloaded files. ``resolve`` finds
    the spec of a name afterwards. If several models become one, running ones come first in ``renamed``.
    """

    def is_same(id_: str) -> bool:
        earlier = (before[id_], *([running[id_]] if id_ in running else []))
        return any(map(after[id_].keeps_processes_of, earlier))

    both = [id_ for id_ in after if id_ in before]
    same = {id_ for id_ in both if is_same(id_)}
    removed = tuple(id_ for id_ in before if id_ not in after)
    gone = sorted(removed, key=lambda id_: id_ not in running)
    successors = ((id_, _successor(running.get(id_, before[id_]), resolve)) for id_ in gone)
    return Changes(
        added=tuple(id_ for id_ in after if id_ not in before),
        removed=removed,
        changed=tuple(id_ for id_ in both if id_ not in same),
        retouched=tuple(id_ for id_ in both if id_ in same and before[id_] != after[id_]),
        unchanged=tuple(id_ for id_ in both if before[id_] == after[id_]),
        renamed=tuple((id_, successor.id) for id_, successor in successors if successor is not None),
    )


def _successor(gone: ModelSpec, resolve: Resolve) -> ModelSpec | None:
    """Find the model that now has the id, else the first model with an alias of it and the same file."""
    by_name = map(resolve, gone.names)
    found = next(by_name)
    if found is not None:
        return found
    return next((spec for spec in by_name if spec is not None and gone.is_file_of(spec)), None)
