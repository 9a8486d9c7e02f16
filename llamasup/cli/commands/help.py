"""Shows the help of a command, or a page of the documentation (``llamasup help``)."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamasup.cli.command_group import argument, command_set
from llamasup.cli.pages import pages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

commands = command_set()

Topic = Annotated[list[str] | None, argument("[TOPIC...]", "A command, or a page such as serve.md.")]


@commands.command("help")
def show_help(ctx: typer.Context, topic: Topic = None) -> int:
    """Show the help of a command, or a page of the documentation.

    Without a topic, the command lists the commands and the pages.
    """
    words = topic or []
    root = ctx.find_root()
    found = pages()
    if not words:
        typer.echo(root.get_help())
        if found:
            typer.echo("\nPages of the documentation:\n  " + "\n  ".join(page.name for page in found))
        return 0
    if (context := _context(root, words)) is not None:
        typer.echo(context.get_help())
        return 0
    _show_page(words[0].removeprefix("docs/"), found, root)
    return 0


def _context(root: Any, words: Sequence[str]) -> Any | None:
    """Return the context of the command that ``words`` name; None if no command has this name."""
    context = root
    for word in words:
        group = context.command
        command = group.get_command(context, word) if hasattr(group, "get_command") else None
        if command is None:
            return None
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    return context


def _show_page(name: str, found: Sequence[Path], root: Any) -> None:
    by_name = {page.stem: page for page in found}
    stem = name.removesuffix(".md")
    if stem in by_name:
        from pydoc import pager

        pager(by_name[stem].read_text("utf-8"))
        return
    if name.endswith(".md") and not found:
        raise typer.BadParameter(f"this installation has no pages: see docs/{name} where you got llamasup.")
    names = dict.fromkeys((*root.command.commands, *by_name))
    similar = difflib.get_close_matches(stem, names, 3)
    hint = f"Did you mean {' or '.join(similar)}?" if similar else "`llamasup help` lists all topics."
    raise typer.BadParameter(f"no command and no page has the name {name!r}. {hint}")
