"""The error for an instance that failed."""

from __future__ import annotations

from pathlib import Path

from llamasup.core.planning.ladder import OUT_OF_MEMORY
from llamasup.core.supervision.states import Instance
from llamasup.errors import DoesNotFit, GaveUp, LlamasupError, ServerFailed

_LACKS_MEMORY = frozenset({DoesNotFit.cause, *OUT_OF_MEMORY})


def lacks_memory(error: LlamasupError) -> bool:
    """Whether memory was too small (as llamasup, llama-server or the kernel found), which may pass."""
    return error.cause in _LACKS_MEMORY


def failure_of(
    last: Instance, exit_code: int | None = None, *, log: Path | None = None
) -> ServerFailed | GaveUp:
    """The error for a failed instance.

    ``exit_code``: the child's own, if llamasup has to end with the same one. ``log``: the file to read if
    llamasup ends, because its command ``logs`` no longer shows it.
    """
    diagnosis = last.last
    remedy = "See its log (llamasup logs)." if diagnosis is None else diagnosis.remedy
    if log is not None:
        remedy = remedy.replace("(llamasup logs)", f"({log})")
    if diagnosis is None:
        return GaveUp("llama-server failed for an unknown reason.", remedy=remedy)
    if diagnosis.deterministic:
        return ServerFailed(
            diagnosis.message,
            cause=diagnosis.cause,
            exit_code=diagnosis.exit_code if exit_code is None else exit_code,
            remedy=remedy,
            lines=diagnosis.lines,
        )
    count = len(last.crashes)
    crashes = (
        "1 crash" if count == 1 else f"{count} crashes"
    )  # earlier ones expire during half-open intervals
    return GaveUp(
        f"Gave up after {crashes} of llama-server. The last one: {diagnosis.message}",
        remedy=remedy,
        lines=diagnosis.lines,
    )
