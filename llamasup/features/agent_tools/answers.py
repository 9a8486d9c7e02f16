"""Names the calls in an answer of ``/v1/responses`` back, as the client declared its tools (pure)."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import Raw

from llamasup.features.agent_tools.tools import (
    INPUT,
    UNREADABLE,
    Fields,
    Names,
    Tool,
    begins,
    encode,
    raw_of,
    read_fields,
    read_items,
    text,
)

__all__ = ["MAX_HELD", "Events", "InputText", "input_of", "whole"]

MAX_HELD: Final = 16 << 20
"""Bytes of an event, or of a whole answer, that is held until it is complete; a larger one passes unchanged.
The last event of a stream has the whole answer: 3 million tokens."""

_CALL: Final = b"function_call"  # in each event about a call
_BEGINNING: Final = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_HEX: Final = "[0-9A-Fa-f]"
_SAFE: Final = re.compile(
    rf'(?:[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|\\u(?![dD][89a-fA-F]){_HEX}{{4}})*'
)
"""A part of a JSON string without the half of a character."""
_arguments: Final = msgspec.json.Decoder(dict[str, Any]).decode
_string: Final = msgspec.json.Decoder(str, strict=False).decode


def whole(body: bytes, names: Names) -> bytes:
    """Return a whole answer with its calls named back."""
    if _CALL not in body:
        return body
    try:
        response = read_fields(body)
        return encode(response) if _rename_output(response, names) else body
    except UNREADABLE:
        return body


def input_of(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function.

    A model may have chosen another name for the only argument, or have written the input itself.
    """
    try:
        fields = _arguments(arguments)
    except UNREADABLE:
        return arguments
    value = fields.get(INPUT, next(iter(fields.values())) if len(fields) == 1 else None)
    return value if isinstance(value, str) else arguments


class InputText:
    """Reads the input of a custom tool while the arguments of its function arrive."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False

    def add(self, delta: str) -> str:
        """Return the part of the input that has become known."""
        self._held += delta
        if not self._has_begun:
            beginning = _BEGINNING.match(self._held)
            if beginning is None:
                return ""
            self._has_begun, self._held = True, self._held[beginning.end() :]
        safe = _SAFE.match(self._held)
        assert safe is not None
        found, self._held = safe[0], self._held[safe.end() :]
        if "\\" not in found:
            return found
        return str(msgspec.json.decode(f'"{_ESCAPED.sub(_escape, found)}"'))


_ESCAPED: Final = re.compile(r"[\x00-\x1f]")


def _escape(letter: re.Match[str]) -> str:
    return f"\\u{ord(letter[0]):04x}"


class Events:
    """The events of a streamed answer, whose bytes arrive in any pieces."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._held = b""
        self._calls: dict[str, tuple[Tool, InputText]] = {}  # that have begun, by the id of their item

    def add(self, data: bytes) -> bytes:
        """Return the complete events, for the client."""
        complete, end, self._held = (self._held + data).rpartition(b"\n\n")
        if len(self._held) > MAX_HELD:
            complete, end, self._held = complete + end, self._held, b""
            return complete + end
        if _CALL not in complete:
            return complete + end
        return b"".join(self._event(block) for block in complete.split(b"\n\n"))

    def rest(self) -> bytes:
        """Return what is left when the stream ends."""
        held, self._held = self._held, b""
        return held

    def _event(self, block: bytes) -> bytes:
        if _CALL in block:
            try:
                found = self._changed(_data_of(block))
            except UNREADABLE:
                found = None
            if found is not None:
                return b"".join(
                    b"event: %b\ndata: %b\n\n" % (text(event["type"]).encode(), encode(event))
                    for event in found
                )
        return block + b"\n\n"

    def _changed(self, event: Fields) -> list[Fields] | None:
        """The events in place of this one; None: it stays."""
        match text(event.get("type")):
            case "response.output_item.added":
                return self._added(event)
            case "response.output_item.done":
                return self._done(event)
            case "response.function_call_arguments.delta":
                return self._delta(event)
            case "response.function_call_arguments.done":
                return self._arguments(event)
        if "type" not in event or not begins(event.get("response"), b"{"):
            return None
        response = read_fields(event["response"])
        if not _rename_output(response, self._names):
            return None
        return [{**event, "response": raw_of(response)}]

    def _added(self, event: Fields) -> list[Fields] | None:
        item, tool = _call_in(event, self._names)
        if tool is None:
            return None
        self._calls[text(item.get("id"))] = (tool, InputText())
        return [{**event, "item": raw_of(_renamed(item, tool))}]

    def _delta(self, event: Fields) -> list[Fields] | None:
        tool, reader = self._calls.get(text(event.get("item_id")), (None, None))
        if tool is None or reader is None or not tool.is_custom:
            return None
        delta = reader.add(text(event.get("delta")))
        kind = raw_of("response.custom_tool_call_input.delta")
        return [{**event, "type": kind, "delta": raw_of(delta)}] if delta else []

    def _arguments(self, event: Fields) -> list[Fields] | None:
        """The end of the arguments, which b11434 does not send."""
        tool, _reader = self._calls.get(text(event.get("item_id")), (None, None))
        if tool is None:
            return None
        if tool.is_custom:  # the end of the item has it
            return []
        return [{**event, "name": raw_of(tool.name)}] if "name" in event else None

    def _done(self, event: Fields) -> list[Fields] | None:
        item, tool = _call_in(event, self._names)
        if tool is None:
            return None
        renamed = _renamed(item, tool)
        events: list[Fields] = [{**event, "item": raw_of(renamed)}]
        if tool.is_custom:
            done = {"type": raw_of("response.custom_tool_call_input.done"), INPUT: renamed[INPUT]}
            if "id" in item:
                done["item_id"] = item["id"]
            if "output_index" in event:
                done["output_index"] = event["output_index"]
            events.insert(0, done)
        return events


def _data_of(block: bytes) -> Fields:
    """The data of an event. Raises ValueError if it is not one line of JSON."""
    (data,) = (line for line in block.split(b"\n") if line.startswith(b"data:"))
    return read_fields(data[5:])


def _call_in(event: Fields, names: Names) -> tuple[Fields, Tool | None]:
    item = read_fields(event["item"]) if begins(event.get("item"), b"{") else {}
    return item, _called(item, names)


def _called(item: Fields, names: Names) -> Tool | None:
    return names.get(text(item.get("name"))) if text(item.get("type")) == "function_call" else None


def _renamed(item: Fields, tool: Tool) -> Fields:
    """The item of a call, as the client knows its tool."""
    item = {**item, "name": raw_of(tool.name)}
    if tool.namespace:
        item["namespace"] = raw_of(tool.namespace)
    if tool.is_custom:
        item["type"] = raw_of("custom_tool_call")
        item[INPUT] = raw_of(input_of(text(item.pop("arguments", None))))
    return item


def _rename_output(response: Fields, names: Names) -> bool:
    """Name the calls of a response back. Returns whether it has any."""
    if not begins(response.get("output"), b"["):
        return False
    items, changed = read_items(response["output"]), False
    for number, raw in enumerate(items):
        if _CALL in bytes(raw):
            item = read_fields(raw)
            if (tool := _called(item, names)) is not None:
                items[number] = Raw(encode(_renamed(item, tool)))
                changed = True
    if changed:
        response["output"] = raw_of(items)
    return changed
