"""The body of a request for a virtual model → the body for its model (pure).

Only the fields that change are decoded; all others stay byte for byte, in their order.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llamasup.core.http.body_scan import MAX_DEPTH, MAX_STEPS, is_too_complex
from llamasup.core.http.heads import HttpError
from llamasup.core.http.requested_model import plain_json, renamed_form
from llamasup.core.http.routes import CHATS, OTHER_LABEL, RESPONSES, Route, Work
from llamasup.core.system.text import INVALID_JSON
from llamasup.features.virtual.parameters import ANSWER_LENGTHS, names_of
from llamasup.features.virtual.settings import Candidate, Changes

_Fields = dict[str, msgspec.Raw]
_read: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ABSENT: Final = msgspec.Raw(b"")


class _List(msgspec.Struct, array_like=True):
    """A list without an object for each item: a body may have ten million."""

    first: msgspec.Raw = _ABSENT


_read_first: Final = msgspec.json.Decoder(_List).decode
_read_text: Final = msgspec.json.Decoder(str).decode
_encode: Final = msgspec.json.Encoder().encode

_MESSAGES: Final = "/v1/messages /v1/messages/count_tokens"
_HAS_SYSTEM: Final = frozenset(_MESSAGES.split())
_WITHOUT_TEXT: Final = (Work.EMBEDDINGS, Work.RERANKING)
_COMPLETIONS: Final = frozenset(("/completion", "/completions", "/infill"))
_SYSTEM_ROLES: Final = ("system", "developer")
_MERGED: Final = ("chat_template_kwargs", "logit_bias")
"""Keys that do not depend on each other; those of a schema or of a format do."""
_BETWEEN: Final = "\n\n"
_SPACE: Final = b" \t\r\n"


def rewritten(body: bytes, route: Route, name: str, candidate: Candidate) -> bytes | HttpError:
    """Rewrite the body of a request with this ``route``. ``name`` is the virtual model, for errors."""
    if body.startswith(b"--") and not candidate.changes:
        return renamed_form(body, candidate.model)
    if is_too_complex(body):
        return HttpError(
            400,
            f"The virtual model {name!r} changes requests, and this one is too complex for it",
            cause="body_too_complex",
            remedy=f"send at most {MAX_STEPS:,} strings and brackets, with fewer than {MAX_DEPTH} levels of "
            f"nesting, or use the model {candidate.model!r} itself",
        )
    try:
        fields = _read(plain_json(body))
    except INVALID_JSON:
        return HttpError(
            400,
            f"The virtual model {name!r} changes requests, and this one is not a JSON object",
            cause="virtual_model_body",
            remedy=f"send JSON, or use the model {candidate.model!r} itself",
        )
    for changes in candidate.changes:
        _change(fields, changes, route.label)
        if changes.system and not _put_in_front(fields, changes.system, route):
            return HttpError(
                400,
                f"The virtual model {name!r} has a system prompt, {_why_no_place(route)}",
                cause="virtual_model_system",
                remedy=f"send a chat (/v1/chat/completions), or use the model {candidate.model!r} itself",
            )
    fields["model"] = _raw(candidate.model)  # another node does not know the virtual model
    return _encode(fields)


def _why_no_place(route: Route) -> str:
    if route.label == OTHER_LABEL:
        return "and llamasup does not know where requests to this path have one"
    return f"for which {route.label} has no place"


# --- parameters --------------------------------------------------------------------------------------


def _change(fields: _Fields, changes: Changes, label: str) -> None:
    for parameter in changes.remove:
        for alias in names_of(parameter):
            fields.pop(alias, None)
    for parameter, value in changes.default.items():
        sent = next((alias for alias in names_of(parameter) if _is_sent(fields, alias)), None)
        if sent is None:
            fields[_name_in(parameter, label)] = _raw(value)
        elif parameter in _MERGED:
            fields[sent] = _merged(fields[sent], value, client_first=True)
    for parameter, value in changes.set.items():
        before = fields.get(parameter)
        for alias in names_of(parameter):
            fields.pop(alias, None)
        if before is not None and parameter in _MERGED:
            fields[parameter] = _merged(before, value, client_first=False)
        else:
            fields[_name_in(parameter, label)] = _raw(value)


def _is_sent(fields: _Fields, parameter: str) -> bool:
    """Whether the client sent a value: null stands for the default, as for llama-server."""
    raw = fields.get(parameter)
    return raw is not None and bytes(raw) != b"null"


def _name_in(parameter: str, label: str) -> str:
    """The name of the parameter in the API of this route."""
    if parameter not in ANSWER_LENGTHS:
        return parameter
    if label in RESPONSES:
        return "max_output_tokens"
    return "n_predict" if label in _COMPLETIONS else "max_tokens"


def _merged(sent: msgspec.Raw, value: Any, *, client_first: bool) -> msgspec.Raw:
    """The keys of both. ``logit_bias`` may also be a list, which replaces, or is replaced."""
    if not isinstance(value, dict):
        return sent if client_first else _raw(value)
    try:
        keys = _read(sent)
    except INVALID_JSON:  # not an object: llama-server tells the client
        return sent if client_first else _raw(value)
    own = {key: _raw(each) for key, each in value.items()}
    return _raw(own | keys if client_first else keys | own)


# --- the system prompt -------------------------------------------------------------------------------


def _put_in_front(fields: _Fields, system: str, route: Route) -> bool:
    """Put ``system`` in front of the system prompt; False if the API has no place for one, and needs one."""
    label = route.label
    if label in CHATS:
        _into_messages(fields, system)
    elif label in _HAS_SYSTEM:
        fields["system"] = _before(fields.get("system"), system)
    elif label in RESPONSES:
        fields["instructions"] = _before(fields.get("instructions"), system, parts=False)
    else:
        return not route.infers or route.work in _WITHOUT_TEXT
    return True


def _into_messages(fields: _Fields, system: str) -> None:
    """Templates of many models accept one system message, the first."""
    messages = fields.get("messages", _ABSENT)
    try:
        first = _read_first(messages).first
        message = {} if first is _ABSENT else _read(first)
        role = _read_text(message["role"]) if "role" in message else ""
    except INVALID_JSON:
        return  # llama-server tells the client
    if role in _SYSTEM_ROLES:
        message["content"] = _before(message.get("content"), system)
        fields["messages"] = _with_first(messages, message, replaced=len(bytes(first)))
    else:
        fields["messages"] = _with_first(messages, {"role": "system", "content": system})


def _with_first(items: msgspec.Raw, item: Any, *, replaced: int = 0) -> msgspec.Raw:
    """The list with this first item. ``replaced``: the length of the item that it replaces."""
    rest = bytes(items)[1:].lstrip(_SPACE)[replaced:]
    comma = b"" if replaced or rest.startswith(b"]") else b","
    return msgspec.Raw(b"[" + _encode(item) + comma + rest)


def _before(content: msgspec.Raw | None, system: str, *, parts: bool = True) -> msgspec.Raw:
    """Return ``system``, and then the ``content``: a text, or a list of ``parts`` where the API has them.

    Only ``system`` for anything else: llama-server (b11434) ignores instructions of another type, and so a
    client could leave it out.
    """
    if content is None:
        return _raw(system)
    try:
        return _raw(f"{system}{_BETWEEN}{_read_text(content)}")
    except INVALID_JSON:
        pass
    try:
        _read_first(content)
    except INVALID_JSON:
        return _raw(system)
    if not parts:
        return _raw(system)
    return _with_first(content, {"type": "text", "text": f"{system}{_BETWEEN}"})


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
