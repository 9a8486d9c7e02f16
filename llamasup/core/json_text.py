"""JSON as strict parsers take it, whatever the paths in it are made of.

A path with bytes outside UTF-8 has half surrogate pairs in Python (PEP 383), and ``json`` writes them as
``\\udcff``. What a reader makes of that is unpredictable (RFC 8259, section 8.2): many refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from llamasup.core.printable import path_text

__all__ = ["INVALID_JSON", "json_text"]

INVALID_JSON = (msgspec.MsgspecError, ValueError, RecursionError)
"""The exceptions of decoding JSON from outside; RecursionError for a few thousand nested arrays."""


def json_text(value: Any, *, indent: int | None = None) -> str:
    """``value`` in ASCII, which no encoding on the way harms. What JSON does not know becomes text."""
    text = json.dumps(value, default=str)
    if "\\ud" in text:  # hardly ever; to look at every value takes longer
        text = json.dumps(_well_formed(value))
    # The json module indents five times as slowly: 65 ms for a folder of 1,000 models.
    return text if indent is None else msgspec.json.format(text, indent=indent)


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return path_text(value)
    if isinstance(value, Mapping):
        return {_well_formed(key): _well_formed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_well_formed(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else path_text(str(value))
