"""The prompts, tools and schemas that the tests of all clients share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["QUESTION", "WEATHER_PARAMETERS", "Reading", "grammar_for", "is_weather"]

QUESTION = "Tell me a story."

WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "celsius": {"type": "boolean"},
    },
    "required": ["city", "celsius"],
    "additionalProperties": False,
}


class Reading(BaseModel):
    """What a schema asks for; a model of random weights says something of each field."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    certain: bool
    near: Literal[1, 2]


def is_weather(arguments: Any) -> bool:
    return (
        isinstance(arguments, dict)
        and set(arguments) == {"city", "celsius"}
        and arguments["city"] in ("Paris", "Rome")
        and isinstance(arguments["celsius"], bool)
    )


def grammar_for(text: str) -> str:
    """A grammar that allows nothing but ``text``."""
    return f'root ::= "{text}"'
