"""The declaration of a setting: everything that the commands, the config, the Python API and the docs need.

A group of settings is a Struct. Each field is one setting, ``Annotated[type, Setting(…)]``; a field without a
``Setting`` is not for users. In YAML the key is the field without ``_s`` (seconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

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
    of llamasup, if the kind does not decide it.
    """

    kind: Kind
    about: str
    default: Any = None
    flag: Flag | None = None
    of_name: bool = False
    names: Names = ""

    @property
    def outside(self) -> Names:
        """The thing outside of llamasup that a value names."""
        return self.names or self.kind.names


def _yaml_key(field: str) -> str:
    return field.removesuffix("_s")


class SettingGroup(msgspec.Struct, frozen=True, kw_only=True, rename=_yaml_key):
    """The settings of a section of the config, or of a model."""


@cache
def settings_of(group: type[msgspec.Struct]) -> Mapping[str, tuple[str, Setting]]:
    """List the YAML keys of a group, with the field and the declaration of each."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.encode_name: (field.name, setting)
        for field in msgspec.structs.fields(group)
        for setting in getattr(hints[field.name], "__metadata__", ())
        if isinstance(setting, Setting)
    }


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
