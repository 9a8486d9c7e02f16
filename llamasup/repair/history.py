"""Tool calls in a conversation whose arguments are not a JSON object (pure).

A model that was cut off, or that made a mistake, leaves such a call in the conversation, and the client
sends it with each later turn. With most templates llama-server (b11434: ``func_args_not_string`` in chat.cpp)
then answers each of them with 500. Of its 71 templates, 63 refuse ``{"city": "Par``, and 25 refuse a JSON
string; each that takes tool calls takes an object (docs/repair.md).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llamasup.http.body_scan import scanned

__all__ = ["MARK", "with_valid_arguments"]

MARK: Final = "malformed_arguments"
"""The only key of the object that takes the place of such arguments. The model sees what it wrote."""

_Fields = dict[str, msgspec.Raw]
_fields: Final = msgspec.json.Decoder(_Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_SMALL: Final = 1 << 18
"""Bytes of a body that takes a few milliseconds, whatever is in it."""


def with_valid_arguments(body: bytes) -> bytes | None:
    """The request with objects as the arguments of all tool calls; None if that changes nothing.

    Only the changed values are encoded again; all others stay byte for byte. llama-server itself refuses a
    body that is not readable.
    """
    if b'"arguments"' not in body or (len(body) > _SMALL and scanned(body).unclear):
        return None
    try:
        fields = _fields(body)
        return _encode(fields) if _repair_list(fields) else None
    except _UNREADABLE:
        return None


def _repair_list(fields: _Fields) -> bool:
    changed = False
    for name, repair in (("messages", _repair_message), ("input", _repair_item)):
        raw = fields.get(name, msgspec.Raw(b""))
        if not bytes(raw).startswith(b"["):  # absent, or a text
            continue
        items = _items(raw)
        found = [repair(item) if b'"arguments"' in bytes(item) else None for item in items]
        if any(item is not None for item in found):
            pairs = zip(items, found, strict=True)
            fields[name] = _raw([before if after is None else after for before, after in pairs])
            changed = True
    return changed


def _repair_message(raw: msgspec.Raw) -> msgspec.Raw | None:
    """Of a chat: ``tool_calls[].function.arguments``."""
    message = _fields(raw)
    if "tool_calls" not in message:
        return None
    calls, changed = _items(message["tool_calls"]), False
    for number, call_raw in enumerate(calls):
        call = _fields(call_raw)
        if "function" not in call:
            continue
        function = _fields(call["function"])
        if _repair_arguments(function):
            call["function"] = _raw(function)
            calls[number] = _raw(call)
            changed = True
    if not changed:
        return None
    message["tool_calls"] = _raw(calls)
    return _raw(message)


def _repair_item(raw: msgspec.Raw) -> msgspec.Raw | None:
    """Of ``/v1/responses``: an item with ``arguments``."""
    item = _fields(raw)
    return _raw(item) if _repair_arguments(item) else None


def _repair_arguments(owner: _Fields) -> bool:
    if "arguments" not in owner:
        return False
    arguments = _decode(owner["arguments"])
    if not isinstance(arguments, str) or _is_object(arguments):
        return False
    valid = {MARK: arguments} if arguments.strip() else {}
    owner["arguments"] = _raw(_encode(valid).decode())
    return True


def _is_object(text: str) -> bool:
    try:
        return isinstance(_decode(text), dict)
    except _UNREADABLE:
        return False


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
