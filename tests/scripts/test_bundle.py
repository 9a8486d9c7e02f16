"""``scripts/bundle`` exits with 77 where it cannot make a bundle."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.paths import ROOT


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    shutil.copy(ROOT / "scripts" / "environment", folder)
    return folder


def test_script_says_that_it_needs_strip(scripts: Path) -> None:
    shutil.copy(ROOT / "scripts" / "bundle", scripts)
    tools = scripts.parent / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname") or "")
    command = ["/bin/sh", str(scripts / "bundle")]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 77
    assert "needs strip" in done.stderr


def test_failed_installation_is_tried_again(scripts: Path) -> None:
    """The caller continues after it, so ``set -e`` does not end the function."""
    shutil.copy(ROOT / "scripts" / "bundle", scripts)
    tools = scripts.parent / "bin"
    tools.mkdir()
    for name, text in (("strip", ""), ("python", 'case "$*" in *install*) exit 1;; esac')):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    venv = scripts.parent / ".venv-bundle" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(tools / "python")
    (scripts.parent / "pyproject.toml").touch()
    command = ["/bin/sh", str(scripts / "bundle")]
    environment = {"PATH": f"{tools}{os.pathsep}{os.defpath}"}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 77, done.stderr
        assert "could not be installed" in done.stderr
