"""Tool calls in a conversation whose arguments are not a JSON object (pure).

A model that was cut off, or that made a mistake, leaves such a call in the conversation, and the client
sends it with each later turn. With most templates llama-server (b11434: ``func_args_not_string`` in chat.cpp)
then answers each of them with 500 (docs/repair.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from llamasup.core.http.requested_model import plain_json

MARK: Final = "malformed_arguments"
"""The only key of the object that takes the place of such arguments. The model sees what it wrote."""

_Fields = dict[str, msgspec.Raw]
_fields: Final = msgspec.json.Decoder(_Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text: Final = msgspec.json.Decoder(str).decode
_check: Final = msgspec.json.Decoder(msgspec.Raw).decode  # reads all, and makes no object for what is in it
_encode: Final = msgspec.json.Encoder().encode
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_KEY: Final = b'"arguments"'
_MOST_KEYS: Final = 200_000
_MOST_ITEMS: Final = 500_000
"""A body with more colons or commas would hold the event loop for longer than about 0.2 s."""
_WHITE_SPACE: Final = b" \t\r\n"


def with_valid_arguments(body: bytes) -> bytes | None:
    """The request with objects as the arguments of all tool calls; None if that changes nothing.

    Only the changed values are encoded again; all others stay byte for byte. llama-server itself refuses a
    body that is not readable.
    """
    if _KEY not in body or body.count(b":") > _MOST_KEYS or body.count(b",") > _MOST_ITEMS:
        return None
    try:
        fields = _fields(plain_json(body))
        changed = _repair_items(fields, "messages", _repair_message)
        changed = _repair_items(fields, "input", _repair_item) or changed
        return _encode(fields) if changed else None
    except _UNREADABLE:
        return None


def _repair_items(owner: _Fields, name: str, repair: Callable[[_Fields], bool]) -> bool:
    """Repair the objects of this list. An item of another form stays: llama-server judges it."""
    if not _begins(owner.get(name), b"["):
        return False
    items, changed = _items(owner[name]), False
    for number, raw in enumerate(items):
        if _begins(raw, b"{") and _KEY in bytes(raw):
            item = _fields(raw)
            if repair(item):
                items[number] = _raw(item)
                changed = True
    if changed:
        owner[name] = _raw(items)
    return changed


def _repair_message(message: _Fields) -> bool:
    """Repair a message of a chat: ``tool_calls[].function.arguments``."""
    return _repair_items(message, "tool_calls", _repair_call)


def _repair_call(call: _Fields) -> bool:
    if not _begins(call.get("function"), b"{"):
        return False
    function = _fields(call["function"])
    if not _repair_arguments(function):
        return False
    call["function"] = _raw(function)
    return True


def _repair_item(item: _Fields) -> bool:
    """Repair a function call of ``/v1/responses``."""
    return bytes(item.get("type", b"")) == b'"function_call"' and _repair_arguments(item)


def _repair_arguments(owner: _Fields) -> bool:
    raw = owner.get("arguments")
    if raw is None or _begins(raw, b"{"):
        return False
    # llama-server makes a text of other JSON, and reads that.
    text = _text(raw) if _begins(raw, b'"') else bytes(raw).decode()
    if _is_object(text):
        return False
    is_empty = not text.strip() or text.strip() == "null"
    owner["arguments"] = _raw(_encode({} if is_empty else {MARK: text}).decode())
    return True


def _is_object(text: str) -> bool:
    plain = text.removeprefix("\ufeff")
    try:
        _check(plain)
    except _UNREADABLE:
        return False
    return plain.lstrip().startswith("{")


def _begins(raw: msgspec.Raw | None, mark: bytes) -> bool:
    return raw is not None and bytes(raw).lstrip(_WHITE_SPACE).startswith(mark)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
