"""The section ``virtual_models`` of a config: its entries, which models they stand for, and their mistakes.

A virtual model may name another one, in any spelling. A request then goes through both, as if the client had
named the second one after the changes of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from llamasup.core.config.config_keys import Config
from llamasup.core.config.consistency import owners_of, unknown_model
from llamasup.core.config.issues import shown
from llamasup.core.models.names import NameIndex, folded
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, SettingGroup, setting
from llamasup.core.settings.kinds import JsonValues, Many, Name, Named, Section, Text
from llamasup.errors import ConfigInvalid
from llamasup.features.virtual.parameters import ParameterName, check_parameter, names_of

MAX_CANDIDATES: Final = 64
"""The most candidates of one virtual model: each of its requests looks at all of them."""
MAX_CHAIN: Final = 8
"""Virtual models one after the other."""

_PARAMETERS: Final = JsonValues(
    "parameter", "parameters, such as temperature: 0.6", ParameterName(), check_parameter
)
_Found = Iterator[tuple[Place, str]]


class VirtualEntry(SettingGroup, frozen=True, kw_only=True):
    """A name for a model with parameters of its own, or for one of several (docs/virtual-models.md)."""

    model: str | None = setting(
        Name(), "The model, or another virtual model.", "required, unless any is given"
    )
    any: tuple[str, ...] = setting(
        Many(Name()),
        "Several models. A request takes one that is loaded, or the one that loads soonest.",
        "none",
        unset=(),
    )
    set: Mapping[str, Any] = setting(
        _PARAMETERS, "Parameters that each request gets, whatever the client sends.", "none", unset={}
    )
    default: Mapping[str, Any] = setting(
        _PARAMETERS, "Parameters for requests that do not have them.", "none", unset={}
    )
    remove: tuple[str, ...] = setting(
        Many(ParameterName()), "Parameters to remove from each request.", "none", unset=()
    )
    system: str | None = setting(
        Text(), "Text before the system prompt of each chat.", "none", names="nothing"
    )


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


# --- errors between keys ---------------------------------------------------------------------------------


def _issues(config: Config, models_are_known: bool) -> _Found:
    entries = config.of(VIRTUAL_MODELS)
    owners = owners_of(config)
    index, spellings = NameIndex(owners), spellings_of(entries)
    taken = set(map(folded, owners))
    for name, entry in entries.items():
        key: Place = ("virtual_models", name)
        if folded(name) in taken:  # a client may write it in any spelling
            yield key, "is also the name or an alias of a model; choose another name"
        if entry.model is not None and entry.any:
            yield key, "model and any exclude each other; keep one of them"
        elif not (entry.model or entry.any or {(*key, "model"), (*key, "any", 0)} & config.lines.keys()):
            yield key, "model is missing; add the model that it stands for, or a list of models as any"
        if models_are_known:
            for place, member in _named_members(entry, key):
                if folded(member) not in spellings and len(index.resolve(member)) != 1:
                    yield place, unknown_model(member)
        yield from _parameter_issues(entry, key)
    default = spellings.get(folded(config.default_model or ""))
    if default is not None:
        yield ("default_model",), f"{shown(default)} is a virtual model; name a model"
    mistakes = [(("virtual_models", name), what) for name, what in virtual_mistakes(entries)]
    yield from mistakes or _unused_issues(entries, spellings, index)


def _named_members(entry: VirtualEntry, key: Place) -> Iterator[tuple[Place, str]]:
    if entry.model is not None:
        yield (*key, "model"), entry.model
    for number, member in enumerate(entry.any):
        yield (*key, "any", number), member


def _unused_issues(
    entries: Mapping[str, VirtualEntry], spellings: Mapping[str, str], index: NameIndex
) -> _Found:
    """Find members of ``any`` that no request takes: of two with the same model, it takes the first."""
    candidates = candidates_of(entries)
    for name, entry in entries.items():
        seen: set[str] = set()
        for place, member in _named_members(entry, ("virtual_models", name)):
            virtual = spellings.get(folded(member))
            names = [member] if virtual is None else [one.model for one in candidates[virtual]]
            models = {next(iter(index.resolve(model)), folded(model)) for model in names}
            if models and models <= seen:
                what = f"no request takes {shown(member)}, because a name before it stands for the same model"
                yield place, f"{what}; remove one of them"
            seen |= models


def _parameter_issues(entry: VirtualEntry, key: Place) -> _Found:
    """Find parameters that occur twice. Some have a different name in each API."""
    first: dict[str, tuple[str, str]] = {}
    for section, parameters in (("set", entry.set), ("default", entry.default)):
        for parameter in parameters:
            before, same = first.setdefault(names_of(parameter)[0], (section, parameter))
            if same != parameter:
                what = f"is the same parameter as {before}.{same}; remove one of them"
                yield (*key, section, parameter), what
            elif before != section:
                yield (*key, section, parameter), "has no effect, because set also has it; remove one of them"
    removed: dict[str, str] = {}
    for number, parameter in enumerate(entry.remove):
        place, own = (*key, "remove", number), names_of(parameter)[0]
        if own in first:
            what = f"{shown(parameter)} is also in {first[own][0]}"
            yield place, f"{what}; use set to replace what the client sends"
        elif own in removed:
            same = "occurs twice" if removed[own] == parameter else f"is the same as {shown(removed[own])}"
            yield place, f"{shown(parameter)} {same}; remove it"
        removed.setdefault(own, parameter)


VIRTUAL_MODELS: Final[ConfigKey[Mapping[str, VirtualEntry]]] = ConfigKey(
    "virtual_models",
    Setting(
        Named(Section(VirtualEntry)),
        "Further names for models, with parameters of their own, or for one of several models.",
        "none",
    ),
    {},
    after="models",
    issues=_issues,
    check=check_virtual,
)
