"""How an error looks to a person."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from llamasup.cli.output.view import TextView, View
from llamasup.cli.output.writer import Outlet
from llamasup.errors import LlamasupError

__all__ = ["error_text", "guarded", "show_error"]


def error_text(
    message: str, remedy: str = "", lines: tuple[str, ...] = (), details: tuple[str, ...] = ()
) -> str:
    """What happened, what llama-server said, what to do."""
    parts = [message, *(f"    {line}" for line in details)]
    if lines:
        parts += ["  llama-server said:", *(f"    | {line}" for line in lines)]
    if remedy:
        parts += [f"  → {remedy}"]
    return "\n".join(parts)


def show_error(view: View, error: Exception) -> int:
    """Say what went wrong; returns the exit code. What is not an error of ours on purpose is our bug."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, LlamasupError):
        view.say("debug", "traceback", "".join(traceback.format_exception(error)))
        error = LlamasupError(
            f"Something went wrong inside llamasup{_where(error)}: {type(error).__name__}: {error}",
            remedy="This is a bug. Please report this line; run says more with --log-level debug.",
        )
    view.say(
        "error",
        "error",
        error_text(f"llamasup: {error.message}", error.remedy, error.lines, error.details),
        cause=error.cause,
        remedy=error.remedy,
        exit_code=error.exit_code,
        lines=list(error.lines),
        details=list(error.details),
    )
    return error.exit_code


def guarded(act: Callable[[View], int | None]) -> int:
    """Let ``act`` speak on standard error; what it raises is shown. Returns the exit code (None of it: 0)."""
    stderr = Outlet(sys.stderr)
    view = TextView(stderr)
    try:
        return act(view) or 0
    except Exception as error:
        return show_error(view, error)
    finally:
        stderr.close()


def _where(error: Exception) -> str:
    """The innermost line of our own that it came through: most commands have no log that would tell."""
    package = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    if not ours:
        return ""
    return f" ({Path(ours[-1].filename).relative_to(package.parent).as_posix()}:{ours[-1].lineno})"
