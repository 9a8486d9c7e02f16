"""How ``scripts/test`` makes the bundles: one that cannot be made is a failure, unless tools are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

LIKE_SCRIPTS_TEST = """
set -eu
. "$(dirname -- "$0")/environment"
failed=
bundle BUNDLE --an-option || failed=" failed"
printf '%s' "${BUNDLE-none}$failed"
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    shutil.copy(ROOT / "scripts" / "environment", folder)
    return folder


def made(scripts: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What comes of ``bundle`` where scripts/bundle is ``script``."""
    program = scripts / "bundle"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return subprocess.run(
        ["sh", "-c", LIKE_SCRIPTS_TEST, str(scripts / "test")],
        env={"PATH": os.defpath, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_variable_gets_the_program_of_the_bundle(scripts: Path) -> None:
    assert made(scripts, "echo /dist/$1").stdout == "/dist/--an-option"


def test_bundle_that_cannot_be_made_or_is_too_large_is_a_failure(scripts: Path) -> None:
    assert made(scripts, "exit 1").stdout == "none failed"


def test_tests_are_skipped_where_no_bundle_can_be_made(scripts: Path) -> None:
    done = made(scripts, "exit 77")
    assert done.stdout == "none"
    assert done.stderr == "Without $BUNDLE, tests of tests/bundle will be skipped.\n"


def test_bundle_that_is_given_is_not_made_again(scripts: Path) -> None:
    assert made(scripts, "exit 1", BUNDLE="/given").stdout == "/given"


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
    """Also where its caller goes on after it, so that ``set -e`` does not end the function."""
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
