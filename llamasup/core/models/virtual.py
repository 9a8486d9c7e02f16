"""Virtual models: which models a name stands for, and the changes to a request on the way (pure).

A virtual model may name another one, in any spelling. A request then goes through both, as if the client had
named the second one after the changes of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from llamasup.core.models.names import folded
from llamasup.core.settings.sections import VirtualEntry
from llamasup.errors import ConfigInvalid

MAX_CANDIDATES: Final = 64
"""The most candidates of one virtual model: each of its requests looks at all of them."""
MAX_CHAIN: Final = 8
"""Virtual models one after the other."""

_Entries = Mapping[str, VirtualEntry]


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


def spellings_of(entries: _Entries) -> Mapping[str, str]:
    """Index the names of the virtual models by their folded names."""
    spellings: dict[str, str] = {}
    for name in entries:
        spellings.setdefault(folded(name), name)
    return spellings


def candidates_of(entries: _Entries) -> Mapping[str, tuple[Candidate, ...]]:
    """List the candidates of each virtual model, in their order in the config.

    ``entries`` have no ``virtual_mistakes``.
    """
    spellings = spellings_of(entries)
    found: dict[str, tuple[Candidate, ...]] = {}
    for name in entries:
        _find_candidates(name, entries, spellings, found)
    return found


def _find_candidates(
    name: str, entries: _Entries, spellings: Mapping[str, str], found: dict[str, tuple[Candidate, ...]]
) -> tuple[Candidate, ...]:
    """List the candidates of a virtual model or, for another name, the model itself."""
    if name not in entries:
        return (Candidate(name),)
    if name in found:
        return found[name]
    entry = entries[name]
    own = Changes(entry.set, entry.default, entry.remove, entry.system or "")
    changes = (own,) if own else ()
    by_model: dict[str, Candidate] = {}
    for member in _members(entry, spellings):
        for candidate in _find_candidates(member, entries, spellings, found):
            # The first of two with the same model gets all requests, because both are equally busy.
            by_model.setdefault(candidate.model, Candidate(candidate.model, (*changes, *candidate.changes)))
    found[name] = tuple(by_model.values())
    return found[name]


def _members(entry: VirtualEntry, spellings: Mapping[str, str]) -> tuple[str, ...]:
    """The names in the entry. Those of virtual models are spelled as in the config."""
    names = entry.any if entry.model is None else (entry.model,)
    return tuple(spellings.get(folded(name), name) for name in names)


def check_virtual(entries: _Entries) -> None:
    """Check the virtual models of a config that a program has made. Raises ConfigInvalid."""
    empty = (name for name, entry in entries.items() if entry.model is None and not entry.any)
    mistakes = (*((name, "has neither model nor any") for name in empty), *virtual_mistakes(entries))
    for name, what in mistakes:
        raise ConfigInvalid(
            f"The virtual model {name!r}: {what}.", remedy="docs/virtual-models.md describes them."
        )


class _Reach(Struct, frozen=True):
    """The reach of a name: its candidates (``models``) and its longest row of virtual models (``chain``)."""

    models: int
    chain: int


def virtual_mistakes(entries: _Entries) -> Iterator[tuple[str, str]]:
    """List the names that occur twice, lead nowhere, or lead to too many models, each with the reason."""
    spellings = spellings_of(entries)
    known: dict[str, _Reach] = {}
    for name in entries:
        if (first := spellings[folded(name)]) != name:
            yield name, f"is another spelling of {first!r}; choose another name"
        else:
            yield from _check(name, entries, spellings, (), known)


def _check(
    name: str,
    entries: _Entries,
    spellings: Mapping[str, str],
    path: tuple[str, ...],
    known: dict[str, _Reach],
) -> Iterator[tuple[str, str]]:
    if name in known:
        return
    path = (*path, name)
    models = chain = 0
    if len(path) <= MAX_CHAIN:
        for member in _members(entries[name], spellings):
            if member in path:
                circle = " → ".join((*path[path.index(member) :], member))
                yield name, f"the virtual models go round in a circle ({circle}); one has to name a model"
            elif member in entries:
                yield from _check(member, entries, spellings, path, known)
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
