"""Each invariant finds the instance that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.supervision.states import Instance, State, violations

KILLED = Diagnosis("killed", "It was killed.", "", (), False, 75)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": State.READY}, "a child is missing in state ready"),
        ({"state": State.STOPPED, "alive": True}, "a child exists in state stopped"),
        ({"state": State.STOPPED, "next_start_s": 1.0}, "a start is due in state stopped"),
        ({"state": State.BACKOFF}, "no start is due in state backoff"),
        ({"state": State.STOPPED, "restart_pending": True}, "a restart is pending in state stopped"),
        ({"state": State.STOPPED, "kill_reason": KILLED}, "a kill reason is left in state stopped"),
        ({"state": State.FAILED}, "no diagnosis in state failed"),
        ({"state": State.STOPPED, "transferring_slots": True}, "slots of no child are transferred"),
    ],
)
def test_violation_is_found(fields: dict[str, Any], expected: str) -> None:
    assert list(violations(Instance(**fields))) == [expected]


@pytest.mark.parametrize(
    "instance",
    [
        Instance(),
        Instance(State.READY, alive=True),
        Instance(State.BACKOFF, next_start_s=1.0),
        Instance(State.FAILED, last=KILLED, next_start_s=1.0),
        Instance(State.STOPPING, alive=True, kill_reason=KILLED, restart_pending=True),
    ],
)
def test_valid_instance_has_no_violation(instance: Instance) -> None:
    assert list(violations(instance)) == []
