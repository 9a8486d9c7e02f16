"""Groups of commands: every summary is shown whole, and a command's module is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

__all__ = ["CommandGroup", "LazyCommand", "LazyGroup", "command_set"]


def command_set(name: str | None = None, help: str | None = None) -> typer.Typer:
    """What a command's module declares its commands in, as ``commands``.

    With a ``name`` it is a group of subcommands, such as ``llamasup key``.
    """
    return typer.Typer(
        cls=CommandGroup,
        name=name,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # rich takes longer to import than everything else that --help needs
    )


class CommandGroup(TyperGroup):
    """Its help shows the first line of each command's help, and cuts none."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, rows in self._sections():
            with formatter.section(title):
                formatter.write_dl(rows)

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        rows = [(name, (command.help or "").partition("\n")[0]) for name, command in self.commands.items()]
        yield "Commands", rows


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command whose ``module`` has not been imported. ``summary`` is the first line of its help."""

    name: str
    module: str
    summary: str


class LazyGroup(CommandGroup):
    """The commands of ``table``, in sections by title. A command's module is imported by ``get_command``."""

    table: ClassVar[Mapping[str, Sequence[LazyCommand]]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._lazy = {lazy.name: lazy for section in self.table.values() for lazy in section}
        # For everything that only needs names and summaries, such as "did you mean".
        self.commands = {name: TyperCommand(name, help=lazy.summary) for name, lazy in self._lazy.items()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return None
        group = get_group(importlib.import_module(lazy.module).commands)
        return group if group.name == cmd_name else group.commands[cmd_name]

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        width = max(map(len, self._lazy))
        for title, section in self.table.items():
            yield title, [(lazy.name.ljust(width), lazy.summary) for lazy in section]
