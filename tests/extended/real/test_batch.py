"""Batches on a real llama-server: each line has exactly one answer, whatever is killed."""

from __future__ import annotations

import json
import random
import secrets
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from tests.e2e.driver import command, llamasup, run_to_end
from tests.extended.real.batch_chaos import SLOTS, BatchUnderTest, answers_of, write_lines
from tests.kit.patience import eventually
from tests.kit.runtimes import wrapped_runtime

LINES = 600
KILLS = 6
OF_BATCH = {"temperature": 0, "ignore_eos": True}
OF_ANOTHER = {"prompt": "Hello", "ignore_eos": True, "stream": True}
MOST_TOKENS = 500  # of an answer, as soon as the answers need not be endless any more


def test_each_line_has_one_answer_although_all_processes_are_killed(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    seed = secrets.randbelow(1 << 32)
    chance = random.Random(seed)
    print(f"seed {seed}")
    source = tmp_path / "in.jsonl"
    write_lines(source, LINES)
    undisturbed = tmp_path / "undisturbed.jsonl"
    options = ("--model", str(tiny_model), "--", "--runtime", runtime, *SLOTS)
    ran = run_to_end("batch", "run", str(source), "-o", str(undisturbed), *options)
    assert ran.returncode == 0, ran.stderr
    expected = answers_of(undisturbed)
    assert len(expected) == LINES
    output = tmp_path / "out.jsonl"
    with BatchUnderTest(tmp_path, tiny_model, runtime, source, output).started() as batch:
        while batch.kills.total() < KILLS and not batch.is_over:
            time.sleep(chance.uniform(0.1, 0.8))
            batch.kill_one(chance)
        assert batch.end() == 0, batch._log()
    print(f"kills {dict(batch.kills)}")
    assert answers_of(output) == expected


def test_a_batch_gives_way_to_another_client_and_continues(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    """All answers are endless: no pause of a process lets one end too early. The next server limits them."""
    source, output, limited = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "limited"
    lines = [
        {"custom_id": str(number), "url": "/v1/completions", "body": {**OF_BATCH, "prompt": f"Once {number}"}}
        for number in range(2)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    limits = f'[ -e {shlex.quote(str(limited))} ] && set -- "$@" --predict {MOST_TOKENS}'
    # One slot: a batch that has waited for long gets a turn, but only in a free slot.
    options = ("--parallel", "1", "--ctx-size", "4096", "--", "--context-shift")
    with llamasup(tiny_model, "--runtime", wrapped_runtime(tmp_path, runtime, limits), *options) as running:
        url = running.url
        command_line = command("batch", "run", str(source), "-o", str(output), "--url", url, "--json")
        with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as batch:
            for _ in range(2):
                await_stream()
                with httpx.stream("POST", f"{url}/completion", json=OF_ANOTHER) as answer:
                    assert answer.status_code == 200
                    eventually(  # none of its lines can be over: most of the time all are refused
                        lambda: all(one["phase"] == "queued" for one in in_flight()),
                        "the batch without a slot while the other client has its answer",
                    )
            await_stream()
            limited.touch()
            [server] = running.children()
            server.kill()
            assert batch.stdout is not None
            events = [json.loads(line) for line in batch.stdout]
        assert running.stop() == 0
    assert events[-1]["event"] == "done"
    assert events[-1]["put_back"] >= 2
    assert events[-1]["events_lost"] > 0
    answers = answers_of(output)
    assert len(answers) == 2
    usage = [json.loads(line)["response"]["body"]["usage"] for line in output.read_text().splitlines()]
    assert {one["completion_tokens"] for one in usage} == {MOST_TOKENS}


def await_stream() -> None:
    eventually(lambda: any(one["bytes_out"] for one in in_flight()), "a stream of the batch")


def in_flight() -> list[Mapping[str, Any]]:
    """The requests of the batch in the only llamasup of this test."""
    [running] = discover().running
    with ControlClient(ControlAddress(socket=running.socket)) as client:
        return [one for one in client.requests()["live"] if one["path"] == "/v1/completions"]
