"""A settings file with the settings of a client added (pure).

JSON is written again, with its keys in their order. TOML and YAML keep their text, comments included: lines
are replaced and added, and the result is then read and compared with what it should be. A file that cannot
be changed safely is refused.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import yaml

from llamasup.features.connect.clients import Format

_HIDDEN: Final = "(the key)"


class CannotMerge(Exception):
    """The file cannot be changed safely; the text says why."""


def rendered(values: Mapping[str, Any], format_: Format) -> str:
    """Return the values as the content of a new file."""
    return _RENDER[format_](values)


def merged(text: str, values: Mapping[str, Any], format_: Format) -> str:
    """Return ``text`` with the ``values``. Raises CannotMerge."""
    if not text.strip():
        return rendered(values, format_)
    after = _MERGE[format_](text, values)
    if any("\ud800" <= letter <= "\udfff" for letter in after):
        raise CannotMerge("it has a character that is not valid Unicode")
    return after


def difference(before: str, after: str, path: str, key: str) -> str:
    """Write a unified diff in which ``key`` is not shown; empty if nothing changes."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), path, path
    )
    shown = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    return shown.replace(_written(key), _HIDDEN) if key else shown


def has_key(text: str, key: str) -> bool:
    """Whether the settings contain ``key``: some clients read it from the environment."""
    return bool(key) and _written(key) in text


def _written(key: str) -> str:
    """All formats write it as JSON does."""
    return json.dumps(key, ensure_ascii=False)[1:-1]


