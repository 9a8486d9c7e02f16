"""Adapts Typer: the help of commands and groups, and the import of a command's module when it is needed."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, get_type_hints

import typer
from typer._coercion import RuntimeParam
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from llamasup.cli.pages import pointer
from llamasup.features import CommandEntry

OLLAMA = "127.0.0.1:11434"
"""The address of ``--ollama`` without a value: that of Ollama itself."""

COMPLETION_VARIABLE = "_LLAMASUP_COMPLETE"
"""A shell that completes a command line sets it."""

F = TypeVar("F", bound=Callable[..., Any])


# From the words of the command line come strings, and booleans for flags.
_READ_HERE = (str, bool, Path, list[str])


# Not ``gemma:2``, which may be a model.
_is_address = re.compile(r"\d+|(?:localhost|[\d.]+|\[.*\])(?::\d+)?|.+\.sock").fullmatch


def with_ollama(args: Sequence[str], takes_value: Container[str]) -> list[str]:
    """Give ``--ollama`` its address: click has no options with an optional value here.

    ``takes_value``: the other options that have a value. Raises BadParameter.
    """
    found: list[str] = []
    at = 0
    while at < len(args) and args[at] != "--":
        size = 2 if args[at] in takes_value else 1
        found += args[at : at + size]
        at += size
        if found[-1] != "--ollama" or size == 2:
            continue
        found[-1] = f"--ollama={OLLAMA}"
        if at < len(args) and _is_address(args[at]):
            raise typer.BadParameter(
                f"write --ollama={args[at]}; --ollama alone is the address {OLLAMA}.", param_hint="--ollama"
            )
    return [*found, *args[at:]]


def parameters_of(command: Callable[..., Any], given: int = 0) -> list[inspect.Parameter]:
    """List the parameters after the first ``given`` ones, with their types.

    A decorator passes the first ones. Their types may be imported for type checkers only.
    """
    parameters = list(inspect.signature(command).parameters.values())[given:]
    annotated = SimpleNamespace(__annotations__={each.name: each.annotation for each in parameters})
    types = get_type_hints(annotated, inspect.unwrap(command).__globals__, include_extras=True)
    return [each.replace(annotation=types[each.name]) for each in parameters]


def with_parameters(command: F, parameters: Sequence[inspect.Parameter]) -> F:
    """Give ``command`` these parameters in place of its own, for Typer and other decorators."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


class _Reader(RuntimeParam):
    """Converts the values of one parameter as Typer does, for the types that commands here have.

    Typer 0.29 imports pydantic for it, which takes longer than all else that a short command does.
    """

    def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
        if self.annotation == list[str]:
            return [self._read(item) for item in value]
        return self._read(value)

    def _read(self, value: Any) -> Any:
        if self.parameter_info.parser is not None:
            return self.parameter_info.parser(value)
        return Path(value) if self.annotation is Path else value


class _ReadsParameters:
    """A command or a group whose parameters are converted by ``_Reader``."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            kind = parameter.type_descriptor
            if kind.parameter_info.parser is not None or kind.annotation in _READ_HERE:
                parameter._runtime_param = _Reader(kind.parameter_info, kind.annotation)
        return parameters


class Command(_ReadsParameters, TyperCommand):
    """A command whose help names an argument by its metavar: Typer would add braces and a Python type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = self._parameters(ctx, "option")
        if any("--ollama" in option.opts for option in options):
            with_value = {name for option in options if not option.is_flag for name in option.opts}
            args = with_ollama(args, with_value - {"--ollama"})
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)[:1]
        for argument in self._parameters(ctx, "argument"):
            name = argument.metavar
            if argument.nargs != 1 and not name.endswith(("...", "]")):
                name += "..."
            pieces.append(name if argument.required or name.startswith("[") else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in (*self._parameters(ctx, "argument"), *self._parameters(ctx, "option")):
            name, text = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            title = "Arguments" if is_argument else parameter.rich_help_panel or "Options"
            sections.setdefault(title, []).append((parameter.metavar if is_argument else name, text))
        others = sections.pop("Options", [])
        for title, rows in (*sections.items(), ("Options", others)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _parameters(self, ctx: Any, kind: str) -> list[Any]:
        return [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == kind]


class _CommandSet(typer.Typer):
    def command(self, name: str | None = None, *, cls: Any = Command, **options: Any) -> Callable[[F], F]:
        return super().command(name, cls=cls, **options)


def command_set(name: str | None = None, help: str | None = None) -> typer.Typer:
    """Collect the commands of one module. With a ``name`` they are its subcommands (``llamasup key …``)."""
    return _CommandSet(
        cls=CommandGroup,
        name=name,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # the import of rich takes longer than the rest of --help
    )


Read = Callable[[Any], Any]


def option(flags: str, metavar: str, help: str, *, read: Read | None = None, **more: Any) -> Any:
    """Declare an option with a value. ``flags`` are its spellings; ``read`` converts the value."""
    return typer.Option(*flags.split(), metavar=metavar, help=help, parser=read, **more)


def flag(flags: str, help: str, **more: Any) -> Any:
    """Declare an option without a value. ``flags`` are its spellings."""
    return typer.Option(*flags.split(), help=help, **more)


def argument(metavar: str, help: str, *, read: Read | None = None) -> Any:
    """Declare an argument. Its help does not show its default."""
    return typer.Argument(metavar=metavar, help=help, parser=read, show_default=False)


class CommandGroup(_ReadsParameters, TyperGroup):
    """A group whose help shows the whole first line of each command's help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, rows in self._sections():
            with formatter.section(title):
                formatter.write_dl(rows)

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        rows = [(name, (command.help or "").partition("\n")[0]) for name, command in self.commands.items()]
        yield "Commands", rows


class LazyGroup(CommandGroup):
    """Shows the commands of ``table`` in sections by title. ``get_command`` imports a command's module."""

    table: ClassVar[Mapping[str, Sequence[CommandEntry]]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._lazy = {lazy.name: lazy for section in self.table.values() for lazy in section}
        # For code that needs only names and summaries, such as "Did you mean".
        self.commands = {name: TyperCommand(name, help=lazy.summary) for name, lazy in self._lazy.items()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return None
        group = get_group(importlib.import_module(lazy.module).commands)
        found = group if group.name == cmd_name else group.commands[cmd_name]
        for command in (found, *group.commands.values()):
            command.epilog = pointer(cmd_name)  # the last line of the help
        return found

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        width = max(map(len, self._lazy))
        for title, section in self.table.items():
            yield title, [(lazy.name.ljust(width), lazy.summary) for lazy in section]
