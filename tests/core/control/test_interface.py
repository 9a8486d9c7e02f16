"""The rules for a stop and for commands during a stop."""

from __future__ import annotations

import pytest

from llamasup.core.control.interface import refuse_if_stopping, shut_down
from llamasup.errors import Stopping


class Owner:
    """Records what it is asked for."""

    def __init__(self, stops_asked: int = 0) -> None:
        self.stops_asked = stops_asked
        self.announced: list[str] = []

    def ask_stop(self) -> None:
        self.stops_asked += 1

    def control_asks(self, what: str, model: str = "") -> None:
        self.announced.append(what)


@pytest.mark.parametrize(
    ("stops_before", "now", "stops_after"),
    [(0, False, 1), (0, True, 2), (1, False, 1), (1, True, 2)],
)
def test_second_stop_means_at_once(stops_before: int, now: bool, stops_after: int) -> None:
    owner = Owner(stops_before)
    shut_down(owner, now=now)
    assert owner.stops_asked == stops_after
    assert owner.announced == (["stop"] if stops_after > stops_before else [])


def test_commands_are_refused_during_a_stop() -> None:
    refuse_if_stopping(Owner())
    with pytest.raises(Stopping):
        refuse_if_stopping(Owner(1))
