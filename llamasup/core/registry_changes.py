"""What sets one registry apart from the next (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamasup.core.model_spec import ModelSpec

__all__ = ["Changes", "changes"]


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids. ``changed`` ones need other processes; of ``retouched`` ones only what is said of them differs.

    ``next_start``: keys of the config that differ from what it was started with, and count from then on.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    retouched: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.retouched)


def changes(before: Mapping[str, ModelSpec], after: Mapping[str, ModelSpec]) -> Changes:
    both = [id_ for id_ in after if id_ in before]
    same = [id_ for id_ in both if before[id_].started_as == after[id_].started_as]
    return Changes(
        added=tuple(id_ for id_ in after if id_ not in before),
        removed=tuple(id_ for id_ in before if id_ not in after),
        changed=tuple(id_ for id_ in both if before[id_].started_as != after[id_].started_as),
        retouched=tuple(id_ for id_ in same if before[id_] != after[id_]),
        unchanged=tuple(id_ for id_ in same if before[id_] == after[id_]),
    )
