"""Parses a command line and the environment like llama-server; the setters parse the values later.

Raises ArgumentError with the text that llama-server prints (b11434, measured).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from llamasup.embedded.option import OFF, ON, InvalidValue, Option, Question, boolean


class ArgumentError(Exception):
    """The whole text for stderr."""


class Assignment(Struct, frozen=True):
    """One use of an option. ``source`` names it in errors: the spelling or the environment variable."""

    option: Option
    value: str
    source: str
    from_environment: bool = False


class Request(Struct, frozen=True):
    """A question to answer, or the options of a server in their order."""

    assignments: tuple[Assignment, ...] = ()
    asks: Question | None = None
    warnings: tuple[str, ...] = ()


def parse(options: Sequence[Option], arguments: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Return the assignments of the environment, then of the command line; the last one of an option wins.

    Like in llama-server, ``--version`` and ``--list-devices`` end the parsing, while ``--help`` is answered
    after it.
    """
    by_spelling = {spelling: option for option in options for spelling in option.entry.spellings}
    assignments = list(_from_environment(options, environ))
    warnings: list[str] = []
    helps = False
    rest = iter(arguments)
    for argument in rest:
        spelling = (
            argument.replace("_", "-") if argument.startswith("--") else argument
        )  # --ctx_size is also accepted
        option = by_spelling.get(spelling)
        if option is None:
            raise ArgumentError(f"error: invalid argument: {argument}\n")
        if option.asks == "help":
            helps = True
        elif option.asks is not None:
            return Request(asks=option.asks)
        else:
            if option.entry.env is not None and option.entry.env in environ:
                warnings.append(
                    f"warn: {option.entry.env} environment variable is set, "
                    f"but will be overwritten by command line argument {argument}\n"
                )
            assignments.append(_from_arguments(option, spelling, rest))
    if helps:
        return Request(asks="help")
    return Request(tuple(assignments), None, tuple(warnings))


def apply(params: object, assignments: Sequence[Assignment]) -> None:
    """Set all values on ``params``. ArgumentError names the first invalid one."""
    for assignment in assignments:
        option = assignment.option
        if option.setter is None:
            raise _error(assignment, option.entry.description)
        try:
            option.setter.apply(params, assignment.value)
        except InvalidValue as error:
            raise _error(assignment, str(error)) from None


def _from_environment(options: Sequence[Option], environ: Mapping[str, str]) -> list[Assignment]:
    found: list[Assignment] = []
    for option in options:
        env = option.entry.env or ""
        value = environ.get(env) if env else None
        if value is None and option.negations and env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") in environ:
            value = OFF  # LLAMA_ARG_NO_X, with whatever value, switches X off.
        if value is None:
            continue
        assignment = Assignment(option, value, env, from_environment=True)
        if option.entry.argument is None:
            meaning = boolean(value)
            if option.negations and meaning is None:
                raise _error(assignment, f"invalid boolean value: {value!r}")
            if not option.negations and not meaning:
                continue  # a switch that can only be set: other values are ignored
            assignment = Assignment(option, ON if meaning else OFF, env, from_environment=True)
        found.append(assignment)
    return found


def _from_arguments(option: Option, spelling: str, rest: Iterator[str]) -> Assignment:
    if option.entry.argument is None:
        return Assignment(option, OFF if spelling in option.negations else ON, spelling)
    value = next(rest, None)
    if value is None:
        raise _error(Assignment(option, "", spelling), "expected value for argument")
    return Assignment(option, value, spelling)


def _error(assignment: Assignment, what: str) -> ArgumentError:
    if assignment.from_environment:
        return ArgumentError(f'error while handling environment variable "{assignment.source}": {what}\n\n')
    return ArgumentError(
        f'error while handling argument "{assignment.source}": {what}\n\n'
        f"usage:\n{assignment.option.usage}\n\nto show complete usage, run with -h\n"
    )
