"""Formats the requests of the control API as a table, for ``llamasup top``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamasup.cli.output.layout import fitted_table, with_nodes
from llamasup.cli.output.view import duration_text
from llamasup.core.queueing.wait_estimate import progress_text
from llamasup.core.system.text import printable

Request = Mapping[str, Any]

SORTS = ("age", "tokens", "speed", "model", "client")
_HEADINGS = ("REQUEST", "MODEL", "CLIENT", "PHASE", "AGE", "PROMPT", "TOKENS", "TOKENS/S", "PATH")
_ENDED_HEADINGS = ("ENDED", "MODEL", "CLIENT", "OUTCOME", "TIME", "PROMPT", "TOKENS", "TOKENS/S", "PATH")
# Left out on a narrow terminal, in this order.
_OPTIONAL = ("PATH", "PROMPT", "CLIENT", "TOKENS/S", "MODEL")


def sorted_requests(requests: Sequence[Request], by: str) -> Sequence[Request]:
    """Sort by one of SORTS: the oldest, the largest or the fastest first, or in alphabetical order."""
    match by:
        case "tokens":
            return sorted(requests, key=lambda request: -(request.get("tokens_completion") or 0))
        case "speed":
            return sorted(requests, key=lambda request: -(request.get("tokens_per_s") or 0.0))
        case "model":
            return sorted(requests, key=lambda request: str(request.get("model") or ""))
        case "client":
            return sorted(requests, key=_client)
        case _:
            return sorted(requests, key=lambda request: -request["age_s"])


def requests_table(requests: Sequence[Request], columns: int | None = None) -> str:
    """One row for each request in flight."""
    rows = [
        (
            printable(str(request["id"])),
            printable(str(request.get("model") or "-")),
            _client(request),
            _phase(request),
            duration_text(request["age_s"]),
            *_tokens(request),
            printable(str(request["path"])),
        )
        for request in requests
    ]
    return fitted_table(with_nodes([_HEADINGS, *rows], requests), _OPTIONAL, columns)


def ended_table(ended: Sequence[Request], columns: int | None = None) -> str:
    """One row for each finished request (a record of the access log)."""
    optional = ["ENDED" if heading == "REQUEST" else heading for heading in _OPTIONAL]
    rows = [
        (
            printable(str(request["request_id"])),
            printable(str(request.get("model") or "-")),
            printable(str(request.get("client") or "-")).removeprefix("key:"),
            f"{request['status']} {request['outcome']}"
            + (f": {cause.replace('_', ' ')}" if (cause := str(request.get("cause") or "")) else ""),
            duration_text(request["duration_s"]),
            *_tokens(request),
            printable(str(request["path"])),
        )
        for request in ended
    ]
    return fitted_table([_ENDED_HEADINGS, *rows], optional, columns)


def _client(request: Request) -> str:
    return printable(str(request.get("key") or request.get("client") or "-"))


def _tokens(request: Request) -> tuple[str, str, str]:
    prompt, completion = request.get("tokens_prompt"), request.get("tokens_completion")
    speed = request.get("tokens_per_s")
    return (
        "-" if prompt is None else str(prompt),
        "-" if completion is None else str(completion),
        "-" if speed is None else f"{speed:.1f}",
    )


def _phase(request: Request) -> str:
    """Format the phase: ``loading 43 %, 12 s left``, ``queued #2, about 12.0 s``, ``generating``."""
    phase = str(request["phase"])
    if (percent := request.get("percent")) is not None:
        return f"{phase} {progress_text(percent, request.get('eta_s'))}"
    if (position := request.get("position")) is not None:
        wait_s = request.get("expected_wait_s")
        return f"{phase} #{position}" + ("" if wait_s is None else f", about {duration_text(wait_s)}")
    return phase
