"""Conversations with an earlier tool call, as agents send them."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["BAD_ARGUMENTS", "TOOLS", "conversation"]

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
BAD_ARGUMENTS: Final = (
    '{"city": "Par',
    "Paris",
    "",
    "  \n",
    '{"city": "Paris"} {',
    '"Paris"',
    "[1]",
    "3",
    "NaN",
)
"""What models leave: cut off, without JSON, too much of it, or JSON that is not an object."""


def conversation(arguments: Any) -> dict[str, Any]:
    """The body of a chat whose earlier call has these arguments."""
    call = {
        "id": "call12345",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "content": "sunny"},
        {"role": "user", "content": "And in Rome?"},
    ]
    return {"messages": messages, "tools": TOOLS}
