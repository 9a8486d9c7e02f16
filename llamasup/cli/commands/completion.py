"""Prints the script that completes commands and options in a shell (``llamasup completion``)."""

from __future__ import annotations

from typing import Annotated

import typer

from llamasup.cli.command_group import COMPLETION_VARIABLE, argument, command_set
from llamasup.cli.options.parsers import one_of

commands = command_set()

_SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "llamasup"


@commands.command()
def completion(
    shell: Annotated[str, argument("|".join(_SHELLS), "The shell.", read=one_of(*_SHELLS))],
) -> int:
    """Print the script that completes commands and options in a shell.

    In ~/.bashrc: eval "$(llamasup completion bash)"

    In ~/.zshrc, after compinit: eval "$(llamasup completion zsh)"

    In ~/.config/fish/config.fish: llamasup completion fish | source
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name=_PROGRAM, complete_var=COMPLETION_VARIABLE, shell=shell)
    typer.echo(script.strip())
    return 0
