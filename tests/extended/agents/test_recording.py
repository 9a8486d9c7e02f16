"""Writes the fixtures of the gate, the requests that each agent sends: ``scripts/test_clients --record``."""

from __future__ import annotations

import json
import os

import pytest

from tests.extended.agents.conftest import CLIENTS, Run, Served, calls_of
from tests.extended.agents.fixtures import fixture_of
from tests.extended.agents.programs import PROGRAMS, Program
from tests.extended.agents.recorder import recorder
from tests.kit.agent_requests import FIXTURES

RECORDED = [program for program in PROGRAMS if program.is_agent]
MOST_BYTES = 100_000

pytestmark = pytest.mark.skipif(
    not CLIENTS.exists() or os.environ.get("LLAMASUP_RECORD") != "1",
    reason="only scripts/test_clients --record writes the fixtures",
)


@pytest.mark.parametrize("agent", RECORDED, ids=[program.name for program in RECORDED])
def test_requests_are_recorded(agent: Program, served: Served, run: Run) -> None:
    folder = served.home / agent.name
    with recorder(served.url) as (url, requests):
        finished = run(agent, agent.name, url=url)
    assert finished.exit_code == 0, finished.output
    calls = [{"name": call.name, "arguments": call.arguments} for call in calls_of(agent, folder)]
    text = json.dumps(fixture_of(agent, requests, str(folder), calls), ensure_ascii=False, indent=1)
    assert len(text) < MOST_BYTES
    for secret in (str(folder.parent.parent), os.environ["HOME"], os.uname().nodename):
        assert secret not in text
    FIXTURES.mkdir(exist_ok=True)
    (FIXTURES / f"{agent.name}.json").write_text(f"{text}\n", "utf-8")
