"""The table of the phases of a client connection."""

from __future__ import annotations

import pytest

from llamasup.core.proxy.client_transport import BUSY, PAUSED, PHASES, Phase, longest_s
from llamasup.core.proxy.settings import Limits


def test_every_phase_has_a_rule() -> None:
    assert set(PHASES) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_phase_ends_unless_somebody_else_limits_it(phase: Phase) -> None:
    limits = Limits(head_s=1.0, body_idle_s=2.0, keepalive_s=3.0, linger_s=4.0)
    is_limited = longest_s(phase, limits) < float("inf")
    assert is_limited == (phase not in (BUSY, PAUSED))
    if is_limited:
        assert longest_s(phase, limits) <= 4.0  # a limit of the configuration, not of the table
    else:
        assert not PHASES[phase].part
