"""Tools, calls and events as Codex 0.171 and llama-server b11434 write them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

__all__ = [
    "APPLY_PATCH",
    "FLAT",
    "PATCH",
    "WEATHER",
    "call",
    "events",
    "fields",
    "function",
    "read",
    "streamed",
]

Object = dict[str, Any]

PATCH: Final = '*** Begin Patch\n*** Add File: hällo.txt\n+"hi" \\ 🦙\t\n*** End Patch'
APPLY_PATCH: Final[Object] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FLAT: Final = "mcp__weather__get_weather"
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **more: Any) -> Object:
    return {"type": "function", "name": name, "parameters": PARAMETERS, **more}


WEATHER: Final[Object] = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Tools in the mcp__weather namespace.",
    "tools": [function("get_weather", description="The weather of a city.", strict=False)],
}


def call(name: str, arguments: str, id_: str = "1", **more: Any) -> Object:
    """A call of llama-server."""
    return {
        "id": f"fc_{id_}",
        "type": "function_call",
        "status": "completed",
        "arguments": arguments,
        "call_id": f"call_{id_}",
        "name": name,
        **more,
    }


def fields(arguments: Object) -> str:
    return json.dumps(arguments)


def events(*calls: Object, step: int = 3) -> list[Object]:
    """The events of an answer with these calls, as llama-server writes them: their ends come last."""
    found: list[Object] = [{"type": "response.created", "response": {"id": "r", "status": "in_progress"}}]
    for each in calls:
        begun = {**each, "arguments": "", "status": "in_progress"}
        found.append({"type": "response.output_item.added", "item": begun})
        arguments = each["arguments"]
        for at in range(0, len(arguments), step):
            delta = {"delta": arguments[at : at + step], "item_id": each["id"]}
            found.append({"type": "response.function_call_arguments.delta", **delta})
    found += [{"type": "response.output_item.done", "item": each} for each in calls]
    response = {"id": "r", "status": "completed", "output": list(calls), "usage": {"total_tokens": 3}}
    return [*found, {"type": "response.completed", "response": response}]


def streamed(found: Iterable[Object]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode()) for event in found
    )


def read(stream: bytes) -> list[Object]:
    """The events of a stream; each is named as its data says."""
    found = []
    for block in stream.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = block.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found
