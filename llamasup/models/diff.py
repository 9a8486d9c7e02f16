"""What sets one registry apart from the next (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llamasup.models.spec import ModelSpec

__all__ = ["Changes", "changes"]

_NONE: Mapping[str, ModelSpec] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids. ``changed`` ones need other processes; of ``retouched`` ones only what is said of them differs.

    ``renamed``: of those that are removed, (its id, the id of what its names mean from now on).
    ``settings``: keys of the config, beside its models, that differ and count from now on. ``next_start``:
    those that differ from what it was started with, and count from the next start on.
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
        """Those of the added that were not there under another id."""
        heirs = {new for _, new in self.renamed}
        return tuple(id_ for id_ in self.added if id_ not in heirs)

    @property
    def gone(self) -> tuple[str, ...]:
        """Those of the removed that mean nothing any more."""
        known = {old for old, _ in self.renamed}
        return tuple(id_ for id_ in self.removed if id_ not in known)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.retouched)


Meaning = Callable[[str], ModelSpec | None]


def _nothing(_name: str) -> None:
    return None


def changes(
    before: Mapping[str, ModelSpec],
    after: Mapping[str, ModelSpec],
    *,
    running: Mapping[str, ModelSpec] = _NONE,
    meant: Meaning = _nothing,
) -> Changes:
    """``running``: of those that hold memory, the files that they were really started from: of one that had
    to be downloaded nothing was known before. ``meant`` says what a name leads to afterwards.

    Of several that become one, those that run are first among ``renamed``.
    """

    def is_same(id_: str) -> bool:
        started_as = after[id_].started_as
        return before[id_].started_as == started_as or (
            id_ in running and running[id_].started_as == started_as
        )

    both = [id_ for id_ in after if id_ in before]
    same = {id_ for id_ in both if is_same(id_)}
    removed = tuple(id_ for id_ in before if id_ not in after)
    gone = sorted(removed, key=lambda id_: id_ not in running)
    heirs = ((id_, _successor(running.get(id_, before[id_]), meant)) for id_ in gone)
    return Changes(
        added=tuple(id_ for id_ in after if id_ not in before),
        removed=removed,
        changed=tuple(id_ for id_ in both if id_ not in same),
        retouched=tuple(id_ for id_ in both if id_ in same and before[id_] != after[id_]),
        unchanged=tuple(id_ for id_ in both if before[id_] == after[id_]),
        renamed=tuple((id_, successor.id) for id_, successor in heirs if successor is not None),
    )


def _successor(gone: ModelSpec, meant: Meaning) -> ModelSpec | None:
    """What is meant by its id; else what an alias of it means, if that is the same file: those who know it by
    another name may have meant only that.
    """
    by_name = map(meant, gone.names)
    found = next(by_name)
    if found is not None:
        return found
    return next((each for each in by_name if each is not None and gone.is_file_of(each)), None)
