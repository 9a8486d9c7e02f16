"""The settings of a config as JSON Schema (draft 2020-12), and as rows of docs/configuration.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from llamasup.core.config.config_keys import Config
from llamasup.core.settings.declaration import Setting, default_text, settings_of
from llamasup.core.settings.kinds import FilePath, Kind, Many, Name, Named, Parameters, Section
from llamasup.core.settings.parameters import ParameterName

_REFERENCE = "reference"


class Row(Struct, frozen=True):
    """A row of the table of settings. ``is_safe``: every config over the API may change the setting."""

    key: str
    takes: str
    default: str
    about: str
    is_safe: bool


def rows_of(struct: type[msgspec.Struct], *, but: type[msgspec.Struct] | None = None) -> tuple[Row, ...]:
    """List the keys of a section, without the keys in ``but``."""
    shared = settings_of(but) if but is not None else {}
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    return tuple(
        Row(
            name,
            _takes(setting.kind),
            default_text(defaults[field] if setting.default is None else setting.default),
            setting.about,
            setting.outside == "nothing",
        )
        for name, (field, setting) in settings_of(struct).items()
        if name not in shared
    )


def _takes(kind: Kind) -> str:
    match kind:
        case Many(of, or_one):
            return f"{of.allowed}; or a list" if or_one else kind.allowed
        case Section(keys, short=short) if short:
            return f"{_takes(settings_of(keys)[short][1].kind)}; or keys, see below"
        case Section():
            return "keys, see below"
        case Named(of):
            return f"names; each has {_takes(of)}"
        case _:
            return kind.allowed


# --- JSON Schema -------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Make the schema of a config. Only ``llamasup config check`` checks conditions on several keys."""
    definitions: dict[str, Any] = {
        _REFERENCE: {
            "description": "${NAME}: an environment variable; ${NAME:-text} if it may be unset or empty.",
            "type": "string",
            "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}",
        }
    }
    top = _section(Config, definitions)
    top.pop("description")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "llamasup's configuration",
        **top,
        "type": "object",
        "$defs": definitions,
    }


def _section(struct: type[msgspec.Struct], definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": _first_line(struct),
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            name: _described(setting, _of_kind(setting.kind, definitions))
            for name, (_, setting) in settings_of(struct).items()
        },
    }


def _described(setting: Setting, schema: Mapping[str, Any]) -> dict[str, Any]:
    default = default_text(setting.default)
    about = f"{setting.about} Default: {default}." if default else setting.about
    return {"description": about, **schema}


def _first_line(struct: type[msgspec.Struct]) -> str:
    return (struct.__doc__ or "").partition("\n")[0]


def _of_kind(kind: Kind, definitions: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case Section(keys, name, short):
            name = name or keys.__name__
            if name not in definitions:
                definitions[name] = {}  # keeps the order of the file
                definitions[name] |= _section(keys, definitions)
            section = {"$ref": f"#/$defs/{name}"}
            if not short:
                return section
            return {"anyOf": [_of_kind(settings_of(keys)[short][1].kind, definitions), section]}
        case Named(of, pattern):
            names = dict(Name(pattern).schema())
            del names["type"]
            return {
                "type": ["object", "null"],
                "propertyNames": names,
                "additionalProperties": _of_kind(of, definitions),
            }
        case Many(of, or_one):
            one = _of_kind(of, definitions)
            array = {"type": ["array", "null"], "items": one}
            return {"anyOf": [one, array]} if or_one else array
        case Parameters():
            names = dict(ParameterName().schema())
            del names["type"]
            return {"type": ["object", "null"], "propertyNames": names}
        case FilePath():
            return {"type": "string", "minLength": 1}
        case _:
            own = dict(kind.schema())
            if own == {"type": "string", "minLength": 1}:
                return own
            return {"anyOf": [own, {"$ref": f"#/$defs/{_REFERENCE}"}]}
