"""The table in docs/replicas.md matches the choice of replicas."""

from __future__ import annotations

import pytest

from scripts.simulate_affinity import DOC, MACHINES, OURS, Machine, row


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_row_of_our_rule_in_the_docs_matches_the_simulation(machine: Machine) -> None:
    """Under full load. The script itself checks all rows, which takes minutes."""
    assert row(machine, machine.clients[-1], OURS) in DOC.read_text("utf-8").splitlines()
