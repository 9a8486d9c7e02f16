"""The golden files of the contract: the help of all commands, and the JSON Schema of a config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from typer._click.core import Context
from typer.main import get_command

from llamasup.cli.app import app
from llamasup.core.config.config_keys import json_schema
from llamasup.features import config_keys

_WIDTH = 100


def help_texts() -> str:
    """The help of ``llamasup`` and of each command, in the order of the help."""
    texts = map(_help, contexts("llamasup", get_command(app)))
    return "\n".join(line for lines in texts for line in lines)


def contexts(name: str, command: Any, parent: Context | None = None) -> Iterator[Context]:
    """A context for ``command``, and one for each of its commands."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=_WIDTH)
    yield context
    if hasattr(command, "list_commands"):
        for child in command.list_commands(context):
            yield from contexts(child, command.get_command(context, child), context)


def _help(context: Context) -> list[str]:
    lines = [f"$ {context.command_path} --help", *context.get_help().splitlines(), ""]
    return [line.rstrip() for line in lines]


def config_schema() -> str:
    """The JSON Schema of a config."""
    return json.dumps(json_schema(config_keys()), indent=1, sort_keys=True) + "\n"
