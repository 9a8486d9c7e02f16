"""Errors of ours as the contract's JSON object (docs/design.md, HTTP), and back again."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import llamasup.errors as errors
from llamasup.errors import ControlFailed, LlamasupError, NotAllowed, ServerFailed

__all__ = ["error_from", "error_object", "type_of"]

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        429: "rate_limit_error",
        503: "unavailable_error",
    }
)
_BY_CAUSE: Mapping[str, type[LlamasupError]] = MappingProxyType(
    {
        error_class.cause: error_class
        for name in errors.__all__
        if (error_class := getattr(errors, name)) not in (LlamasupError, ServerFailed)
    }
)
# What a person is shown of somebody else's answer.
_LONGEST = 2000


def type_of(status: int) -> str:
    """The ``type`` that goes with a status, in the words of OpenAI and llama-server."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(error: LlamasupError) -> Mapping[str, Any]:
    """``exit_code``, ``lines`` and ``details`` are for the command line: it shows it as its own."""
    status = error.http_status
    shown: dict[str, Any] = {
        "message": error.message,
        "type": type_of(status),
        "code": status,
        "cause": error.cause,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }
    if error.lines:
        shown["lines"] = list(error.lines)
    if error.details:
        shown["details"] = list(error.details)
    return {"error": shown}


def error_from(status: int, answered: Any) -> LlamasupError:
    """The error that an answer of ``status`` stands for, as its own class where that is known here."""
    fields = answered.get("error") if isinstance(answered, Mapping) else None
    if not isinstance(fields, Mapping):
        return ControlFailed(
            f"The answer has status {status} and is no error of llamasup's.",
            remedy="Is another program listening there?",
        )
    message, cause, remedy = (_text(fields.get(name)) for name in ("message", "cause", "remedy"))
    given: dict[str, Any] = {"remedy": remedy, "lines": _texts(fields.get("lines"))}
    exit_code = fields.get("exit_code")
    known = _BY_CAUSE.get(cause)
    # llama-server's own failures have some of the words that ours have, and other exit codes.
    if known is not None and exit_code in (None, known.exit_code):
        return known(message, **given, details=_texts(fields.get("details")))
    if status in (401, 403):
        error: LlamasupError = NotAllowed(message, **given)
        error.cause = cause or error.cause
        return error
    if cause and isinstance(exit_code, int):
        return ServerFailed(message, cause=cause, exit_code=exit_code, **given)
    return ControlFailed(message or f"The answer has status {status}.", **given)


def _text(value: Any) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, list) else ()
