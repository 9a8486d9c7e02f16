"""The declaration of a setting: everything that the commands, the config, the Python API and the docs need.

A group of settings is a Struct. Each field is one setting, ``field: type = setting(…)``; other fields are not
for users. In YAML the key is the field without ``_s`` (seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from llamasup.core.settings.kinds import Kind, Names
from llamasup.core.settings.units import Size, duration_text


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """The option of a setting on the command line.

    ``name``: by default the field; without dashes. ``metavar``: by default the kind's. ``help``: by default
    the setting's. ``noun``: what a number means, for errors. ``on``: the value that a switch
    sets. ``checked``: False if the plan checks the value instead, against the range for this model and
    machine. ``first``: shown first. ``of_service``: the value is not for the plan, but for the service of
    ``run`` and ``wrap``.
    """

    name: str = ""
    metavar: str = ""
    help: str = ""
    noun: str = "a number"
    on: bool = True
    checked: bool = True
    first: bool = False
    of_service: bool = False


class Setting(msgspec.Struct, frozen=True):
    """The declaration of one setting.

    ``default``: the value that applies if none is set, or a text that describes it; None if it is the default
    of the field. ``flag``: its option; None: it has none. ``of_name``: it belongs to the model's name, not to
    its processes, so the names of one file can have different values. ``names``: what a value names outside
    of llamasup, if the kind does not decide it. ``unset``: the default of the field.
    """

    kind: Kind
    about: str
    default: Any = None
    flag: Flag | None = None
    of_name: bool = False
    names: Names = ""
    unset: Any = None

    @property
    def outside(self) -> Names:
        """The thing outside of llamasup that a value names."""
        return self.names or self.kind.names


def setting(kind: Kind, about: str, default: Any = None, **more: Any) -> Any:
    """Declare a field of a group: the arguments are those of ``Setting``."""
    return Setting(kind, about, default, **more)


T = TypeVar("T")
Place = tuple[str | int, ...]
"""The path to a value: keys, and indexes of lists. ``("models", "qwen", "aliases", 1)``."""


class ConfigKey(msgspec.Struct, Generic[T], frozen=True):
    """A key of a config that belongs to a feature. ``Config.of`` returns its value. One with the name of a
    key of the core takes its place.

    ``after``: the key of the core that it follows in the documentation. ``issues``: ``(Config, whether all
    models are known) → errors between keys``. ``check`` raises ConfigInvalid for a value that a program made.
    ``of_this_machine``: ``Config → Config`` without what concerns other machines. ``finds_models``: keys with
    which llamasup may serve models that the config does not name.
    """

    name: str
    setting: Setting
    default: T
    after: str
    issues: Callable[[Any, bool], Iterator[tuple[Place, str]]] | None = None
    check: Callable[[T], None] | None = None
    of_this_machine: Callable[[Any], Any] | None = None
    finds_models: tuple[Place, ...] = ()


def _yaml_key(field: str) -> str:
    return field.removesuffix("_s")


class _GroupType(msgspec.StructMeta):
    """Keeps the declarations of a group in ``declared``, and gives their defaults to the fields."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        declared = {field: of for base in bases for field, of in getattr(base, "declared", {}).items()}
        for field, value in tuple(namespace.items()):
            declared.pop(field, None)  # a subclass may have a plain field in place of a setting
            if isinstance(value, Setting):
                declared[field], namespace[field] = value, value.unset
        return super().__new__(mcs, name, bases, {**namespace, "declared": declared}, **options)


class SettingGroup(msgspec.Struct, frozen=True, kw_only=True, rename=_yaml_key, metaclass=_GroupType):
    """The settings of a section of the config, or of a model."""


@cache
def settings_of(group: type[msgspec.Struct]) -> Mapping[str, tuple[str, Setting]]:
    """List the YAML keys of a group, with the field and the declaration of each."""
    declared: Mapping[str, Setting] = getattr(group, "declared", {})
    names = zip(group.__struct_encode_fields__, group.__struct_fields__, strict=True)
    return {key: (field, declared[field]) for key, field in names if field in declared}


def default_text(value: object) -> str:
    """Write a default in the notation of a config; a text describes itself."""
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case float():
            return duration_text(value)
        case int() | Size():
            return str(value)
        case _:
            return ""
