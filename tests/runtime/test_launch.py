"""What a launch finds out before anything is started: names, paths, libraries, and what cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.errors import UsageInvalid
from llamasup.core.settings import Settings
from llamasup.runtime.launch import Launch, prepare

HELP = Path(__file__).parents[1] / "fixtures" / "help" / "b11434.txt"
ANSWERS = f"""#!/bin/sh
case "$1" in
--help) /bin/cat '{HELP}' ;;
--version) echo 'version: 10114 (ed7adbfef)' >&2 ;;
--list-devices) echo 'Available devices:' ;;
esac
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A runtime that only answers questions."""
    path = tmp_path / "build" / "llama-server"
    path.parent.mkdir()
    path.write_text(ANSWERS)
    path.chmod(0o755)
    return path


def launch(
    model: str | Path, runtime: Path, *, environ: Mapping[str, str] | None = None, **settings: Any
) -> Launch:
    return prepare(str(model), Settings(**settings), runtime=str(runtime), environ=environ or {})


def test_a_linked_llama_server_is_run_with_the_libraries_that_it_was_asked_with(
    server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    link = tmp_path / "llama-server"
    link.symlink_to(server)
    made = launch(tiny_model, link).plan(tmp_path, 1)
    assert made.argv[0] == str(link)
    assert made.env["LD_LIBRARY_PATH"] == str(server.parent)


def test_llama_server_is_told_the_very_name_that_llamasup_knows_the_model_by(
    server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    for alias, name, aliases in ((None, "tiny", ()), ("gpt , small", "gpt", ("small",))):
        found = launch(tiny_model, server, alias=alias)
        argv = found.plan(tmp_path, 1).argv
        assert (found.model_id, found.aliases) == (name, aliases)
        assert argv[argv.index("--alias") + 1] == name


def test_an_empty_alias_is_refused_before_the_start(server: Path, tiny_model: Path) -> None:
    with pytest.raises(UsageInvalid, match="empty name"):
        launch(tiny_model, server, alias="")
