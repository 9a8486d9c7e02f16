"""Whether this node or another gets a request."""

from __future__ import annotations

import pytest

from llamasup.core.queueing.served_load import ServedLoad
from llamasup.features.peers.choice import Where, choose_side

HERE, ELSEWHERE = Where.HERE, Where.ELSEWHERE
AWAY = ServedLoad()


@pytest.mark.parametrize(
    ("here", "elsewhere", "where"),
    [
        (ServedLoad(2, 1), ServedLoad(8, 8), HERE),  # a free slot here
        (ServedLoad(2, 0), ServedLoad(2, 1), ELSEWHERE),
        (AWAY, ServedLoad(2, 1), ELSEWHERE),  # loaded elsewhere
        (
            ServedLoad(2, 0, waiting=3),
            ServedLoad(4, 0, waiting=3),
            ELSEWHERE,
        ),  # the shorter queue for each slot
        (ServedLoad(2, 0, waiting=1), ServedLoad(2, 0, waiting=1), HERE),
        (ServedLoad(2, 0, waiting=9), AWAY, HERE),  # only here
        (AWAY, ServedLoad(2, 0, waiting=9), ELSEWHERE),
        (ServedLoad(can_serve=False), AWAY, ELSEWHERE),
        (ServedLoad(can_serve=False), ServedLoad(can_serve=False), HERE),
        (ServedLoad(loads=True, eta_s=9.0), ServedLoad(loads=True, eta_s=3.0), ELSEWHERE),
        (ServedLoad(loads=True), ServedLoad(loads=True, eta_s=3.0), HERE),
        (ServedLoad(loads=True, eta_s=3.0), ServedLoad(loads=True), HERE),
        (AWAY, ServedLoad(loads=True), ELSEWHERE),
        (AWAY, ServedLoad(loads=True, can_serve=False), HERE),
        (ServedLoad(loads=True), AWAY, HERE),
        (AWAY, AWAY, HERE),
        (
            ServedLoad(2, 0, waiting=4, can_serve=False),
            ServedLoad(1, 0, waiting=4),
            ELSEWHERE,
        ),  # a full queue
        (ServedLoad(1, 0, waiting=4), ServedLoad(2, 0, waiting=4, can_serve=False), HERE),
        (ServedLoad(2, 0, can_serve=False), AWAY, ELSEWHERE),
    ],
)
def test_request_goes_where_it_is_served_first(here: ServedLoad, elsewhere: ServedLoad, where: Where) -> None:
    choice = choose_side(here, elsewhere)
    assert choice.where is where
    assert choice.reason
