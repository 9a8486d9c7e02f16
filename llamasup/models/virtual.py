"""Virtual models: which models a name stands for, and the changes to a request on the way (pure).

A virtual model may name another one. A request then goes through both, as if the client had named the second
one after the changes of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from llamasup.errors import ConfigInvalid
from llamasup.settings.sections import VirtualEntry

__all__ = ["Candidate", "Changes", "candidates_of", "check_virtual", "virtual_mistakes"]

MAX_CANDIDATES: Final = 64
"""Of one virtual model; each is looked at for each of its requests."""
MAX_CHAIN: Final = 8
"""Virtual models one after the other."""


class Changes(Struct, frozen=True):
    """The changes of one virtual model to the parameters of a request."""

    set: Mapping[str, Any] = {}
    default: Mapping[str, Any] = {}
    remove: tuple[str, ...] = ()
    system: str = ""

    def __bool__(self) -> bool:
        return bool(self.set or self.default or self.remove or self.system)


class Candidate(Struct, frozen=True):
    """A model that a request for a virtual model may go to, and the changes in their order."""

    model: str
    changes: tuple[Changes, ...] = ()


def candidates_of(name: str, entries: Mapping[str, VirtualEntry]) -> tuple[Candidate, ...]:
    """The candidates of a virtual model without ``virtual_mistakes``, in their order in the config."""
    entry = entries[name]
    own = Changes(entry.set, entry.default, entry.remove, entry.system or "")
    changes = (own,) if own else ()
    found: dict[tuple[str, tuple[int, ...]], Candidate] = {}
    for member in _members(entry):
        inner = candidates_of(member, entries) if member in entries else (Candidate(member),)
        for candidate in inner:
            # The same model twice makes no difference unless the changes differ.
            key = candidate.model, tuple(map(id, candidate.changes))
            found.setdefault(key, Candidate(candidate.model, (*changes, *candidate.changes)))
    return tuple(found.values())


def _members(entry: VirtualEntry) -> tuple[str, ...]:
    return entry.any if entry.model is None else (entry.model,)


def check_virtual(entries: Mapping[str, VirtualEntry]) -> None:
    """Check the virtual models of a config that a program has made. Raises ConfigInvalid."""
    empty = ((name, "has neither model nor any") for name, entry in entries.items() if not _members(entry))
    for name, what in (*empty, *virtual_mistakes(entries)):
        raise ConfigInvalid(
            f"The virtual model {name!r}: {what}.", remedy="docs/virtual-models.md describes them."
        )


class _Reach(Struct, frozen=True):
    """``models``: how many candidates a name has; ``chain``: the virtual models in a row to the farthest."""

    models: int
    chain: int


def virtual_mistakes(entries: Mapping[str, VirtualEntry]) -> Iterator[tuple[str, str]]:
    """The names that lead nowhere, or to too many models, each with the reason."""
    known: dict[str, _Reach] = {}
    for name in entries:
        yield from _check(name, entries, (), known)


def _check(
    name: str, entries: Mapping[str, VirtualEntry], path: tuple[str, ...], known: dict[str, _Reach]
) -> Iterator[tuple[str, str]]:
    if name in known:
        return
    path = (*path, name)
    models = chain = 0
    if len(path) <= MAX_CHAIN:
        for member in _members(entries[name]):
            if member in path:
                circle = " → ".join((*path[path.index(member) :], member))
                yield name, f"the virtual models go round in a circle ({circle}); one has to name a model"
            elif member in entries:
                yield from _check(member, entries, path, known)
                models += known[member].models
                chain = max(chain, known[member].chain)
            else:
                models += 1
    if len(path) > MAX_CHAIN or chain >= MAX_CHAIN:
        yield name, f"more than {MAX_CHAIN} virtual models in a row; name the model itself"
        known[name] = _Reach(0, 0)  # the names before it would repeat the error
    elif models > MAX_CANDIDATES:
        yield name, f"stands for {models} models; at most {MAX_CANDIDATES} are allowed"
        known[name] = _Reach(0, chain + 1)
    else:
        known[name] = _Reach(models, chain + 1)
