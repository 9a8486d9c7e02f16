"""Which models there are to serve, under which names, and with which settings (pure).

Made anew whenever the config or what lies in the folders changes, and never changed itself. What nobody can
mean with a config raises ConfigInvalid; what is wrong with single files is a problem of theirs, told and left
out, and disturbs no other model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from llamasup.errors import LlamasupError
from llamasup.llama_server.settings import Settings
from llamasup.models.attachments import Attachments
from llamasup.models.bindings import Claims, FoundIndex, NameBinding, can_share, shared_options
from llamasup.models.found import FoundModel
from llamasup.models.names import NameIndex, is_pattern, pattern
from llamasup.models.rules import ModelRule, Problem, check_rules
from llamasup.models.spec import ModelOptions, ModelSpec, Stay

__all__ = ["ModelRule", "Problem", "Registry", "Unknown", "build"]

_NO_SOURCES: Mapping[str, FoundModel] = MappingProxyType({})
_NO_GROUPS: Mapping[str, Sequence[str]] = MappingProxyType({})
_NOTHING_SAID = ModelOptions()


@dataclass(frozen=True, slots=True)
class Unknown:
    """No model has this name; ``near`` are names that may have been meant, the nearest first. ``refused``:
    several files have it.
    """

    name: str
    near: tuple[str, ...] = ()
    refused: Problem | None = None


@dataclass(frozen=True, slots=True)
class Registry:
    """``names``: every name and alias → the id of its model. ``default``: the id of what a request gets that
    names no model.

    A spec with a ``problem`` cannot be loaded: the problem is what those are told who ask for it.
    """

    specs: Mapping[str, ModelSpec]
    names: Mapping[str, str]
    default: str | None
    problems: tuple[Problem, ...] = ()
    refused: Mapping[str, Problem] = field(default_factory=lambda: MappingProxyType({}))
    """Names that several files have, so that none of them is served."""
    _index: NameIndex = field(default_factory=lambda: NameIndex({}), repr=False, compare=False)
    _refused_index: NameIndex = field(default_factory=lambda: NameIndex({}), repr=False, compare=False)

    def find(self, name: str) -> ModelSpec | Unknown:
        """By its very name; else by what is left of it without case, ``:latest`` and ``.gguf``, where that is
        one model's.

        ``org/repo`` means its only quantization. Costs a look into a table, and for a name that nobody has
        about a millisecond.
        """
        found = self._index.find(name)
        if isinstance(found, str):
            return self.specs[found]
        refused = self._refused_index.find(name)
        return Unknown(name, found, self.refused[refused] if isinstance(refused, str) else None)

    def meant(self, name: str) -> ModelSpec | None:
        """As ``find``, without a look for what is near."""
        found = self._index.meant(name)
        return self.specs[found[0]] if len(found) == 1 else None


def build(
    rules: Sequence[ModelRule] = (),
    found: Sequence[FoundModel] = (),
    *,
    sources: Mapping[str, FoundModel] = _NO_SOURCES,
    groups: Mapping[str, Sequence[str]] = _NO_GROUPS,
    defaults: ModelOptions = _NOTHING_SAID,
    default_model: str | None = None,
) -> Registry:
    """What the config says, over what was found.

    ``found`` lies in folders of models; ``sources`` is what is at the paths that the config names, and beside
    those that are models. A rule whose source is a repository takes the file where it was downloaded before.
    What is found and no rule is about is served under its own id, with what the patterns that match it say,
    over the ``defaults``.
    ``groups``: names or patterns of models of which one at a time is on a device.

    Raises ConfigInvalid, with every error in its details, for names that clash or are none.
    """
    check_rules(rules)
    patterns = [rule for rule in rules if rule.is_pattern]
    claims = Claims(FoundIndex(found, sources))
    claims.by_rules([rule for rule in rules if not rule.is_pattern], patterns)
    claims.by_files(patterns)
    attachments = Attachments.among(found, sources)
    members = {group: _Members(said) for group, said in groups.items()}
    specs = {spec.id: spec for spec in _specs(claims, attachments, defaults, members)}
    names = {name: spec.id for spec in specs.values() for name in spec.names}
    index = NameIndex(names)
    default, no_default = _default(specs, index, default_model)
    return Registry(
        specs=MappingProxyType(specs),
        names=MappingProxyType(names),
        default=default,
        problems=(
            *claims.known.problems,
            *claims.problems,
            *_unpaired(specs),
            *_unknown_members(groups, names),
            *no_default,
        ),
        refused=MappingProxyType(claims.known.refused),
        _index=index,
        _refused_index=NameIndex({own: own for own in claims.known.refused}),
    )


def _specs(
    claims: Claims,
    attachments: Attachments,
    defaults: ModelOptions,
    groups: Mapping[str, _Members],
) -> Iterator[ModelSpec]:
    by_key: dict[object, list[list[NameBinding]]] = defaultdict(list)
    for claim in claims.made:
        sharing = by_key[claim.key]
        for others in sharing:
            if all(can_share(claim.options, each.options) for each in others):
                others.append(claim)
                break
        else:
            sharing.append([claim])
    for key, processes in by_key.items():
        for shared in processes:
            # The file's own name means it, too, unless that could mean one of several.
            own = claims.own_ids_of(key) if len(processes) == 1 else ()
            names = tuple(dict.fromkeys([*(name for each in shared for name in each.names), *own]))
            yield _spec(names, shared, attachments, defaults, groups)


def _spec(
    names: tuple[str, ...],
    shared: Sequence[NameBinding],
    attachments: Attachments,
    defaults: ModelOptions,
    groups: Mapping[str, _Members],
) -> ModelSpec:
    first, found = shared[0], shared[0].found
    options = shared_options([each.options for each in shared], defaults)
    adapters = attachments.adapters.get(first.source, ()) if _takes_found(options) else ()
    pairing = attachments.pairings.get(first.source) if options.mmproj is None else None
    paired = () if pairing is None or pairing.projector is None else (pairing.projector.path,)
    beside = attachments.states_of((*paired, *adapters, *options.files))
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
        identity=tuple(dict.fromkeys((*found.files, *beside))) if found is not None else (),
        listed=None if found is None or isinstance(found.outcome, LlamasupError) else found.outcome,
        pairing=pairing,
        problem=first.problem,
    )


def _settings(own: str, options: ModelOptions, adapters: tuple[str, ...]) -> Settings:
    """For one process. Of replicas each gets its devices from whoever starts them."""
    extra = list(options.extra or ())
    if options.devices and (options.replicas or 1) == 1:
        extra += ["--device", ",".join(options.devices)]
    if options.loras and not _takes_found(options):
        extra += [word for path in options.loras for word in ("--lora", path)]
    return Settings(
        alias=own,
        ctx_size=options.ctx_size,
        parallel=options.parallel,
        gpu_layers=options.gpu_layers,
        threads=options.threads,
        kv_type=options.kv_type,
        flash_attn=options.flash_attn,
        draft_model=options.draft_model,
        mmproj=options.mmproj,
        profile=options.profile,
        check_memory=options.check_memory is not False,
        adapters=adapters,
        keep_slots=options.keep_slots is True,
        extra=tuple(extra),
    )


def _takes_found(options: ModelOptions) -> bool:
    """Whether it takes the adapters that are found beside it: ``loras: [auto]``."""
    return options.loras == ("auto",)


def _unpaired(specs: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    for spec in specs.values():
        if _takes_found(spec.options) and spec.listed is not None and not spec.settings.adapters:
            yield Problem(
                f"{spec.id!r} takes the adapters beside it, and none of them is certainly its own",
                remedy="Name their paths in the config: loras: [...].",
                cause="adapters_unpaired",
                names=(spec.id,),
                paths=(spec.source,),
            )


class _Members:
    """Of one group, which may name thousands: each model is looked for among them."""

    def __init__(self, said: Sequence[str]) -> None:
        self._names = frozenset(each for each in said if not is_pattern(each))
        self._matches = tuple(pattern(each).fullmatch for each in said if is_pattern(each))

    def have(self, names: Iterable[str]) -> bool:
        """Whether one of these names is a member's."""
        return not self._names.isdisjoint(names) or any(
            matches(name) for matches in self._matches for name in names
        )


def _unknown_members(groups: Mapping[str, Sequence[str]], names: Mapping[str, str]) -> Iterator[Problem]:
    for group, members in groups.items():
        for member in members:
            if member not in names and not (is_pattern(member) and _Members((member,)).have(names)):
                yield Problem(
                    f"{member!r} in the group {group!r} is no model",
                    remedy="Name models that are served, or take it out of the group.",
                    cause="model_not_found",
                    names=(member,),
                )


def _default(
    specs: Mapping[str, ModelSpec], index: NameIndex, wanted: str | None
) -> tuple[str | None, tuple[Problem, ...]]:
    if wanted is None:
        return (next(iter(specs)) if len(specs) == 1 else None), ()
    found = index.find(wanted)
    if isinstance(found, str):
        return found, ()
    near = f"Did you mean {' or '.join(found)}?" if found else "Name a model that is served."
    return None, (
        Problem(
            f"the default model {wanted!r} is not there",
            remedy=near,
            cause="model_not_found",
            names=(wanted,),
        ),
    )
