"""Which file each name refers to: models of the config first, then found files that no rule covers (pure).

Also decides when several names of one weight file can share a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce

from llamasup.errors import LlamasupError
from llamasup.gguf.facts import PURPOSES, is_served
from llamasup.models.found import FoundModel
from llamasup.models.names import NameIndex, pattern
from llamasup.models.rules import ModelRule, Problem
from llamasup.models.spec import ModelOptions

__all__ = ["Claims", "FoundIndex", "NameBinding", "can_share", "shared_options"]


@dataclass(frozen=True, slots=True)
class NameBinding:
    """One model by its names. ``key`` is the same for the same weights; ``options`` are without the defaults.

    ``found`` is None for what has to be downloaded, and where ``problem`` says why nothing is there.
    """

    names: tuple[str, ...]
    source: str
    key: object
    found: FoundModel | None
    options: ModelOptions
    problem: str = ""


class FoundIndex:
    """What was found, by its ids, and what sources of rules lead to. ``problems``: of what is not served."""

    def __init__(self, found: Sequence[FoundModel], sources: Mapping[str, FoundModel]) -> None:
        self.sources = sources
        self.problems: list[Problem] = []
        self.ids: dict[str, FoundModel] = {}
        """Of what can be served, or is broken: what each id means. A sound file counts before broken ones."""
        self.ids_of: dict[object, list[str]] = defaultdict(list)
        """By the key of the weights: most have one id, those that two paths lead to have two."""
        self.refused: dict[str, Problem] = {}
        """Ids that several files have."""
        self.broken: set[object] = set()
        """The keys of files that are, which ``problems`` tell."""
        self._sort(found)
        self._index = NameIndex({each: each for each in self.ids})

    def find(self, name: str) -> FoundModel | None:
        """What is served under this id, or under one that means the same."""
        found = self._index.find(name)
        return self.ids[found] if isinstance(found, str) else None

    def near(self, name: str) -> tuple[str, ...]:
        found = self._index.find(name)
        return (found,) if isinstance(found, str) else found

    def _sort(self, found: Sequence[FoundModel]) -> None:
        by_id: dict[str, list[FoundModel]] = defaultdict(list)
        sound = {each.ids[0] for each in found if each.ids and _is_sound(each)}
        for each in found:
            if not self._is_model(each, sound):
                continue
            if not each.ids:
                self.problems.append(
                    Problem(
                        f"{each.path}: nothing of its name can be a model's name",
                        remedy="Rename the file, or name it in the config: models: {NAME: {path: …}}.",
                        paths=(each.path,),
                    )
                )
                continue
            by_id[each.ids[0]].append(each)
        for own, called in by_id.items():
            files = _sound_first(called)
            if len({key_of(each) for each in files}) > 1:
                self.refused[own] = _same_id(own, [each.path for each in files])
                self.problems.append(self.refused[own])
                continue
            self.ids[own] = files[0]
            self.ids_of[key_of(files[0])].append(own)
        self._add_other_ids(found)

    def _add_other_ids(self, found: Sequence[FoundModel]) -> None:
        """What files may be called besides, where that is one file's alone."""
        meant: dict[str, list[FoundModel]] = defaultdict(list)
        for each in found:
            if each.ids and self.ids.get(each.ids[0]) is each:
                for other in each.ids[1:]:
                    meant[other].append(each)
        for other, called in meant.items():
            models = {key_of(each): each for each in _sound_first(called)}
            if len(models) == 1 and other not in self.ids and other not in self.refused:
                ((key, model),) = models.items()
                self.ids[other] = model
                self.ids_of[key].append(other)

    def _is_model(self, each: FoundModel, sound: Container[str]) -> bool:
        """``sound``: the ids that sound files have: those are not what a broken one's problem is about."""
        if not isinstance(each.outcome, LlamasupError):
            return is_served(each.outcome)
        self.broken.add(key_of(each))
        names = tuple(own for own in each.ids[:1] if own not in sound)
        self.problems.append(_broken(each.outcome, names, each.path))
        # What cannot be read is taken for what it is called.
        return "mmproj" not in each.path.rpartition("/")[2].lower()


