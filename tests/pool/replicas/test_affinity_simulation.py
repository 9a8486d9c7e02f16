"""The table in docs/replicas.md matches the choice of replicas."""

from __future__ import annotations

import pytest

from tests.script import run_script


@pytest.mark.slow
def test_table_in_the_docs_matches_the_simulation() -> None:
    done = run_script("simulate_affinity.py", "--check")
    assert done.returncode == 0, done.stderr
