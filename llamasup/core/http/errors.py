"""Converts llamasup's errors to the JSON object of the contract (docs/design.md, HTTP) and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llamasup.errors import ERRORS, ControlFailed, LlamasupError, NotAllowed, ServerFailed

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
        for error_class in ERRORS
        if error_class not in (LlamasupError, ServerFailed)
    }
)
# Characters of each text in another program's answer.
_MAX_TEXT = 2000


def type_of(status: int) -> str:
    """Return the ``type`` of a status, as OpenAI and llama-server name it."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(error: LlamasupError) -> Mapping[str, Any]:
    """Return the JSON object.

    ``exit_code``, ``lines`` and ``details`` let the command line show its own error.
    """
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
    """Return the error in an answer of ``status``, of its own class if that is known."""
    fields = answered.get("error") if isinstance(answered, Mapping) else None
    if not isinstance(fields, Mapping):
        return ControlFailed(
            f"The answer has status {status} and is not an error of llamasup.",
            remedy="Is another program listening there?",
        )
    message, cause, remedy = (_text(fields.get(name)) for name in ("message", "cause", "remedy"))
    given: dict[str, Any] = {"remedy": remedy, "lines": _texts(fields.get("lines"))}
    exit_code = fields.get("exit_code")
    known = _BY_CAUSE.get(cause)
    # Some causes of llama-server's failures have the names of ours, with other exit codes.
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
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, list) else ()