@dataclass(slots=True)
class Claims:
    """Collects what each name means. Owned by one call of ``registry.build``."""

    known: FoundIndex
    made: list[NameBinding] = field(default_factory=list[NameBinding])
    problems: list[Problem] = field(default_factory=list[Problem])
    _names: set[str] = field(default_factory=set[str])

    def by_rules(self, rules: Sequence[ModelRule], patterns: Sequence[ModelRule]) -> None:
        """The config's own models. What a rule says of one is over what patterns say."""
        self._names = {name for rule in rules for name in rule.names}
        for rule in rules:
            if rule.source is None:
                self.made.append(self._about_found(rule, patterns))
            else:
                self.made.append(self._of_source(rule, rule.source, patterns))

    def by_files(self, patterns: Sequence[ModelRule]) -> None:
        """What is found and no rule is about."""
        claimed = {claim.key for claim in self.made}
        for key, ids in self.known.ids_of.items():
            if key in claimed:
                continue
            model = self.known.ids[ids[0]]
            if free := self.own_ids_of(key):
                options = _of_patterns(free, patterns)
                self.made.append(NameBinding(free, model.path, key, model, options, _wrong_with(model)))
            else:
                self.problems.append(_name_taken(ids[0], model.path))

    def own_ids_of(self, key: object) -> tuple[str, ...]:
        """The ids that these weights have by themselves, without those that the config gives to a model."""
        return tuple(own for own in self.known.ids_of.get(key, ()) if own not in self._names)

    def _said(self, rule: ModelRule, key: object, patterns: Sequence[ModelRule]) -> ModelOptions:
        """Of a file by its rule, and where that says nothing by patterns of its names and the file's own."""
        return rule.options.over(_of_patterns((*rule.names, *self.own_ids_of(key)), patterns))

    def _about_found(self, rule: ModelRule, patterns: Sequence[ModelRule]) -> NameBinding:
        model = self.known.find(rule.name)
        if model is not None:
            options = self._said(rule, key_of(model), patterns)
            return NameBinding(rule.names, model.path, key_of(model), model, options, _wrong_with(model))
        refused = self.known.refused.get(rule.name)
        near = self.known.near(rule.name)
        problem = refused or Problem(
            f"there is no model {rule.name!r} among those found",
            remedy=f"Did you mean {' or '.join(near)}?" if near else "Say where it is: path, repo or url.",
            cause="model_missing",
            names=(rule.name,),
            where=rule.where,
        )
        if refused is None:
            self.problems.append(problem)
        return NameBinding(rule.names, "", ("missing", rule.name), None, rule.options, problem.message)

    def _of_source(self, rule: ModelRule, source: str, patterns: Sequence[ModelRule]) -> NameBinding:
        is_repo = not source.startswith("/") and "://" not in source
        model = self.known.sources.get(source)
        if model is None and is_repo:
            model = self.known.find(source)
        if model is None:
            # Of its names once it is here, the one that is known: what is said of it must not change then.
            names = (*rule.names, source) if is_repo else rule.names
            options = rule.options.over(_of_patterns(names, patterns))
            return NameBinding(rule.names, source, ("remote", source), None, options)
        options = self._said(rule, key_of(model), patterns)
        wrong = _wrong_with(model)
        if wrong and key_of(model) not in self.known.broken:  # else it is told of the file
            error = model.outcome
            self.problems.append(
                Problem(
                    wrong,
                    remedy=error.remedy if isinstance(error, LlamasupError) else "",
                    cause=error.cause if isinstance(error, LlamasupError) else "model_invalid",
                    names=(rule.name,),
                    paths=(model.path,),
                    where=rule.where,
                )
            )
        return NameBinding(rule.names, model.path, key_of(model), model, options, wrong)


def key_of(model: FoundModel) -> object:
    """The same for two paths that lead to the same files."""
    return model.files or model.path


def _is_sound(model: FoundModel) -> bool:
    return not isinstance(model.outcome, LlamasupError) and is_served(model.outcome)


def _sound_first(called: Sequence[FoundModel]) -> Sequence[FoundModel]:
    """Of files that are called alike those that count: half a copy must not disturb the whole file."""
    return [each for each in called if _is_sound(each)] or called


def _of_patterns(names: Sequence[str], patterns: Sequence[ModelRule]) -> ModelOptions:
    """What the patterns say of any of these names: the last in the config that says something decides."""
    options = ModelOptions()
    for rule in patterns:
        if any(map(pattern(rule.name).fullmatch, names)):
            options = rule.options.over(options)
    return options


def _wrong_with(model: FoundModel) -> str:
    if isinstance(model.outcome, LlamasupError):
        return model.outcome.message
    if not is_served(model.outcome):
        kind = model.outcome.model_class
        return f"{model.path}: is of class {kind} and not served by itself: {PURPOSES[kind]}"
    return ""


def _broken(error: LlamasupError, ids: tuple[str, ...], path: str) -> Problem:
    return Problem(error.message, error.remedy, error.cause, ids, (path,))


def _name_taken(own: str, path: str) -> Problem:
    return Problem(
        f"{path} is not served: {own!r}, as it is called, is another model in the config",
        remedy="Name it in the config: models: {NAME: {path: …}}.",
        cause="name_taken",
        names=(own,),
        paths=(path,),
    )


def _same_id(own: str, paths: Sequence[str]) -> Problem:
    return Problem(
        f"{len(paths)} files are called {own!r}, and none of them is served: {', '.join(paths)}",
        remedy="Rename all but one, or name them in the config: models: {NAME: {path: …}}.",
        cause="same_id",
        names=(own,),
        paths=tuple(paths),
    )


_STAY = ("ttl_s", "pin", "preload", "replicas", "keep_slots")
_LIMITS = ("max_concurrent", "max_queued", "wait_timeout_s", "drain_timeout_s")
_START = tuple(each.name for each in fields(ModelOptions) if each.name not in (*_STAY, *_LIMITS))


def can_share(one: ModelOptions, other: ModelOptions) -> bool:
    """Whether one process can be started as both say: where one says nothing, the other decides."""
    return all(
        mine is None or theirs is None or mine == theirs
        for mine, theirs in ((getattr(one, name), getattr(other, name)) for name in _START)
    )


def shared_options(said: Sequence[ModelOptions], defaults: ModelOptions) -> ModelOptions:
    """What holds for the one process of several names, over the defaults: it starts as any of them says, and
    stays, is loaded and lets wait as the most generous one says.
    """
    started = reduce(lambda all_of_them, each: all_of_them.over(each), said)
    effective = [each.over(defaults) for each in said]
    most = {}
    for name in (*_STAY, *_LIMITS):
        values = [value for each in effective if (value := getattr(each, name)) is not None]
        # Who says nothing about the time to live stays for ever.
        most[name] = max(values) if values and (name != "ttl_s" or len(values) == len(said)) else None
    return replace(started.over(defaults), **most)
