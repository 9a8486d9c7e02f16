"""Decides which changes of a config are refused if its text comes over the API.

The user of the machine wrote the file. A client with the right ``control`` did not, and must not start
programs, read files or get secrets with a config. So its text may not add or change a value that names
something outside of llamasup (``Setting.outside``), or a ``${NAME}``. Values of the file may stay where they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.config.issues import NOT_SHOWN, Issue, issue_at, place_text, shown
from llamasup.core.settings.declaration import Place
from llamasup.core.settings.kinds import Names

_WHAT: Mapping[Names, str] = {
    "program": "names a program",
    "path": "names a path",
    "host": "names a host that llamasup trusts",
    "flags": "is flags for llama-server, which can read files and start programs",
    "rights": "decides who may do what",
}


class Value(Struct, frozen=True):
    """A value as it is written: one text, or the texts of a list."""

    names: Names
    texts: tuple[str, ...]
    is_list: bool
    hidden: bool = False


class Outside(Struct, frozen=True):
    """The values of a config that name something outside of llamasup, or contain a ``${NAME}``."""

    values: Mapping[Place, Value] = {}
    references: Mapping[Place, Set[str]] = {}


def key_of(place: Place) -> Place:
    """Return the place without positions in lists, which change when an item is removed."""
    return tuple(part for part in place if isinstance(part, str))


def refused_changes(
    before: Outside, after: Outside, lines: Mapping[Place, int], *, full: bool
) -> tuple[Issue, ...]:
    """List the refused changes from the file (``before``) to a text (``after``, with its ``lines``).

    ``full``: the file allows all of them, except those of rights.
    """
    found = [*_values(before, after, lines)]
    if full:
        found = [(place, value, what) for place, value, what in found if value.names == "rights"]
    else:
        for place, texts in after.references.items():
            for text in sorted(texts - before.references.get(place, frozenset())):
                found.append((place, Value("nothing", (text,), is_list=False), "reads the environment"))
    return tuple(
        replace(issue_at(place, _sentence(value, what), lines), key=place_text(place))
        for place, value, what in found
    )


def _values(
    before: Outside, after: Outside, lines: Mapping[Place, int]
) -> Iterator[tuple[Place, Value, str]]:
    for place, value in after.values.items():
        known = before.values.get(place)
        new = value.texts if known is None else tuple(text for text in value.texts if text not in known.texts)
        if value.names == "flags" and known is not None and value.texts != known.texts:
            new = value.texts  # the order of flags and their values decides what they do
        if new:
            yield place, Value(value.names, new, value.is_list, value.hidden), _WHAT[value.names]
    for place, value in before.values.items():
        is_removed = place not in after.values and not value.is_list
        # What has a name, such as a model, may be removed as a whole.
        if is_removed and not (len(place) > 2 and place[:2] not in lines):
            yield place, value, f"is removed, and {_WHAT[value.names]}"


def _sentence(value: Value, what: str) -> str:
    text = NOT_SHOWN if value.hidden else shown(" ".join(value.texts))
    if value.names == "rights":
        return f"{text} {what}; only the file itself can change it, on its machine"
    return (
        f"{text} {what}; change it in the file itself, or allow such changes there with "
        "http: {api_config: full}"
    )
