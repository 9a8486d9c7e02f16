"""Whether this node or another gets a request."""

from __future__ import annotations

import pytest

from llamasup.peers.choice import Side, Where, choose_side

HERE, ELSEWHERE = Where.HERE, Where.ELSEWHERE
AWAY = Side()


@pytest.mark.parametrize(
    ("here", "elsewhere", "where"),
    [
        (Side(2, 1), Side(8, 8), HERE),  # a free slot here
        (Side(2, 0), Side(2, 1), ELSEWHERE),
        (AWAY, Side(2, 1), ELSEWHERE),  # loaded elsewhere
        (Side(2, 0, waiting=3), Side(4, 0, waiting=3), ELSEWHERE),  # the shorter queue for each slot
        (Side(2, 0, waiting=1), Side(2, 0, waiting=1), HERE),
        (Side(2, 0, waiting=9), AWAY, HERE),  # only here
        (AWAY, Side(2, 0, waiting=9), ELSEWHERE),
        (Side(can_serve=False), AWAY, ELSEWHERE),
        (Side(can_serve=False), Side(can_serve=False), HERE),
        (Side(loads=True, eta_s=9.0), Side(loads=True, eta_s=3.0), ELSEWHERE),
        (Side(loads=True), Side(loads=True, eta_s=3.0), HERE),
        (Side(loads=True, eta_s=3.0), Side(loads=True), HERE),
        (AWAY, Side(loads=True), ELSEWHERE),
        (AWAY, Side(loads=True, can_serve=False), HERE),
        (Side(loads=True), AWAY, HERE),
        (AWAY, AWAY, HERE),
    ],
)
def test_request_goes_where_it_is_served_first(here: Side, elsewhere: Side, where: Where) -> None:
    choice = choose_side(here, elsewhere)
    assert choice.where is where
    assert choice.reason
