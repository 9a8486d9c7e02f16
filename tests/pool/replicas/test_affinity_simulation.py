"""The table in docs/replicas.md matches the choice of replicas."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.slow
def test_table_in_the_docs_matches_the_simulation() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "simulate_affinity.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
