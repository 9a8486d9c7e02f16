"""Batches on a real llama-server: each line has exactly one answer, whatever is killed."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path

import pytest

from tests.e2e.driver import run_to_end
from tests.real.batch_chaos import BatchUnderTest, answers_of, write_lines

pytestmark = pytest.mark.real

LINES = 600
KILLS = 6


def test_each_line_has_one_answer_although_all_processes_are_killed(
    runtime: str, tiny_model: Path, own_folders: Path, tmp_path: Path
) -> None:
    seed = secrets.randbelow(1 << 32)
    chance = random.Random(seed)
    print(f"seed {seed}")
    source = tmp_path / "in.jsonl"
    write_lines(source, LINES)
    undisturbed = tmp_path / "undisturbed.jsonl"
    options = ("--model", str(tiny_model), "--", "--runtime", runtime, "--parallel", "4")
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
