"""What is told of an instance that has failed for good, or for now."""

from __future__ import annotations

from llamasup.errors import DoesNotFit, GaveUp, LlamasupError, ServerFailed
from llamasup.planning.ladder import OUT_OF_MEMORY
from llamasup.supervision.states import Instance

__all__ = ["failure_of", "lacks_memory"]

_LACKS_MEMORY = frozenset({DoesNotFit.cause, *OUT_OF_MEMORY})


def lacks_memory(error: LlamasupError) -> bool:
    """Whether it was refused or ended for want of memory, whoever found that: there may soon be more."""
    return error.cause in _LACKS_MEMORY


def failure_of(last: Instance, exit_code: int | None = None) -> ServerFailed | GaveUp:
    """``exit_code`` is what the child ended with, where we are to end with the same."""
    diagnosis = last.last
    if diagnosis is None:
        return GaveUp("llama-server failed.")
    if diagnosis.deterministic:
        return ServerFailed(
            diagnosis.message,
            cause=diagnosis.cause,
            exit_code=diagnosis.exit_code if exit_code is None else exit_code,
            remedy=diagnosis.remedy,
            lines=diagnosis.lines,
        )
    return GaveUp(
        f"Gave up after {len(last.crashes)} crashes. The last one: {diagnosis.message}",
        remedy=diagnosis.remedy,
        lines=diagnosis.lines,
    )
