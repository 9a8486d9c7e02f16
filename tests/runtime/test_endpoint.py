from __future__ import annotations

import pytest

from llamasup.core.address import UnixAddress
from llamasup.runtime.endpoint import Endpoint


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("tiny", 1, UnixAddress("/run/1.sock"))


def test_idle_is_told_when_the_last_lease_is_released(endpoint: Endpoint) -> None:
    told: list[str] = []
    first, second = endpoint.lease(), endpoint.lease()
    endpoint.when_idle(lambda: told.append("idle"))
    first.release()
    first.release()
    assert (endpoint.in_flight, told) == (1, [])
    second.release()
    assert (endpoint.in_flight, told) == (0, ["idle"])


def test_idle_is_told_at_once_when_nothing_is_in_flight(endpoint: Endpoint) -> None:
    told: list[str] = []
    endpoint.when_idle(lambda: told.append("idle"))
    assert told == ["idle"]


def test_closing_revokes_what_is_in_flight_and_tells_the_pools_once(endpoint: Endpoint) -> None:
    told: list[str] = []
    leases = [endpoint.lease() for _ in range(2)]
    for lease in leases:
        lease.when_revoked(told.append)
    endpoint.when_closed(lambda: told.append("pool"))
    endpoint.close("it died")
    endpoint.close("again")
    assert told == ["it died", "it died", "pool"]


def test_a_released_lease_is_not_revoked(endpoint: Endpoint) -> None:
    told: list[str] = []
    lease = endpoint.lease()
    lease.when_revoked(told.append)
    lease.release()
    endpoint.close("it died")
    assert told == []


def test_there_is_no_lease_on_a_closed_generation(endpoint: Endpoint) -> None:
    endpoint.close("it died")
    with pytest.raises(RuntimeError, match="closed generation 1"):
        endpoint.lease()
