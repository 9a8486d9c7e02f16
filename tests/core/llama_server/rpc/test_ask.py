"""Which RPC workers are asked, and how often."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from llamasup.core.llama_server.inspect import Runtime
from llamasup.core.llama_server.rpc import ask
from llamasup.core.llama_server.rpc.ask import ask_workers
from llamasup.core.system.process.run_once import CommandResult
from tests.core.planning.plans import NEW, capabilities

RUNTIME = Runtime("binary", "/llama-server", ("/llama-server",), capabilities(NEW))
AWAKE, ASLEEP = "10.0.0.2:50052", "10.0.0.3:50052"


class Workers:
    """Stands in for llama-server. ``ready_at``: the number of the question that a worker answers first."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.ready_at = {AWAKE: 1, ASLEEP: 2}

    def run(
        self,
        runtime: Runtime,
        environ: Mapping[str, str],
        commands: Sequence[Sequence[str]],
        timeout_s: float,
    ) -> list[CommandResult]:
        names = [command[1] for command in commands]
        self.asked.append(names)
        return [self._answer(name) for name in names]

    def _answer(self, name: str) -> CommandResult:
        if len(self.asked) < self.ready_at[name]:
            return CommandResult(1, "", "Failed to connect")
        return CommandResult(0, f"Available devices:\n  RPC0: {name} (1024 MiB, 1000 MiB free)\n", "")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    asked = Workers()
    monkeypatch.setattr(ask, "run_runtime", asked.run)
    monkeypatch.setattr(ask, "_kept", {})
    return asked


def states(attempts: int, *, again: bool = False) -> list[str]:
    answers = ask_workers(RUNTIME, {}, [AWAKE, ASLEEP], None, attempts=attempts, again=again)
    return [answer.state for answer in answers]


def test_further_attempts_ask_only_the_workers_that_are_not_ready(workers: Workers) -> None:
    assert states(attempts=3) == ["ready", "ready"]
    assert workers.asked == [[AWAKE, ASLEEP], [ASLEEP]]


def test_one_attempt_takes_the_answers_as_they_are(workers: Workers) -> None:
    assert states(attempts=1) == ["ready", "absent"]
    assert workers.asked == [[AWAKE, ASLEEP]]


def test_new_answer_of_a_ready_worker_is_used_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_s)
    states(attempts=1)
    assert states(attempts=1) == ["ready", "ready"]
    assert workers.asked == [[AWAKE, ASLEEP], [ASLEEP]]
    states(attempts=1, again=True)
    assert workers.asked[2:] == [[AWAKE, ASLEEP]]
