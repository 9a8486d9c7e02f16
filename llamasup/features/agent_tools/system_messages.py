"""Moves system messages in the middle of a conversation into the messages next to them (pure).

Many chat templates drop or refuse such a message. Whether a template does, only its prompt shows: ``PROBE``.
A moved text stays at its place in the conversation, so that what llama-server has in its cache stays valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from llamasup.core.http.requested_model import plain_json
from llamasup.core.http.routes import CHATS, RESPONSES
from llamasup.core.llama_server.warmup import WarmUpRequest
from llamasup.core.system.text import INVALID_JSON
from llamasup.features.agent_tools.tools import (
    INSTRUCT,
    UNREADABLE,
    Fields,
    begins,
    encode,
    is_heavy,
    raw_of,
    read_fields,
    read_items,
    text,
    text_of,
)

__all__ = ["PROBE", "has_later_system", "keeps_all", "moved"]

_ROLES: Final = ("system", "system", "user", "assistant", "system", "user")
PROBE: Final = WarmUpRequest(
    "/apply-template",
    {"messages": [{"role": each, "content": f"llamasup-{number}"} for number, each in enumerate(_ROLES)]},
    "a prompt",
)
"""Has llama-server render a second system message, and a later one."""


def keeps_all(status: int, answer: bytes) -> bool | None:
    """Return whether the template keeps all system messages of ``PROBE``. Returns None if that is unknown."""
    if status in (400, 500):  # the template refuses them
        return False
    try:
        prompt = json.loads(answer)["prompt"]
        return all(f"llamasup-{number}" in prompt for number, each in enumerate(_ROLES) if each in INSTRUCT)
    except (*INVALID_JSON, LookupError, TypeError):
        return None


class _Form(Struct, frozen=True):
    """The form of a conversation. ``first``: the member with its first instructions, besides the messages."""

    messages: str = "messages"
    first: str = ""
    part: str = "text"


_FORMS: Final[Mapping[str, _Form]] = {
    **dict.fromkeys(CHATS - {"/apply-template"}, _Form()),
    **dict.fromkeys(RESPONSES, _Form("input", "instructions", "input_text")),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), _Form(first="system")),
}


class _Message(Struct):
    role: Any = ""


class _Conversation(Struct):
    messages: list[_Message] = []
    input: list[_Message] | str = ""
    system: Any = None
    instructions: Any = None


_read: Final = msgspec.json.Decoder(_Conversation).decode


def has_later_system(body: bytes, route: str) -> bool:
    """Return whether a system message, or one of a developer, is not the first of all instructions."""
    form = _FORMS.get(route)
    if form is None or is_heavy(body):
        return False
    try:
        found = _read(plain_json(body))
    except UNREADABLE:
        return False
    messages = getattr(found, form.messages)
    has_first = bool(form.first and getattr(found, form.first))
    return isinstance(messages, list) and any(each.role in INSTRUCT for each in messages[not has_first :])


def moved(body: bytes, route: str) -> tuple[bytes, int]:
    """Return the body with all later system messages in the messages next to them, and their number.

    The messages at the beginning become one. Another text becomes a part of the message of the user or the
    result of a tool before it, else of the one after it, else a message of the user: so the roles alternate
    as before. A system message with anything but text stays.
    """
    form, count, waiting = _FORMS[route], 0, ""
    messages: list[Fields] = []
    try:
        fields = read_fields(plain_json(body))
        has_first = bool(msgspec.json.decode(fields.get(form.first, b"null")))
        for raw in (*read_items(fields[form.messages]), raw_of({})):
            message = read_fields(raw)
            said = text_of(message) if text(message.get("role")) in INSTRUCT else None
            if said is not None and (messages or waiting or has_first):
                count += 1
                if said and (waiting or not (messages and _add(messages[-1], said, form))):
                    waiting = _joined(waiting, said)
                continue
            if waiting and not _add(message, waiting, form):
                messages.append({"role": raw_of("user")})
                _add(messages[-1], waiting, form)
            waiting = ""
            messages.append(message)
        fields[form.messages] = raw_of(messages[:-1])
        return encode(fields), count
    except UNREADABLE:
        return body, 0


def _joined(first: str, second: str) -> str:
    return "\n\n".join(filter(None, (first, second)))


def _add(message: Fields, said: str, form: _Form) -> bool:
    """Add a text to a message. Returns whether the message takes it."""
    role, name = text(message.get("role")), "content"
    if text(message.get("type")) == "function_call_output":
        name = "output"
    elif role not in ("user", "tool", *INSTRUCT):
        return False
    if role not in INSTRUCT:
        said = f"<system-reminder>\n{said}\n</system-reminder>"  # as Claude Code writes its own
    content = message.get(name, Raw(b"null"))
    if begins(content, b"["):
        message[name] = raw_of([*read_items(content), {"type": form.part, "text": said}])
    else:
        message[name] = raw_of(_joined(text(content), said))
    return True
