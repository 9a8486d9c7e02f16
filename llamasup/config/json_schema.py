"""The keys of ``config_keys.py`` as JSON Schema (draft 2020-12), and as rows of docs/configuration.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from llamasup.config.config_keys import Config
from llamasup.config.kinds import FilePath, Key, Kind, Many, Name, Named, Section
from llamasup.config.reading import keys_of
from llamasup.config.units import Size, duration_text

__all__ = ["Row", "json_schema", "rows_of"]

_REFERENCE = "reference"


class Row(Struct, frozen=True):
    key: str
    takes: str
    default: str
    about: str


def rows_of(struct: type[msgspec.Struct], *, but: type[msgspec.Struct] | None = None) -> tuple[Row, ...]:
    """The keys of a section, without those of ``but``."""
    shared = keys_of(but) if but is not None else {}
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    return tuple(
        Row(name, _takes(key.kind), key.default or _default_text(defaults[field]), key.about)
        for name, (field, key) in keys_of(struct).items()
        if name not in shared
    )


def _takes(kind: Kind) -> str:
    match kind:
        case Many(of, or_one):
            return f"{of.allowed}; or a list" if or_one else kind.allowed
        case Section():
            return "keys, see below"
        case Named(of):
            return f"names; each has {_takes(of)}"
        case _:
            return kind.allowed


def _default_text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return duration_text(value)
        case int() | Size():
            return str(value)
        case _:
            return ""


# --- JSON Schema -------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The schema of a config. Only ``llamasup config check`` checks conditions on several keys."""
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
            name: _described(key, _of_kind(key.kind, definitions))
            for name, (_, key) in keys_of(struct).items()
        },
    }


def _described(key: Key, schema: Mapping[str, Any]) -> dict[str, Any]:
    about = f"{key.about} Default: {key.default}." if key.default else key.about
    return {"description": about, **schema}


def _first_line(struct: type[msgspec.Struct]) -> str:
    return (struct.__doc__ or "").partition("\n")[0]


def _of_kind(kind: Kind, definitions: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case Section(keys):
            if keys.__name__ not in definitions:
                definitions[keys.__name__] = {}  # keeps the order of the file
                definitions[keys.__name__] |= _section(keys, definitions)
            return {"$ref": f"#/$defs/{keys.__name__}"}
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
        case FilePath():
            return {"type": "string", "minLength": 1}
        case _:
            own = dict(kind.schema())
            if own == {"type": "string", "minLength": 1}:
                return own
            return {"anyOf": [own, {"$ref": f"#/$defs/{_REFERENCE}"}]}
