"""Half a minute of scripts/chaos/models.py for each runtime: 8 models in memory for 2 to 3."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.extended.soak.stress import stress
from tests.extended.soak.stress_expectations import Verdict

DURATION_S = 30.0


@pytest.mark.timeout(900)
def test_all_answers_are_correct_under_random_changes_and_faults(runtime: str, own_folders: Path) -> None:
    seed = secrets.randbelow(1_000_000)
    print(f"seed {seed}")
    report = stress(runtime, own_folders, duration_s=DURATION_S, seed=seed)
    print("\n".join(report.table()))
    assert report.violations == [], (
        f"python -m scripts.chaos models --runtime {runtime} --minutes 0.5 --seed {seed}"
    )
    assert report.count(Verdict.RIGHT) > 0
    assert report.idle_checks > 0
