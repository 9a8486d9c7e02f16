"""The repairs of a model's requests and answers (the setting ``repair``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct


class Repairs(Struct, frozen=True):
    """The repairs that are switched on for a model.

    ``tool_calls``: tool calls of a conversation, and an answer that llama-server refuses because it could not
    parse it. ``json``: an answer that does not match the JSON schema of its request.
    """

    tool_calls: bool = False
    json: bool = False


NO_REPAIRS: Final = Repairs()
_BY_SETTING: Final[Mapping[str | None, Repairs]] = MappingProxyType(
    {
        None: NO_REPAIRS,
        "off": NO_REPAIRS,
        "tools": Repairs(tool_calls=True),
        "json": Repairs(json=True),
        "both": Repairs(tool_calls=True, json=True),
    }
)


def repairs_of(setting: str | None) -> Repairs:
    """Read the setting. None: it is not set. Returns ``NO_REPAIRS`` itself if nothing is repaired."""
    return _BY_SETTING[setting]
