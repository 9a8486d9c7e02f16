"""What the config says of models, and what in it nobody can mean (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llamasup.errors import ConfigInvalid
from llamasup.models.names import is_pattern, why_not_a_name
from llamasup.models.spec import ModelOptions

__all__ = ["ModelRule", "Problem", "check_rules", "wrong_rules"]


@dataclass(frozen=True, slots=True)
class ModelRule:
    """What the config says of a model.

    ``source``: an absolute path, ``org/repo[:quant]`` or a URL; None: it is about a model that is found, and
    ``name`` is its id, or, with ``*`` or ``?``, a pattern of names. ``where`` is the place in the config.
    """

    name: str
    source: str | None = None
    aliases: tuple[str, ...] = ()
    options: ModelOptions = field(default_factory=ModelOptions)
    where: str = ""

    @property
    def is_pattern(self) -> bool:
        return is_pattern(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, the model's own first."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not served, or not as it was meant.

    ``names`` are ids and ``paths`` files that it is about; ``where`` is the place in the config.
    """

    message: str
    remedy: str = ""
    cause: str = "model_invalid"
    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    where: str = ""


def check_rules(rules: Sequence[ModelRule]) -> None:
    """Raise ConfigInvalid, with every error in its details, for names that clash or are none."""
    errors = tuple(f"{rule.where}: {what}" if rule.where else what for rule, what in wrong_rules(rules))
    if errors:
        raise ConfigInvalid(
            "The names of the models cannot be meant like this.",
            remedy="Give every model a name of its own, and every alias to one model.",
            details=errors,
        )


def wrong_rules(rules: Sequence[ModelRule]) -> Iterator[tuple[ModelRule, str]]:
    """The rules that nobody can mean, and what is wrong with each."""
    yield from _bad_names(rules)
    yield from _clashes(rules)


def _bad_names(rules: Sequence[ModelRule]) -> Iterator[tuple[ModelRule, str]]:
    for rule in rules:
        if rule.is_pattern:
            if rule.source is not None:
                yield rule, f"{rule.name!r} is a pattern for many models, but has a source"
            if rule.aliases:
                yield rule, f"{rule.name!r} is a pattern: an alias would be the name of many models"
        elif why := why_not_a_name(rule.name):
            yield rule, f"the name {rule.name[:64]!r} {why}"
        for alias in rule.aliases:
            why = "is a pattern, and has to be a name" if is_pattern(alias) else why_not_a_name(alias)
            if why:
                yield rule, f"the alias {alias[:64]!r} of {rule.name!r} {why}"


def _clashes(rules: Sequence[ModelRule]) -> Iterator[tuple[ModelRule, str]]:
    owners: dict[str, ModelRule] = {}
    for rule in rules:
        first = owners.setdefault(rule.name, rule)
        if first is not rule:
            yield rule, f"{rule.name!r} is already said{_place(first)}"
    taken: dict[str, ModelRule] = {}
    for rule in rules:
        for alias in rule.names[1:]:
            owner = owners.get(alias)
            if owner is not None and owner is not rule:
                circle = rule.name in owner.aliases
                if not circle or rule.name < alias:  # a circle is told once
                    also = ", and the other way round" if circle else ""
                    yield rule, f"{alias!r} is an alias of {rule.name!r}, and a model{_place(owner)}{also}"
            elif (first := taken.setdefault(alias, rule)) is not rule:
                yield rule, f"{alias!r} is an alias of {rule.name!r} and of {first.name!r}{_place(first)}"


def _place(rule: ModelRule) -> str:
    return f" ({rule.where})" if rule.where else ""
