"""The man page of llamasup: the help of all commands, as man(7) writes it. And the completions of shells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from typer._click.formatting import HelpFormatter
from typer._completion_shared import get_completion_script
from typer.main import get_command

from llamasup.cli.app import app
from llamasup.cli.command_group import COMPLETION_VARIABLE
from scripts.generated.contract import contexts

_HEAD = r""".\" Written by scripts/docs.py from the help of the commands.
.TH LLAMASUP 1 "" llamasup "User Commands"
.SH NAME
llamasup \- run llama.cpp's llama\-server in production
.SH SYNOPSIS
.B llamasup
.I COMMAND
.RI [ OPTIONS ]
.RI [ ARGUMENTS ]
.SH DESCRIPTION
"""
_TAIL = r""".SH FILES
.TP
.I ~/.config/llamasup/config.yaml
The config of
.BR "llamasup serve" .
.TP
.I ~/.config/llamasup/keys
The API keys.
.TP
.I ~/.local/share/llamasup/models
Downloaded models.
.TP
.I ~/.local/state/llamasup
Logs, usage, batches and measurements.
.SH SEE ALSO
.B llamasup help
lists the pages of the documentation, and
.B llamasup help control.md
shows one of them.
"""


def escaped(text: str) -> str:
    """Text in which roff finds nothing to interpret."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("`", r"\(ga").replace("~", r"\(ti")
    text = re.sub(r"^(?=[.'])", r"\\&", text, flags=re.M)
    return re.sub(r"[^\x00-\x7f]", lambda found: rf"\[u{ord(found[0]):04X}]", text)


class ManFormatter(HelpFormatter):
    """Writes what a help formatter is given as roff, which fills the lines itself."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f".B {escaped(prog)}\n{escaped(args)}\n")

    def write_heading(self, heading: str) -> None:
        self.write(f".PP\n.I {escaped(heading)}\n")

    def write_paragraph(self) -> None:
        """A paragraph begins with its text."""

    def write_text(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            self.write(f".PP\n{escaped(' '.join(paragraph.split()))}\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 0, col_spacing: int = 0) -> None:
        for name, text in rows:
            self.write(f".TP\n.B {escaped(name.strip())}\n{escaped(text)}\n")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.write_heading(name)
        yield


def _help(context: Any, *, usage: bool = True) -> str:
    formatter, command = ManFormatter(), context.command
    if usage:
        command.format_usage(context, formatter)
    for write in (command.format_help_text, command.format_options, command.format_epilog):
        write(context, formatter)
    return formatter.getvalue()


def man_page() -> str:
    """The source of ``llamasup.1``."""
    root, *commands = contexts("llamasup", get_command(app))
    texts = (f".SS {escaped(context.command_path)}\n{_help(context)}" for context in commands)
    return f"{_HEAD}{_help(root, usage=False)}.SH COMMANDS\n{''.join(texts)}{_TAIL}"


def _completion(shell: str) -> str:
    script = get_completion_script(prog_name="llamasup", complete_var=COMPLETION_VARIABLE, shell=shell)
    return f"{script.strip()}\n"


bash, zsh, fish = (partial(_completion, shell) for shell in ("bash", "zsh", "fish"))
