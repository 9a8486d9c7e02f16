"""The main program of the bundle: it becomes a part, and takes PyInstaller's changes back."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from llamasup import frozen
from llamasup.core.system.own_command import BUNDLE, MODULES, PART_ARGUMENT


@pytest.mark.parametrize(
    ("arguments", "module", "rest"),
    [
        ([], "llamasup", []),
        (["run", "demo"], "llamasup", ["run", "demo"]),
        ([PART_ARGUMENT, "embedded", "--model", "m.gguf"], "embedded", ["--model", "m.gguf"]),
        ([PART_ARGUMENT, "sweep", "/run/1"], "sweep", ["/run/1"]),
    ],
)
def test_first_argument_chooses_the_part(arguments: list[str], module: str, rest: list[str]) -> None:
    chosen, left = frozen._chosen(arguments)
    assert chosen == next(name for part, name in MODULES.items() if part == module)
    assert list(left) == rest


@pytest.mark.parametrize(
    "arguments", [[PART_ARGUMENT], [PART_ARGUMENT, "os"], ["run", PART_ARGUMENT, "sweep"]]
)
def test_anything_else_goes_to_the_command_line_of_llamasup(arguments: list[str]) -> None:
    assert frozen._chosen(arguments) == ("llamasup.__main__", arguments)


@pytest.mark.parametrize(
    ("environ", "changes"),
    [
        (
            {"LD_LIBRARY_PATH": "/app/_internal:/opt", "LD_LIBRARY_PATH_ORIG": "/opt"},
            {"LD_LIBRARY_PATH": "/opt", "LD_LIBRARY_PATH_ORIG": None},
        ),
        (
            {"LD_LIBRARY_PATH": "/app/_internal", "_PYI_ARCHIVE_FILE": "/app/llamasup", "HOME": "/home/me"},
            {"LD_LIBRARY_PATH": None, "LD_LIBRARY_PATH_ORIG": None, "_PYI_ARCHIVE_FILE": None},
        ),
    ],
)
def test_library_path_is_that_of_the_caller_again(
    environ: Mapping[str, str], changes: Mapping[str, str | None]
) -> None:
    assert frozen._changes(environ, "linux") == changes


def test_other_systems_have_no_library_path_to_restore() -> None:
    environ = {"LD_LIBRARY_PATH": "/opt", "_PYI_SPLASH_IPC": "0"}
    assert frozen._changes(environ, "darwin") == {"_PYI_SPLASH_IPC": None}


def test_program_of_the_bundle_becomes_the_sweep(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_folders / "run" / "llamasup" / f"{2**22 + 1}-abcdefgh"  # above the largest process ID
    folder.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "argv", ["llamasup", PART_ARGUMENT, "sweep", str(folder)])
    monkeypatch.setattr(os, "environ", os.environ | {"_PYI_ARCHIVE_FILE": "/app/llamasup"})
    monkeypatch.setitem(os.environ, "LD_LIBRARY_PATH", "/app/_internal:/opt")
    monkeypatch.setitem(os.environ, "LD_LIBRARY_PATH_ORIG", "/opt")
    frozen.main()
    assert not folder.exists()
    assert sys.argv == ["llamasup", str(folder)]
    assert getattr(sys, "frozen") == BUNDLE  # noqa: B009 - unknown to mypy
    assert "_PYI_ARCHIVE_FILE" not in os.environ
    if sys.platform == "linux":
        assert os.environ["LD_LIBRARY_PATH"] == "/opt"
