"""The golden files of the contract: the help of all commands, and the JSON Schema of a config."""

from __future__ import annotations

import json
from typing import Any

from typer._click.core import Context
from typer.main import get_command

from llamasup.cli.app import app
from llamasup.core.config.config_keys import json_schema
from llamasup.features import config_keys

_WIDTH = 100


def help_texts() -> str:
    """The help of ``llamasup`` and of each command, in the order of the help."""
    return "\n".join(_help("llamasup", get_command(app), None))


def _help(name: str, command: Any, parent: Context | None) -> list[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=_WIDTH)
    lines = [f"$ {context.command_path} --help", *command.get_help(context).splitlines(), ""]
    if hasattr(command, "list_commands"):
        for child in command.list_commands(context):
            lines += _help(child, command.get_command(context, child), context)
    return [line.rstrip() for line in lines]


def config_schema() -> str:
    """The JSON Schema of a config."""
    return json.dumps(json_schema(config_keys()), indent=1, sort_keys=True) + "\n"
