"""Finds the ``rpc-server`` of a llama.cpp: next to llama-server, on PATH, or by ``--runtime``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from llamasup.errors import RuntimeMissing
from llamasup.llama_server.help_text import Capabilities, parse_help
from llamasup.llama_server.inspect import library_folder
from llamasup.llama_server.rpc.worker_line import read_worker_help
from llamasup.llama_server.runtime_errors import check_file
from llamasup.llama_server.search import choose
from llamasup.system.process.environment import child_environment
from llamasup.system.process.run_once import run_commands

__all__ = ["FoundWorker", "find_rpc_server", "worker_environment"]

_NAMES = ("ggml-rpc-server", "rpc-server")  # renamed in 2026
_SUFFIX = ".exe" if sys.platform == "win32" else ""
_TIMEOUT_S = 20.0


class FoundWorker(Struct, frozen=True):
    path: str
    capabilities: Capabilities


def find_rpc_server(choice: str | None, environ: Mapping[str, str]) -> FoundWorker:
    """``choice``: ``--runtime``, the path of an rpc-server, or a llama-server next to one.

    Raises RuntimeMissing, BrokenRuntime or UsageInvalid.
    """
    path = next(_candidates(choice, environ), None)
    if path is None:
        raise RuntimeMissing(
            f"No rpc-server was found: neither {' nor '.join(_NAMES)} is next to llama-server or on PATH.",
            remedy="Build llama.cpp with GGML_RPC=ON, or give the path of its rpc-server with --runtime.",
        )
    check_file(Path(path), "rpc-server")
    with tempfile.TemporaryDirectory(prefix="llamasup-") as empty:
        env = worker_environment(environ, path, empty)
        (answer,) = run_commands([(path, "--help")], env=env, cwd=empty, timeout_s=_TIMEOUT_S)
    options = parse_help(answer.stdout) or parse_help(answer.stderr)
    return FoundWorker(path, read_worker_help(path, options, answer.stderr.splitlines()))


def worker_environment(environ: Mapping[str, str], path: str, config_home: str) -> dict[str, str]:
    """As that of llama-server: an allowlist (X6)."""
    return child_environment(
        environ,
        kind="binary",
        platform=sys.platform,
        config_home=config_home,
        library_path=library_folder("binary", path),
    )


def _candidates(choice: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    if choice is not None and "rpc-server" in Path(choice).name:
        yield choose(choice, environ, None).path
        return
    try:
        server = choose(choice, environ, None)
    except RuntimeMissing:
        if choice is not None:
            raise
        server = None
    if server is not None and server.kind == "binary":
        folder = Path(os.path.realpath(server.path)).parent
        yield from (str(path) for name in _NAMES if (path := folder / f"{name}{_SUFFIX}").exists())
    if choice is None:
        found = (shutil.which(name, path=environ.get("PATH", "")) for name in _NAMES)
        yield from (str(Path(path).absolute()) for path in found if path is not None)
