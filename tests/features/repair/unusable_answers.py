"""Requests whose answers a real llama-server or their client cannot use, for about half of the seeds."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["UNPARSED", "UNPARSED_OPTIONS", "WRONG_JSON"]

_BEGINNINGS: Final = [f" {letter}" for letter in "abcdefghijklm"]
_COUNT: Final = len(_BEGINNINGS)
_PARSER: Final = {
    "parsers": [
        *({"type": "literal", "literal": beginning} for beginning in _BEGINNINGS),
        {"type": "choice", "children": [*range(_COUNT)]},
        {"type": "any"},
        {"type": "repetition", "child": _COUNT + 1, "min_count": 0, "max_count": -1},
        {"type": "sequence", "children": [_COUNT, _COUNT + 2]},
        {"type": "tag", "child": _COUNT + 3, "tag": "content"},
    ],
    "rules": {},
    "root": _COUNT + 4,
}
_CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "hi"}]}

UNPARSED: Final[dict[str, Any]] = {**_CHAT, "max_tokens": 6, "chat_parser": json.dumps(_PARSER)}
"""Only words that begin with a letter of the first half match the format. b11434 reads this field of a
request if the chat template has no format of its own (``--no-jinja``)."""

UNPARSED_OPTIONS: Final = ("--no-jinja",)

_SCHEMA: Final = {"enum": [1, 2, 3, 4], "not": {"const": 1}}
WRONG_JSON: Final[dict[str, Any]] = {
    **_CHAT,
    "max_tokens": 40,
    "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
}
"""The grammar that llama-server makes of the schema allows a 1, because no grammar has a ``not``."""