def _combined(old: Any, new: Any) -> Any:
    """Mappings are merged; of lists of named entries, an entry replaces the one with its name."""
    if isinstance(old, dict) and isinstance(new, Mapping):
        return {**old, **{key: _combined(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, Sequence) and not isinstance(new, str):
        names = [entry.get("name") for entry in new if isinstance(entry, Mapping)]
        kept = [entry for entry in old if not (isinstance(entry, dict) and entry.get("name") in names)]
        return [*kept, *new]
    return new


# --- JSON --------------------------------------------------------------------------------------------


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _merge_json(text: str, values: Mapping[str, Any]) -> str:
    try:
        old = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CannotMerge(f"it is not plain JSON ({error}); comments would be lost") from None
    if not isinstance(old, dict):
        raise CannotMerge("it is not a JSON object")
    combined = _combined(old, values)
    return text if combined == old else _json_text(combined)


# --- TOML --------------------------------------------------------------------------------------------

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_TABLE: Final = re.compile(r"[ \t]*\[")


def _toml_text(values: Mapping[str, Any]) -> str:
    """Values at the top, and tables of tables of texts."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    top = "".join(f"{key} = {_quoted(value)}\n" for key, value in values.items() if key not in tables)
    return "\n".join(filter(None, (top, *_toml_tables(tables))))


def _toml_tables(tables: Mapping[str, Any]) -> list[str]:
    return [_toml_table(name, inner, table[inner]) for name, table in tables.items() for inner in table]


def _toml_table(name: str, inner: str, values: Mapping[str, Any]) -> str:
    return f"[{name}.{inner}]\n" + "".join(f"{key} = {_quoted(value)}\n" for key, value in values.items())


def _quoted(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)


def _merge_toml(text: str, values: Mapping[str, Any]) -> str:
    try:
        old = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CannotMerge(f"it is not valid TOML ({error})") from None
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = text.splitlines()
    for name, table in tables.items():
        for inner in table:
            lines = _without_table(lines, f"{name}.{inner}")
    at = next((number for number, line in enumerate(lines) if _TABLE.match(line)), len(lines))
    top, rest = lines[:at], lines[at:]
    for key, value in values.items():
        if key not in tables:
            top = _with_line(top, key, f"{key} = {_quoted(value)}")
    body = "\n".join((*top, *rest)).rstrip("\n")
    after = "\n\n".join((body, *_toml_tables(tables)))
    expected = {**old, **{key: value for key, value in values.items() if key not in tables}}
    for name, table in tables.items():
        expected[name] = {**_mapping(old.get(name)), **table}
    try:
        is_right = tomllib.loads(after) == expected
    except ValueError:
        is_right = False
    if not is_right:
        raise CannotMerge("its tables are written in a way that llamasup does not change")
    return text if expected == old else after


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _without_table(lines: list[str], name: str) -> list[str]:
    """The lines without the table of this name, up to the next table."""
    header = re.compile(rf"[ \t]*\[[ \t]*{re.escape(name)}[ \t]*\][ \t]*(?:#.*)?")
    kept: list[str] = []
    inside = False
    for line in lines:
        if _TABLE.match(line):
            inside = header.fullmatch(line) is not None
        if not inside:
            kept.append(line)
    return kept


def _with_line(lines: list[str], key: str, line: str) -> list[str]:
    """The lines at the top with this one in place of that of ``key``, else as the first."""
    own = re.compile(rf"[ \t]*{re.escape(key)}[ \t]*=")
    if any(own.match(each) for each in lines):
        return [line if own.match(each) else each for each in lines]
    return [line, *lines]


# --- YAML --------------------------------------------------------------------------------------------

_LIST_KEY: Final = "models"


def _yaml_text(values: Mapping[str, Any]) -> str:
    top = [f"{key}: {_yaml_value(value)}" for key, value in values.items() if key != _LIST_KEY]
    return "\n".join((*top, f"{_LIST_KEY}:", *_yaml_items(values, "  "))) + "\n"


def _yaml_value(value: Any) -> str:
    """JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)


def _yaml_items(values: Mapping[str, Any], indent: str) -> list[str]:
    return [
        f"{indent}{'- ' if number == 0 else '  '}{key}: {_yaml_value(value)}"
        for item in values[_LIST_KEY]
        for number, (key, value) in enumerate(item.items())
    ]


def _merge_yaml(text: str, values: Mapping[str, Any]) -> str:
    """Add only the entries of ``models``: the other values are those of a new file."""
    try:
        old = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CannotMerge(f"it is not valid YAML ({error})".replace("\n", " ")) from None
    if not isinstance(old, dict):
        raise CannotMerge("it has no keys at the top")
    present = old.get(_LIST_KEY) or []
    names = {item["name"] for item in values[_LIST_KEY]}
    same = [item for item in present if isinstance(item, dict) and item.get("name") in names]
    if same == values[_LIST_KEY]:
        return text
    if same:
        raise CannotMerge(f"it has another model of the name {same[0]['name']!r}; remove that entry first")
    lines = text.rstrip("\n").split("\n")
    at = next(
        (number for number, line in enumerate(lines) if re.fullmatch(r"models:[ \t]*(#.*)?", line)), None
    )
    if at is None:
        lines += [f"{_LIST_KEY}:", *_yaml_items(values, "  ")]
    else:
        first = next((line for line in lines[at + 1 :] if line.lstrip().startswith("- ")), "  - ")
        indent = first[: len(first) - len(first.lstrip())]
        lines[at + 1 : at + 1] = _yaml_items(values, indent)
    after = "\n".join(lines) + "\n"
    expected = {**old, _LIST_KEY: [*values[_LIST_KEY], *present]}
    try:
        is_right = yaml.safe_load(after) == expected
    except yaml.YAMLError:
        is_right = False
    if not is_right:
        raise CannotMerge("its list of models is written in a way that llamasup does not change")
    return after


_RENDER: Final[Mapping[Format, Callable[[Mapping[str, Any]], str]]] = {
    "json": _json_text,
    "toml": _toml_text,
    "yaml": _yaml_text,
}
_MERGE: Final[Mapping[Format, Callable[[str, Mapping[str, Any]], str]]] = {
    "json": _merge_json,
    "toml": _merge_toml,
    "yaml": _merge_yaml,
}
