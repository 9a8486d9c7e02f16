"""Write the table of docs/agents.md from the results of the last run: ``scripts/test_clients --write``."""

from __future__ import annotations

import json
import sys
from typing import Any

from scripts.pages import DOCS, aligned_table, keep_current, marks_of
from tests.extended.agents.conftest import RESULTS, SMALL
from tests.extended.agents.programs import OPEN_WEBUI, PROGRAMS, Program

__all__ = ["PAGE"]

PAGE = DOCS / "agents.md"
_COMMAND = "scripts/test_clients --write"
_HEAD = (
    *("Client", "Version", "Set up by", "First request", "Task", "From the cache", "Ctrl-C"),
    f"Context of {SMALL:,} tokens",
)


def _result(program: Program, test: str) -> dict[str, Any]:
    path = RESULTS / f"{program.name}.{test}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _row(program: Program) -> list[str]:
    task = _result(program, "test_program_reads_writes_runs_a_command_and_ends")
    setup = f"`connect {program.client}`"
    if program.setup_by:
        setup += f", {program.setup_by}"
    cached = f"{task['cached']} %" if "cached" in task else ""
    done = "done" if program.counts else "edits a file"
    interrupted = _result(program, "test_interrupted_agent_frees_the_slot")
    small = _result(program, "test_agent_reports_a_context_that_is_too_small")
    ends = f"says so, exits with {small.get('exit_code')}" if program.gives_up else "tries again"
    agent = [_outcome(interrupted, "frees the slot"), _outcome(small, ends)] if program.is_agent else ["", ""]
    size = f"{task['bytes'] / 1000:.0f} KB" if "bytes" in task else ""
    return [
        *(program.title, program.version, setup, size, _outcome(task, done), cached),
        *agent,
    ]


def _outcome(result: dict[str, Any], passed: str) -> str:
    if not result:
        return "not run"
    return passed if result["passed"] else f"**failed**: {result.get('reason', 'see the test')[:100]}"


def _page_row() -> list[str]:
    program, result = OPEN_WEBUI, _result(OPEN_WEBUI, "test_page_chats_in_the_browser")
    return [
        program.title,
        program.version,
        f"`connect {program.client}`",
        "",
        _outcome(result, "chats"),
        *[""] * 3,
    ]


def main() -> int:
    table = aligned_table([_HEAD, *map(_row, PROGRAMS), _page_row()])
    return keep_current(PAGE, marks_of("clients", _COMMAND), table, check=False, command=_COMMAND)


if __name__ == "__main__":
    sys.exit(main())
