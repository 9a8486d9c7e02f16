"""The models that can be served, their names and their settings (pure).

Immutable: each change of the config or of the folders makes a new registry. An invalid config raises
ConfigInvalid; an invalid file becomes a ``Problem`` and affects no other model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct, field, structs

from llamasup.core.models.found import NO_SOURCES, Attachments, FoundModel
from llamasup.core.models.name_bindings import FoundIndex, NameBinder, NameBinding, can_share, shared_options
from llamasup.core.models.names import NameIndex, pattern
from llamasup.core.models.rules import ModelRule, Problem, check_rules
from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.settings.model import OF_NAME, ModelSettings, Settings
from llamasup.core.settings.names import is_pattern
from llamasup.core.system.text import joined_row, one_of_these
from llamasup.errors import LlamasupError

_NO_GROUPS: Mapping[str, Sequence[str]] = MappingProxyType({})
_NO_DEFAULTS = ModelSettings()


class Unknown(Struct, frozen=True):
    """The answer for a name that no model has. ``near`` are similar names, the nearest first.

    ``refused`` is true if several files have the name; then ``near`` are their other names.
    """

    name: str
    near: tuple[str, ...] = ()
    refused: Problem | None = None


class Registry(Struct, frozen=True):
    """The models by id, and every name and alias with the id of its model (``names``).

    ``default`` is the model of requests without a name. A spec with a ``problem`` cannot be loaded: requests
    for it get the problem.
    """

    specs: Mapping[str, ModelSpec]
    names: Mapping[str, str]
    default: str | None
    problems: tuple[Problem, ...] = ()
    refused: Mapping[str, Problem] = field(default_factory=lambda: MappingProxyType({}))
    """Names of several files, none of which is served under it."""
    _index: NameIndex = field(default_factory=lambda: NameIndex({}))
    _refused_index: NameIndex = field(default_factory=lambda: NameIndex({}))

    def find(self, name: str) -> ModelSpec | Unknown:
        """Find a model by its exact name; else without case, ``:latest`` and ``.gguf``, if that is unique.

        ``org/repo`` stands for its only quantization. One dict lookup; an unknown name costs a millisecond.
        """
        found = self._index.find(name)
        if isinstance(found, str):
            return self.specs[found]
        shared = self._refused_index.find(name)
        if not isinstance(shared, str):
            return Unknown(name, found)
        refused = self.refused[shared]
        others = (other for other in refused.instead if self._serves(other, refused.paths))
        return Unknown(name, tuple(others), refused)

    def _serves(self, name: str, paths: Sequence[str]) -> bool:
        return name in self.names and self.specs[self.names[name]].source in paths

    def resolve(self, name: str) -> ModelSpec | None:
        """Find like ``find``, but without the search for similar names."""
        found = self._index.resolve(name)
        return self.specs[found[0]] if len(found) == 1 else None

    def without(self, ids: Collection[str]) -> Registry:
        """Return the registry without these models."""
        names = {name: id_ for name, id_ in self.names.items() if id_ not in ids}
        return structs.replace(
            self,
            specs=MappingProxyType({id_: spec for id_, spec in self.specs.items() if id_ not in ids}),
            names=MappingProxyType(names),
            default=None if self.default in ids else self.default,
            _index=NameIndex(names),
        )


def build(
    rules: Sequence[ModelRule] = (),
    found: Sequence[FoundModel] = (),
    *,
    sources: Mapping[str, FoundModel] = NO_SOURCES,
    groups: Mapping[str, Sequence[str]] = _NO_GROUPS,
    defaults: ModelSettings = _NO_DEFAULTS,
    default_model: str | None = None,
) -> Registry:
    """Combine the rules of the config with the found files.

    ``found``: the files in the models folders. ``sources``: the files at the paths in the config and next to
    them. A rule for a repository uses its downloaded file. A file without a rule is served under its own id,
    with the options of the patterns that match it. ``groups``: name → names or patterns of its models.

    Raises ConfigInvalid, with every error in its details, for invalid or duplicate names.
    """
    check_rules(rules)
    patterns = [rule for rule in rules if rule.is_pattern]
    binder = NameBinder(FoundIndex(found, sources))
    binder.bind_rules([rule for rule in rules if not rule.is_pattern], patterns)
    binder.bind_files(patterns)
    attachments = Attachments.among(found, sources)
    members = {group: _Members(names) for group, names in groups.items()}
    specs = {spec.id: spec for spec in _specs(binder, attachments, defaults, members)}
    names = {name: spec.id for spec in specs.values() for name in spec.names}
    index = NameIndex(names)
    default, no_default = _default(specs, index, default_model)
    return Registry(
        specs=MappingProxyType(specs),
        names=MappingProxyType(names),
        default=default,
        problems=(
            *_file_problems(binder),
            *binder.problems,
            *_unpaired(specs),
            *_unknown_members(groups, names),
            *no_default,
        ),
        refused=MappingProxyType(binder.index.refused),
        _index=index,
        _refused_index=NameIndex({own: own for own in binder.index.refused}),
    )


def _file_problems(binder: NameBinder) -> Iterator[Problem]:
    """List the problems of files. A problem of a file that the config names is not quiet."""
    named = {binding.source for binding in binder.made if binding.by_config}
    for problem in binder.index.problems:
        yield structs.replace(problem, quiet=problem.quiet and named.isdisjoint(problem.paths))


def _specs(
    binder: NameBinder,
    attachments: Attachments,
    defaults: ModelSettings,
    groups: Mapping[str, _Members],
) -> Iterator[ModelSpec]:
    by_key: dict[object, list[list[NameBinding]]] = defaultdict(list)
    for binding in binder.made:
        sharing = by_key[binding.key]
        for others in sharing:
            if all(can_share(binding.options, other.options) for other in others):
                others.append(binding)
                break
        else:
            sharing.append([binding])
    for key, processes in by_key.items():
        for shared in processes:
            # The file's own name is an alias unless several processes serve the file.
            own = binder.own_ids_of(key) if len(processes) == 1 else ()
            names = tuple(dict.fromkeys([*(name for binding in shared for name in binding.names), *own]))
            yield _spec(names, shared, attachments, defaults, groups)


def _spec(
    names: tuple[str, ...],
    shared: Sequence[NameBinding],
    attachments: Attachments,
    defaults: ModelSettings,
    groups: Mapping[str, _Members],
) -> ModelSpec:
    first, found = shared[0], shared[0].found
    options = shared_options([binding.options for binding in shared], defaults)
    adapters = attachments.adapters.get(first.source, ()) if _takes_found(options) else ()
    pairing = attachments.pairings.get(first.source) if options.mmproj is None else None
    paired = () if pairing is None or pairing.projector is None else (pairing.projector.path,)
    extra_files = attachments.states_of((*paired, *adapters, *options.files))
    return ModelSpec(
        id=names[0],
        source=first.source,
        aliases=names[1:],
        settings=_settings(names[0], options, adapters),
        options=options,
        stay=Stay(
            ttl_s=float("inf") if options.ttl_s is None else options.ttl_s,
            pin=bool(options.pin),
            preload=bool(options.preload),
            groups=frozenset(group for group, members in groups.items() if members.have(names)),
        ),
        replicas=options.replicas or 1,
        identity=tuple(dict.fromkeys((*found.files, *extra_files))) if found is not None else (),
        listed=None if found is None or isinstance(found.outcome, LlamasupError) else found.outcome,
        pairing=pairing,
        problem=first.problem,
        remedy=first.remedy,
        shares=tuple(named) if len(named := [each.names[0] for each in shared if each.by_config]) > 1 else (),
        engine=first.engine,
        unlisted=bool(first.problem) and not any(binding.by_config for binding in shared),
    )


def _settings(own: str, options: ModelSettings, adapters: tuple[str, ...]) -> Settings:
    """Make the settings of one process. Replicas get their devices when they are started."""
    extra = list(options.extra or ())
    if options.devices and (options.replicas or 1) == 1:
        extra += ["--device", ",".join(options.devices)]
    if options.loras and not _takes_found(options):
        extra += [word for path in options.loras for word in ("--lora", joined_row([path]))]
    own_settings = {field: value for field, value in structs.asdict(options).items() if field not in OF_NAME}
    own_settings |= {
        "alias": own,
        "check_memory": options.check_memory is not False,
        "keep_slots": options.keep_slots,
        "adapters": adapters,
        "extra": tuple(extra),
    }
    return Settings(**own_settings)


def with_options(spec: ModelSpec, options: ModelSettings) -> ModelSpec:
    """Return ``spec`` with ``options`` where they are set."""
    merged = options.over(spec.options)
    base = spec.settings
    if spec.stay.by_command:  # its options are only in the settings of its process
        changed = {
            name: value
            for name, value in structs.asdict(options).items()
            if value is not None and name in Settings.__struct_fields__ and name not in OF_NAME
        }
        return structs.replace(spec, options=merged, settings=structs.replace(base, **changed))
    return structs.replace(
        spec,
        options=merged,
        settings=_settings(spec.id, merged, base.adapters),
        replicas=merged.replicas or 1,
        pairing=spec.pairing if options.mmproj is None else None,
    )


def _takes_found(options: ModelSettings) -> bool:
    """Whether the model uses the adapters next to it: ``loras: [auto]``."""
    return options.loras == ("auto",)


def _unpaired(specs: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    for spec in specs.values():
        if _takes_found(spec.options) and spec.listed is not None and not spec.settings.adapters:
            yield Problem(
                f"no adapter next to the model {spec.id!r} certainly belongs to it (loras: [auto])",
                remedy="Give their paths in the config: loras: [...].",
                cause="adapters_unpaired",
                names=(spec.id,),
                paths=(spec.source,),
            )


class _Members:
    """The members of a group; a group may name thousands."""

    def __init__(self, members: Sequence[str]) -> None:
        self._names = frozenset(member for member in members if not is_pattern(member))
        self._matches = tuple(pattern(member).fullmatch for member in members if is_pattern(member))

    def have(self, names: Iterable[str]) -> bool:
        """Whether one of these names is a member."""
        return not self._names.isdisjoint(names) or any(
            matches(name) for matches in self._matches for name in names
        )


def _unknown_members(groups: Mapping[str, Sequence[str]], names: Mapping[str, str]) -> Iterator[Problem]:
    for group, members in groups.items():
        for member in members:
            if member not in names and not (is_pattern(member) and _Members((member,)).have(names)):
                yield Problem(
                    f"the group {group!r} names {member!r}, which is not a model",
                    remedy="Correct the name, or remove it from the group.",
                    cause="model_not_found",
                    names=(member,),
                )


def _default(
    specs: Mapping[str, ModelSpec], index: NameIndex, wanted: str | None
) -> tuple[str | None, tuple[Problem, ...]]:
    if wanted is None:
        listed = [id_ for id_, spec in specs.items() if not spec.unlisted]
        return (listed[0] if len(listed) == 1 else None), ()
    found = index.find(wanted)
    if isinstance(found, str):
        return found, ()
    return None, (
        Problem(
            f"the default model {wanted!r} does not exist",
            remedy=one_of_these(found) or "Set it to a model that is served.",
            cause="model_not_found",
            names=(wanted,),
        ),
    )
