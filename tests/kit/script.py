"""Runs a script of the folder scripts/."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.paths import ROOT

__all__ = ["run_script"]


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
