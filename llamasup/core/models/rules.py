"""The rules of the config about models, and their errors (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from llamasup.core.settings.model import Engine, ModelSettings
from llamasup.core.settings.names import is_pattern, why_not_a_name, why_not_an_alias
from llamasup.errors import ConfigInvalid


class ModelRule(Struct, frozen=True):
    """One model of the config.

    ``source``: an absolute path, ``org/repo[:quant]`` or a URL; None: a found file, and ``name`` is its id
    or, with ``*`` or ``?``, a pattern. ``where``: the location in the config. ``engine``: the program that
    serves it; None: llama-server.
    """

    name: str
    source: str | None = None
    aliases: tuple[str, ...] = ()
    options: ModelSettings = field(default_factory=ModelSettings)
    where: str = ""
    engine: Engine | None = None

    @property
    def is_pattern(self) -> bool:
        return is_pattern(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names without duplicates, the model's own first."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))


class Problem(Struct, frozen=True):
    """A model that is not served, or not as configured.

    ``names`` are ids; ``where`` is the location in the config. ``instead`` are other names of files that
    share a name. ``quiet`` is true for a file that the config does not name, which may be no model at all.
    """

    message: str
    remedy: str = ""
    cause: str = "model_invalid"
    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    where: str = ""
    instead: tuple[str, ...] = ()
    quiet: bool = False


def check_rules(rules: Sequence[ModelRule]) -> None:
    """Check the names of the rules. Raises ConfigInvalid with every error in its details."""
    errors = tuple(f"{rule.where}: {what}" if rule.where else what for rule, what in wrong_rules(rules))
    if errors:
        raise ConfigInvalid(
            "The config has invalid or duplicate model names.",
            remedy="Give every model its own name, and every alias to one model only.",
            details=errors,
        )


def wrong_rules(rules: Sequence[ModelRule]) -> Iterator[tuple[ModelRule, str]]:
    """List the invalid rules with their errors."""
    for rule in rules:
        if rule.is_pattern:
            if rule.source is not None or rule.engine is not None:
                what = "path, repo or url" if rule.engine is None else "command"
                yield rule, f"{rule.name!r} is a rule for many models, so it cannot have {what}"
            if rule.aliases:
                yield rule, f"{rule.name!r} is a pattern: an alias would name many models"
        elif why := why_not_a_name(rule.name):
            yield rule, f"the name {rule.name[:64]!r} {why}"
        for alias in rule.aliases:
            if why := why_not_an_alias(alias):
                yield rule, f"the alias {alias[:64]!r} of {rule.name!r} {why}"
    yield from _clashes(rules)


def _clashes(rules: Sequence[ModelRule]) -> Iterator[tuple[ModelRule, str]]:
    owners: dict[str, ModelRule] = {}
    for rule in rules:
        first = owners.setdefault(rule.name, rule)
        if first is not rule:
            yield rule, f"{rule.name!r} is defined twice{_location(first)}"
    taken: dict[str, ModelRule] = {}
    for rule in rules:
        for alias in rule.names[1:]:
            owner = owners.get(alias)
            if owner is not None and owner is not rule:
                circle = rule.name in owner.aliases
                if not circle or rule.name < alias:  # a circle is reported once
                    also = ", and the other way round" if circle else ""
                    yield (
                        rule,
                        f"{alias!r} is an alias of {rule.name!r}, and a model's name{_location(owner)}{also}",
                    )
            elif (first := taken.setdefault(alias, rule)) is not rule:
                yield rule, f"{alias!r} is an alias of {rule.name!r} and of {first.name!r}{_location(first)}"


def _location(rule: ModelRule) -> str:
    return f" ({rule.where})" if rule.where else ""
