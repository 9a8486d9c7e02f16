"""``llamasup wrap``: an existing llama-server command line becomes a service."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamasup.cli.commands.run import OutputOptions, serve_command

if TYPE_CHECKING:
    from llamasup.service.run import WrapOptions

__all__ = ["wrap_command"]


def wrap_command(command: Sequence[str], output: OutputOptions, *, began_s: float, **options: Any) -> int:
    """Serve until stopped. Returns the exit code: llama-server's own where it failed for good."""

    def ask() -> WrapOptions:
        from llamasup.service.options import WrapOptions
        from llamasup.service.systemd.notify import take_sockets
        from llamasup.supervision.wrap.planner import understand

        wrapping = understand(command, os.environ)
        if wrapping.line.asks:
            _become(command)
        return WrapOptions(wrapping, sockets=take_sockets(os.environ), **options)

    return serve_command(ask, output, began_s)


def _become(command: Sequence[str]) -> None:
    """There is nothing to supervise in a question (``--version``): let llama-server answer it."""
    os.execvp(command[0], list(command))  # noqa: S606 - what the user typed, no shell
