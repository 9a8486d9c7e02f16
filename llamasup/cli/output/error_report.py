"""Shows errors on standard error, and returns their exit codes."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from llamasup.cli.command_group import parameters_of, with_parameters
from llamasup.cli.output.nonblocking_writer import OutputWriter
from llamasup.cli.output.view import TextView, View
from llamasup.errors import LlamasupError, TasksExhausted

P = ParamSpec("P")


def error_text(
    message: str, remedy: str = "", lines: tuple[str, ...] = (), details: tuple[str, ...] = ()
) -> str:
    """The message, its details, the lines of llama-server's log about it, and the remedy."""
    parts = [message, *(f"    {line}" for line in details)]
    if lines:
        parts += ["  llama-server said:", *(f"    | {line}" for line in lines)]
    if remedy:
        parts += [f"  → {remedy}"]
    return "\n".join(parts)


def show_error(view: View, error: Exception) -> int:
    """Show ``error``; returns the exit code."""
    error = as_reported(view, error)
    text = error_text(f"llamasup: {error.message}", error.remedy, error.lines, error.details)
    fields = error_event(error)
    del fields["message"]  # it is in the text
    view.say("error", "error", text, lines=list(error.lines), **fields)
    return error.exit_code


def error_event(error: LlamasupError) -> dict[str, Any]:
    """Return the fields of the event ``error`` of ``pull --json`` and ``batch --json``."""
    return {
        "cause": error.cause,
        "message": error.message,
        "remedy": error.remedy,
        "details": list(error.details),
        "exit_code": error.exit_code,
    }


def as_reported(view: View, error: Exception) -> LlamasupError:
    """The error as users see it. Any error other than LlamasupError is a bug of llamasup."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, LlamasupError):
        return error
    view.say("debug", "traceback", "".join(traceback.format_exception(error)))
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        from llamasup.core.llama_server.diagnosis import RAISE_LIMIT

        return TasksExhausted(
            "llamasup cannot start another thread: the limit of processes and threads is reached.",
            remedy=RAISE_LIMIT,
        )
    return LlamasupError(
        f"Internal error in llamasup{_where(error)}: {type(error).__name__}: {error}",
        remedy="This is a bug. Please report this line; `llamasup run --log-level debug` shows more.",
    )


def guarded(command: Callable[Concatenate[View, P], int | None]) -> Callable[P, int]:
    """Give ``command(view, …)`` a view on standard error, and show its error.

    The result returns the exit code; None of ``command`` means 0.
    """

    @functools.wraps(command)
    def shown(*arguments: P.args, **options: P.kwargs) -> int:
        stderr = OutputWriter(sys.stderr)
        view = TextView(stderr)
        try:
            return command(view, *arguments, **options) or 0
        except Exception as error:
            return show_error(view, error)
        finally:
            stderr.close()

    return with_parameters(shown, parameters_of(command, given=1))


def _where(error: Exception) -> str:
    """The innermost line of llamasup in the traceback, which most commands do not show."""
    package = Path(_where.__code__.co_filename).parents[2]  # relative in the bundle without Python
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    if not ours:
        return ""
    return f" ({Path(ours[-1].filename).relative_to(package.parent).as_posix()}:{ours[-1].lineno})"
