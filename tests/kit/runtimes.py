"""A runtime as a command of a shell, and builds of llama-server that run a piece of shell script first."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

__all__ = ["shell_command", "wrapped_runtime"]


def shell_command(runtime: str) -> str:
    """``runtime``: the path of a llama-server, or ``embedded``."""
    if runtime == "embedded":
        return f"{shlex.quote(sys.executable)} -m llamasup.embedded"
    libraries = Path(runtime).resolve().parent
    return f"env LD_LIBRARY_PATH={shlex.quote(str(libraries))} {shlex.quote(runtime)}"


def wrapped_runtime(folder: Path, runtime: str, script: str) -> str:
    """The path of a llama-server in ``folder`` that runs ``script`` before it becomes ``runtime``."""
    path = folder / "llama-server"
    path.write_text(f'#!/bin/sh\n{script}\nexec {shell_command(runtime)} "$@"\n')
    path.chmod(0o755)
    return str(path)
