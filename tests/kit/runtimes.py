"""A runtime as a command of a shell, and builds of llama-server that run a piece of shell script first."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from llamasup.core.llama_server.argv_builder import config_files_in
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.inspect import find_runtime

__all__ = [
    "capabilities_of",
    "harmless_tool",
    "not_mapped",
    "reads_config_file",
    "shell_command",
    "wrapped_runtime",
]


@cache
def capabilities_of(runtime: str) -> Capabilities:
    """What this build lists in its help. ``runtime``: the path of a llama-server, or ``embedded``."""
    return find_runtime(runtime, os.environ).capabilities


@cache
def reads_config_file(runtime: str) -> bool:
    """Whether this build reads ``llama.cpp/config.ini`` (#26118): then it names the file."""
    with tempfile.TemporaryDirectory() as home:
        config = Path(home, "llama.cpp", "config.ini")
        config.parent.mkdir()
        config.write_text("threads = 1\n")
        done = subprocess.run(
            ["sh", "-c", f"{shell_command(runtime)} --help"],
            env={**os.environ, "XDG_CONFIG_HOME": home},
            capture_output=True,
            text=True,
            check=True,
        )
    return str(config) in config_files_in(f"{done.stderr}\n{done.stdout}")


def harmless_tool(runtime: str) -> str:
    """A tool of llama-server that changes nothing."""
    listed = capabilities_of(runtime).find("--tools")
    assert listed is not None
    return "get_info" if "get_info" in listed.description else "get_datetime"


def not_mapped(runtime: str) -> tuple[str, ...]:
    """Arguments for a load that a signal stops at any megabyte. The kernel maps a whole file in one step."""
    return ("--load-mode", "none") if capabilities_of(runtime).knows("--load-mode") else ("--no-mmap",)


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
