"""Agents and libraries of others do a task with tools, with a real llama-server behind llamasup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extended.agents.conftest import CLIENTS, SMALL, Run, Served
from tests.extended.agents.programs import ANSWER, DONE, PROGRAMS, Program
from tests.kit.patience import eventually

AGENTS = [program for program in PROGRAMS if program.is_agent]
Record = Callable[[str, object], None]

pytestmark = pytest.mark.skipif(not CLIENTS.exists(), reason="run scripts/test_clients, which installs them")


def name_of(program: Program) -> str:
    return program.name


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_program_reads_writes_runs_a_command_and_ends(
    program: Program, served: Served, run: Run, record_property: Record
) -> None:
    finished = run(program, program.name)
    assert finished.exit_code == 0, finished.output
    assert DONE in finished.output
    folder = served.home / program.name
    assert (folder / "answer.txt").read_text() == ANSWER, finished.output
    if program.counts:
        assert (folder / "count.txt").read_text().strip() == str(len(ANSWER)), finished.output
    turns = len(program.calls) + 1

    def with_tools() -> list[dict[str, Any]]:
        """The requests without tools, such as for a title, are much shorter."""
        found = [each for each in served.requests(program.name) if each["path"] == program.path]
        most = max((each["bytes_in"] for each in found), default=0)
        return [each for each in found if each["bytes_in"] > most / 4][-turns:]

    eventually(lambda: len(with_tools()) == turns, "the last request in the access log")
    requests = with_tools()
    assert all(each["status"] == 200 for each in requests)
    prompts = [each["tokens_prompt"] for each in requests]
    cached = [each["tokens_cached"] for each in requests]
    record_property("bytes", requests[0]["bytes_in"])
    for before, again in zip(prompts, cached[1:], strict=False):
        assert again >= before - 8  # the cache holds the conversation, except for the last tokens
    if turns > 1:
        record_property("cached", round(100 * sum(cached[1:]) / sum(prompts[1:])))


@pytest.mark.parametrize("program", AGENTS, ids=name_of)
def test_interrupted_agent_frees_the_slot(program: Program, served: Served, run: Run) -> None:
    finished = run(program, "endless", until=lambda: served.is_generating("endless"))
    eventually(lambda: not served.is_generating("endless"), f"a free slot; {finished.output}")


@pytest.mark.parametrize("program", AGENTS, ids=name_of)
def test_agent_reports_a_context_that_is_too_small(
    program: Program, served: Served, run: Run, record_property: Record
) -> None:
    before = len(served.requests("small"))

    def refused() -> list[dict[str, object]]:
        return [each for each in served.requests("small")[before:] if each["status"] == 400]

    finished = run(program, "small", until=None if program.gives_up else lambda: len(refused()) > 1)
    record_property("exit_code", finished.exit_code)
    if program.gives_up:
        assert any(words in finished.output.lower() for words in ("context", "too long")), finished.output
    assert all(each["n_ctx"] == SMALL for each in refused())  # none: it knows the context, and sends nothing
