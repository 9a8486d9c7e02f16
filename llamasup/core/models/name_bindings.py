"""Binds names to files: models of the config first, then found files without a rule (pure).

Also decides whether several names of one weight file can share a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs

from llamasup.core.gguf.facts import PURPOSES, is_served
from llamasup.core.models.found import FoundModel
from llamasup.core.models.names import NameIndex, pattern
from llamasup.core.models.rules import ModelRule, Problem
from llamasup.core.planning.projectors import has_projector_name
from llamasup.core.settings.model import OF_NAME, Engine, ModelSettings
from llamasup.core.system.text import one_of_these
from llamasup.errors import LlamasupError


class NameBinding(Struct, frozen=True):
    """The names, the file and the options of one model.

    ``key`` identifies the weights. ``options`` are without the defaults. ``found`` is None for a download,
    and for a missing file (with its ``problem``).
    """

    names: tuple[str, ...]
    source: str
    key: object
    found: FoundModel | None
    options: ModelSettings
    problem: str = ""
    remedy: str = ""
    by_config: bool = True
    engine: Engine | None = None


class FoundIndex:
    """The found files by their ids, and the files at the sources of rules. ``problems``: of unserved
    files.
    """

    def __init__(self, found: Sequence[FoundModel], sources: Mapping[str, FoundModel]) -> None:
        self.sources = sources
        self.problems: list[Problem] = []
        self.ids: dict[str, FoundModel] = {}
        """Id → file, valid or broken; a valid file takes precedence."""
        self.ids_of: dict[object, list[str]] = defaultdict(list)
        """Key of the weights → ids; two paths to one file give it two ids."""
        self.refused: dict[str, Problem] = {}
        """Ids of several files."""
        self.broken: set[object] = set()
        """Keys of broken files, each with an entry in ``problems``."""
        self._sort(found)
        self._index = NameIndex({id_: id_ for id_ in self.ids})

    def find(self, name: str) -> FoundModel | None:
        """Find the file with this id in any spelling."""
        found = self._index.find(name)
        return self.ids[found] if isinstance(found, str) else None

    def near(self, name: str) -> tuple[str, ...]:
        found = self._index.find(name)
        return (found,) if isinstance(found, str) else found

    def _sort(self, found: Sequence[FoundModel]) -> None:
        by_id: dict[str, list[FoundModel]] = defaultdict(list)
        sound = {file.ids[0] for file in found if file.ids and _is_sound(file)}
        for file in found:
            if not self._is_model(file, sound):
                continue
            if not file.ids:
                self.problems.append(
                    Problem(
                        f"{file.path}: no part of its name is valid in a model name",
                        remedy="Rename the file, or add it to the config: models: {NAME: {path: …}}.",
                        paths=(file.path,),
                    )
                )
                continue
            by_id[file.ids[0]].append(file)
        by_other: dict[str, list[FoundModel]] = defaultdict(list)
        shared: dict[str, Sequence[FoundModel]] = {}
        for own, called in by_id.items():
            files = _sound_first(called)
            if len({key_of(file) for file in files}) > 1:
                shared[own] = files
                for file in files:
                    for other in file.ids[1:] or filter(None, [file.qualified]):
                        by_other[other].append(file)
                continue
            self.ids[own] = files[0]
            self.ids_of[key_of(files[0])].append(own)
            for other in files[0].ids[1:]:
                by_other[other].append(files[0])
        for other, called in by_other.items():
            models = {key_of(file): file for file in _sound_first(called)}
            if len(models) == 1 and other not in self.ids and other not in shared:
                ((key, model),) = models.items()
                self.ids[other] = model
                self.ids_of[key].append(other)
        for own, files in shared.items():
            self.refused[own] = problem = _same_id(own, files, self.ids_of)
            if not all(self.ids_of.get(key_of(file)) for file in files):
                self.problems.append(problem)

    def _is_model(self, file: FoundModel, sound: Container[str]) -> bool:
        """Whether the file is a model.

        ``sound`` are the ids of valid files, which a broken file's problem omits.
        """
        if not isinstance(file.outcome, LlamasupError):
            return is_served(file.outcome)
        self.broken.add(key_of(file))
        names = tuple(own for own in file.ids[:1] if own not in sound)
        self.problems.append(_broken(file.outcome, names, file.path))
        return not has_projector_name(file.path)


class NameBinder(Struct):
    """Collects the bindings for one call of ``registry.build``."""

    index: FoundIndex
    made: list[NameBinding] = field(default_factory=list[NameBinding])
    problems: list[Problem] = field(default_factory=list[Problem])
    _names: set[str] = field(default_factory=set[str])

    def bind_rules(self, rules: Sequence[ModelRule], patterns: Sequence[ModelRule]) -> None:
        """Bind the models of the config. A rule takes precedence over patterns."""
        self._names = {name for rule in rules for name in rule.names}
        for rule in rules:
            if rule.engine is not None:
                options = rule.options.over(_of_patterns(rule.names, patterns))
                key = ("engine", rule.name)
                self.made.append(NameBinding(rule.names, "", key, None, options, engine=rule.engine))
            elif rule.source is None:
                self.made.append(self._bind_found(rule, patterns))
            else:
                self.made.append(self._bind_source(rule, rule.source, patterns))

    def bind_files(self, patterns: Sequence[ModelRule]) -> None:
        """Bind the found files without a rule."""
        bound = {binding.key for binding in self.made}
        for key, ids in self.index.ids_of.items():
            if key in bound:
                continue
            model = self.index.ids[ids[0]]
            if free := self.own_ids_of(key):
                options = _of_patterns(free, patterns)
                wrong = _wrong_with(model)
                self.made.append(NameBinding(free, model.path, key, model, options, *wrong, by_config=False))
            else:
                self.problems.append(_name_taken(ids[0], model.path))

    def own_ids_of(self, key: object) -> tuple[str, ...]:
        """The ids of these weights that are not names of the config."""
        return tuple(own for own in self.index.ids_of.get(key, ()) if own not in self._names)

    def _options(self, rule: ModelRule, key: object, patterns: Sequence[ModelRule]) -> ModelSettings:
        """The options of a file: of its rule, then of patterns for the rule's names and the file's own
        ids.
        """
        return rule.options.over(_of_patterns((*rule.names, *self.own_ids_of(key)), patterns))

    def _bind_found(self, rule: ModelRule, patterns: Sequence[ModelRule]) -> NameBinding:
        model = self.index.find(rule.name)
        if model is not None:
            options = self._options(rule, key_of(model), patterns)
            return NameBinding(rule.names, model.path, key_of(model), model, options, *_wrong_with(model))
        refused = self.index.refused.get(rule.name)
        near = self.index.near(rule.name)
        problem = refused or Problem(
            f"no model {rule.name!r} was found",
            remedy=one_of_these(near) or "Add path, repo or url to its entry.",
            cause="model_missing",
            names=(rule.name,),
            where=rule.where,
        )
        if problem not in self.index.problems:
            self.problems.append(problem)
        why = problem.message, problem.remedy
        return NameBinding(rule.names, "", ("missing", rule.name), None, rule.options, *why)

    def _bind_source(self, rule: ModelRule, source: str, patterns: Sequence[ModelRule]) -> NameBinding:
        is_repo = not Path(source).is_absolute() and "://" not in source
        model = self.index.sources.get(source)
        if model is None and is_repo:
            model = self.index.find(source)
        if model is None:
            # The repository will be an id of the downloaded file: patterns must apply before and after.
            names = (*rule.names, source) if is_repo else rule.names
            options = rule.options.over(_of_patterns(names, patterns))
            return NameBinding(rule.names, source, ("remote", source), None, options)
        options = self._options(rule, key_of(model), patterns)
        wrong, remedy = _wrong_with(model)
        if wrong and key_of(model) not in self.index.broken:  # else ``known.problems`` has it
            error = model.outcome
            self.problems.append(
                Problem(
                    wrong,
                    remedy,
                    cause=error.cause if isinstance(error, LlamasupError) else "model_invalid",
                    names=(rule.name,),
                    paths=(model.path,),
                    where=rule.where,
                )
            )
        return NameBinding(rule.names, model.path, key_of(model), model, options, wrong, remedy)


def key_of(model: FoundModel) -> object:
    """Return a key that is equal for two paths to the same files."""
    return model.files or model.path


def _is_sound(model: FoundModel) -> bool:
    return not isinstance(model.outcome, LlamasupError) and is_served(model.outcome)


def _sound_first(called: Sequence[FoundModel]) -> Sequence[FoundModel]:
    """The valid files of one name, or all if none is valid: an unfinished copy must not hide a valid file."""
    return [file for file in called if _is_sound(file)] or called


def _of_patterns(names: Sequence[str], patterns: Sequence[ModelRule]) -> ModelSettings:
    """The options of the patterns that match any of these names; later patterns take precedence."""
    options = ModelSettings()
    for rule in patterns:
        if any(map(pattern(rule.name).fullmatch, names)):
            options = rule.options.over(options)
    return options


def _wrong_with(model: FoundModel) -> tuple[str, str]:
    """The problem of the file and its remedy; both are empty if it can be served."""
    if isinstance(model.outcome, LlamasupError):
        return model.outcome.message, model.outcome.remedy
    if not is_served(model.outcome):
        kind = model.outcome.model_class
        return f"{model.path}: a model of class {kind} is not served alone: {PURPOSES[kind]}", ""
    return "", ""


def _broken(error: LlamasupError, ids: tuple[str, ...], path: str) -> Problem:
    return Problem(error.message, error.remedy, error.cause, ids, (path,), quiet=True)


def _name_taken(own: str, path: str) -> Problem:
    return Problem(
        f"{path} is not served: its name {own!r} is another model in the config",
        remedy="Add it to the config under another name: models: {NAME: {path: …}}.",
        cause="name_taken",
        names=(own,),
        paths=(path,),
    )


def _same_id(own: str, files: Sequence[FoundModel], ids_of: Mapping[object, Sequence[str]]) -> Problem:
    """Report files with the same id. Files without another id (``ids_of``) are not served."""
    paths = [file.path for file in files]
    instead = tuple(dict.fromkeys(ids_of[key_of(file)][0] for file in files if key_of(file) in ids_of))
    unserved = [file.path for file in files if key_of(file) not in ids_of]
    what = f"{len(files)} files have the name {own!r}"
    if not instead:
        message, remedy = f"{what}, so none of them is served: {', '.join(paths)}", "Rename all but one, or"
    elif unserved:
        message, remedy = f"{what}, so {', '.join(unserved)} is not served", "Rename it, or"
    else:
        message, remedy = f"{what}: {', '.join(paths)}", f"Use {' or '.join(instead)}, or"
    return Problem(
        message,
        remedy=f"{remedy} add them to the config: models: {{NAME: {{path: …}}}}.",
        cause="same_id",
        names=(own,),
        paths=tuple(paths),
        instead=instead,
    )


_FLAGS = ("extra", "loras")
_STARTING = tuple(field for field in ModelSettings.__struct_fields__ if field not in OF_NAME)


def can_share(one: ModelSettings, other: ModelSettings) -> bool:
    """Whether one process can serve both: their start options do not contradict each other.

    Flags for llama-server are meant for one name, so a name without them needs another process.
    """
    return all(
        mine == theirs or (name not in _FLAGS and (mine is None or theirs is None))
        for name in _STARTING
        for mine, theirs in [(_start_option(one, name), _start_option(other, name))]
    )


def _start_option(options: ModelSettings, name: str) -> Any:
    """Read a start option; None if it is not set. An empty list of flags is taken as not set."""
    value = getattr(options, name)
    return (value or None) if name in _FLAGS else value


def shared_options(said: Sequence[ModelSettings], defaults: ModelSettings) -> ModelSettings:
    """Merge the options of one process with several names, over the defaults.

    The result is the union of the start options, and the most generous of the others.
    """
    started = reduce(lambda all_of_them, options: all_of_them.over(options), said)
    effective = [options.over(defaults) for options in said]
    most = {}
    for name in OF_NAME:
        values = [value for options in effective if (value := getattr(options, name)) is not None]
        # A name without a time to live keeps the model loaded for ever.
        most[name] = max(values) if values and (name != "ttl_s" or len(values) == len(said)) else None
    return structs.replace(started.over(defaults), **most)
