"""How many requests a plan infers for at a time."""

from __future__ import annotations

import pytest

from llamasup.supervision.states import Policy


@pytest.mark.parametrize(
    ("policy", "slots", "max_concurrent"),
    [
        (Policy(), 4, 4),
        (Policy(), None, None),
        (Policy(max_concurrent=2), 4, 2),
        (Policy(max_concurrent=2), None, 2),
        (Policy(limits_to_slots=False), 4, None),
        (Policy(limits_to_slots=False, max_concurrent=3), 4, 3),
        (Policy(wait_timeout_s=0.0), 4, None),  # llama-server queues, as it did before
        (Policy(wait_timeout_s=0.0, max_concurrent=4), 4, 4),
    ],
)
def test_permits_are_the_slots_unless_configured(
    policy: Policy, slots: int | None, max_concurrent: int | None
) -> None:
    assert policy.permits(slots) == max_concurrent
