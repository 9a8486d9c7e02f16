"""The command that installs an extra, for each way in which llamasup can be installed."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from llamasup.core.system.extras import PACKAGES, install_command
from tests.kit.paths import ROOT


def test_packages_are_those_of_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {extra: list(packages) for extra, packages in PACKAGES.items()} == declared


@pytest.mark.parametrize(
    ("receipt", "has_pip", "words"),
    [
        ("", True, ["/tool env/bin/python", "-m", "pip", "install", "--force-reinstall"]),
        ("", False, ["uv", "pip", "install", "--reinstall", "--python", "/tool env/bin/python"]),
        (
            "uv-receipt.toml",
            True,
            ["uv", "pip", "install", "--reinstall", "--python", "/tool env/bin/python"],
        ),
        ("pipx_metadata.json", True, ["pipx", "inject", "--force", "llamasup"]),
    ],
)
def test_command_installs_into_the_environment_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str, has_pip: bool, words: list[str]
) -> None:
    prefix = tmp_path / "llamasup"
    prefix.mkdir()
    if receipt:
        (prefix / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", "/tool env/bin/python")
    spec = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec if has_pip else None)
    assert shlex.split(install_command("embedded", again=True)) == [*words, "xllamacpp>=2026.10"]
