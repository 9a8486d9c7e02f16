"""Runs the program of a bundle with an empty folder as its PATH: there is no Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from tests.e2e.driver import Llamasup, adopted
from tests.kit.patience import PATIENCE_S, eventually

__all__ = ["Program"]


class Program:
    """The program at ``path``, whose processes have their folders below ``home``."""

    def __init__(self, path: Path, home: Path) -> None:
        self.path = path
        self.folder = path.parent
        self.home = home
        self._path = home / "bin"
        self._path.mkdir(exist_ok=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """A C locale, to which Python would add a variable; a folder for libraries, as a user may have."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(("XDG_", "HF_", "TMP"))}
        return {
            **kept,
            "HOME": str(self.home),
            "PATH": str(self._path),
            "LD_LIBRARY_PATH": "/opt/of-the-user",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that ends by itself."""
        return subprocess.run(
            [self.path, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
        )

    def started(self, *arguments: str) -> AbstractContextManager[Llamasup]:
        """A command that serves, surely ended afterwards."""
        process = subprocess.Popen(
            [self.path, *arguments, "--events", "jsonl"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.home,
        )
        return adopted(process)

    def processes(self) -> list[psutil.Process]:
        """All processes with a folder of this test in their environment: the program, and what it started."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def await_nothing_left(self) -> None:
        """Wait until there is no process and no run folder."""
        eventually(lambda: not self.processes(), "the end of all processes", every_s=0.05)
        eventually(lambda: not list((self.home / "run").glob("llamasup/*")), "an empty run-time folder")

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            values = process.environ().values()
        except psutil.Error:  # it has ended, or belongs to another user
            return False
        return any(value.startswith(f"{self.home}/") for value in values)
