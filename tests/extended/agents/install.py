"""Install the programs of ``programs.py`` into a folder, once for each state of that table.

``python -m tests.extended.agents.install FOLDER`` needs npm, uv and 4 GB. It exits with 77 where npm or a
registry is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.extended.agents.programs import OPEN_WEBUI, PROGRAMS, Program

__all__ = ["bin_folder", "install"]

_CANNOT_RUN_HERE = 77
_PROGRAMS = (*PROGRAMS, OPEN_WEBUI)
_ALONE = ("aider", "open-webui")  # they pin other versions than the rest needs
# Their install scripts, which are not run, link these.
_BINARIES = {
    "claude": "@anthropic-ai/claude-code-linux-x64/claude",
    "opencode": "opencode-linux-x64/bin/opencode",
}


class _CannotInstall(Exception):
    """A registry or a program is missing on this machine."""


def bin_folder(folder: Path, program: Program) -> Path:
    """Return where the commands of this program are."""
    if program.registry == "npm":
        return folder / "npm" / "node_modules" / ".bin"
    return folder / (program.name if program.name in _ALONE else "python") / "bin"


def install(folder: Path) -> None:
    """Install all programs. Raises ``_CannotInstall``, or ValueError for a package with another hash."""
    table = ";".join(f"{each.package}@{each.version} {each.hash}" for each in _PROGRAMS)
    stamp = folder / f"installed-{hashlib.sha256(table.encode()).hexdigest()[:12]}"
    if stamp.exists():
        return
    print(f"Installing {len(_PROGRAMS)} clients (4 GB) into {folder} …", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    _install_npm(folder / "npm", [each for each in PROGRAMS if each.registry == "npm"])
    for name in (*_ALONE, "python"):
        _install_python(
            folder / name, [p for p in _PROGRAMS if bin_folder(folder, p).parent == folder / name]
        )
    stamp.touch()


def _install_npm(prefix: Path, programs: Sequence[Program]) -> None:
    packages = [f"{each.package}@{each.version}" for each in programs]
    prefix.mkdir(exist_ok=True)
    _run("npm", "install", "--prefix", str(prefix), "--ignore-scripts", "--no-audit", "--no-fund", *packages)
    installed = json.loads((prefix / "package-lock.json").read_text())["packages"]
    for each in programs:
        if (found := installed[f"node_modules/{each.package}"]["integrity"]) != each.hash:
            raise ValueError(f"{each.package} {each.version} has the hash {found}, not {each.hash}")
    for name, target in _BINARIES.items():
        link = prefix / "node_modules" / ".bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", target))


def _install_python(venv: Path, programs: Sequence[Program]) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(venv))
    lines = [f"{each.package}=={each.version} --hash=sha256:{each.hash}\n" for each in programs]
    requirements = venv / "requirements.txt"
    requirements.write_text("".join(lines))
    python = ("--python", str(venv / "bin" / "python"))
    (venv / "overrides.txt").write_text("torch ; sys_platform == 'never'\n")
    overrides = ("--overrides", str(venv / "overrides.txt"))
    _run("uv", "pip", "install", "--quiet", *python, *overrides, "--requirement", str(requirements))


def _run(*words: str) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if (program := shutil.which(words[0], path=path)) is None:
        raise _CannotInstall(f"{words[0]} is not on PATH")
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise _CannotInstall(f"{' '.join(words[:3])} failed: {done.stderr.strip()[-600:]}")


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]).resolve())  # npm writes other paths where one is a link
    except _CannotInstall as missing:
        print(missing, file=sys.stderr)
        sys.exit(_CANNOT_RUN_HERE)
