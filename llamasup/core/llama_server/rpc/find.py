"""Finds the ``rpc-server`` of a llama.cpp: next to llama-server, on PATH, or by ``--runtime``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from llamasup.core.llama_server.help_text import Capabilities, parse_help
from llamasup.core.llama_server.inspect import library_folder
from llamasup.core.llama_server.rpc.worker_line import read_worker_help
from llamasup.core.llama_server.search import (
    RPC_SERVER,
    Candidate,
    candidates,
    cannot_start,
    check_file,
    choose,
)
from llamasup.core.system.native import native
from llamasup.core.system.process.child import child_environment
from llamasup.core.system.process.run_folder import scratch_folder
from llamasup.core.system.process.run_once import run_commands
from llamasup.errors import RuntimeMissing

_NAMES = ("ggml-rpc-server", "rpc-server")  # renamed in 2026
_TIMEOUT_S = 20.0


class FoundWorker(Struct, frozen=True):
    path: str
    capabilities: Capabilities


def find_rpc_server(choice: str | None, environ: Mapping[str, str]) -> FoundWorker:
    """Find the rpc-server.

    ``choice``: ``--runtime``, the path of an rpc-server, or of a llama-server next to one.

    Raises RuntimeMissing or BrokenRuntime.
    """
    path, origin = _choose(choice, environ)
    check_file(Path(path), origin, RPC_SERVER)
    with scratch_folder() as empty:
        env = worker_environment(environ, path, empty)
        try:
            (answer,) = run_commands([(path, "--help")], env=env, cwd=empty, timeout_s=_TIMEOUT_S)
        except OSError as error:
            raise cannot_start(Path(path), error, RPC_SERVER) from error
    options = parse_help(answer.stdout) or parse_help(answer.stderr)
    return FoundWorker(path, read_worker_help(path, options, answer.stderr.splitlines()))


def worker_environment(environ: Mapping[str, str], path: str, config_home: str) -> dict[str, str]:
    """Return the environment of a worker: an allowlist, as for llama-server (X6)."""
    return child_environment(
        environ,
        kind="binary",
        platform=sys.platform,
        config_home=config_home,
        library_path=library_folder("binary", path),
    )


def _choose(choice: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The path of the rpc-server, and where it was found, for messages. Raises RuntimeMissing."""
    asked = choice or environ.get("LLAMASUP_RUNTIME")
    for_llama_server = choice is None and asked == "embedded"
    if asked and asked != "auto" and not for_llama_server:
        return _asked(choice, environ)
    for server in candidates(environ):
        if (sibling := _next_to(server)) is not None:
            return sibling, f"next to {server.path}"
    for name in _NAMES:
        if (found := shutil.which(name, path=environ.get("PATH", ""))) is not None:
            return str(Path(found).absolute()), f"{name} on PATH"
    raise RuntimeMissing(
        f"No rpc-server was found: neither {' nor '.join(_NAMES)} is next to llama-server or on PATH.",
        remedy="Build llama.cpp with GGML_RPC=ON, or give the path of an rpc-server with --runtime.",
    )


def _asked(choice: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    try:
        server = choose(choice, environ, None)
    except RuntimeMissing as error:
        raise RuntimeMissing(error.message, remedy=RPC_SERVER.how_to_give) from None
    path = Path(server.path)
    if "rpc-server" in path.name or path.is_dir():
        return server.path, server.origin
    if server.kind == "binary":
        check_file(path, server.origin, RPC_SERVER)
    sibling = _next_to(server)
    if sibling is None:
        raise RuntimeMissing(
            f"No rpc-server was found: neither {' nor '.join(_NAMES)} is next to {server.path} "
            f"({server.origin}).",
            remedy=f"Build llama.cpp with GGML_RPC=ON. {RPC_SERVER.how_to_give}",
        )
    return sibling, f"next to {server.path}"


def _next_to(server: Candidate) -> str | None:
    """The rpc-server in the folder of a llama-server. The embedded runtime has none."""
    if server.kind != "binary":
        return None
    folder = Path(os.path.realpath(server.path)).parent
    return next(
        (str(path) for name in _NAMES if (path := folder / f"{name}{native.executable_suffix}").exists()),
        None,
    )
