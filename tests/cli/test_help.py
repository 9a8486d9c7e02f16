"""``llamasup help``: the help of a command, or a page of the documentation, and the pages of the commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamasup.cli import pages
from llamasup.cli.app import COMMANDS, app
from tests.kit.paths import ROOT

NAMES = [entry.name for section in COMMANDS.values() for entry in section]
MAN_PAGE = ROOT / "packaging" / "llamasup.1"
MACROS = {'\\"', "TH", "SH", "SS", "PP", "TP", "B", "I", "BR", "RI"}


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("", r"Usage: llamasup \[OPTIONS\] COMMAND(.|\n)+\n  wrap\.md$"),
        ("run", r"Usage: llamasup run (.|\n)+Described in docs/get-started\.md: "),
        ("batch run", r"Usage: llamasup batch run (.|\n)+: llamasup help batch\.md$"),
        ("batch.md", r"# Batches\n"),
        ("docs/batch.md", r"# Batches\n"),
        ("glossary", r"# Glossary\n"),
        ("batsh", r"Usage: (.|\n)+no page has the name 'batsh'\. Did you mean batch\?"),
        ("batch.txt", r"Usage: (.|\n)+ 'batch\.txt'\. "),
        ("xyz", r"Usage: (.|\n)+`llamasup help` lists all topics\."),
    ],
)
def test_topic_is_a_command_or_a_page(topic: str, shown: str) -> None:
    result = CliRunner().invoke(app, ["help", *topic.split()], prog_name="llamasup")
    assert re.match(shown, result.output), result.output
    assert result.exit_code == (2 if " and no page " in result.output else 0)


def test_installation_without_pages_names_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "_FOLDERS", (tmp_path,))
    result = CliRunner().invoke(app, ["help", "batch.md"], prog_name="llamasup")
    assert "this installation has no pages: see docs/batch.md" in result.output
    assert CliRunner().invoke(app, ["help"], prog_name="llamasup").exit_code == 0


@pytest.mark.parametrize("name", NAMES)
def test_page_of_a_command_exists_and_names_the_command(name: str) -> None:
    page = ROOT / "docs" / f"{pages.page_of(name)}.md"
    assert re.search(rf"\bllamasup {name}\b|`{name}`", page.read_text("utf-8"))


def test_man_page_has_each_command_and_is_roff() -> None:
    text = MAN_PAGE.read_text("utf-8")
    assert set(NAMES) <= set(re.findall(r"^\.SS llamasup (\S+)", text.replace(r"\-", "-"), re.M))
    assert set(re.findall(r"^\.(\S*)", text, re.M)) <= MACROS
    assert text.isascii()
    if (groff := shutil.which("groff")) is not None:
        done = subprocess.run(
            [groff, "-ww", "-man", "-z", str(MAN_PAGE)], capture_output=True, text=True, check=True
        )
        assert not done.stderr
