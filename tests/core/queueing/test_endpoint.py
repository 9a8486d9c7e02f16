from __future__ import annotations

from time import monotonic

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.queueing.endpoint import Endpoint, generation_ended


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("tiny", 1, UnixAddress("/run/1.sock"))


def test_once_idle_calls_back_when_the_last_lease_is_released(endpoint: Endpoint) -> None:
    told: list[str] = []
    first, second = endpoint.lease(), endpoint.lease()
    endpoint.once_idle(lambda: told.append("idle"))
    first.release()
    first.release()
    assert (endpoint.in_flight, told) == (1, [])
    second.release()
    assert (endpoint.in_flight, told) == (0, ["idle"])


def test_once_idle_calls_back_at_once_without_leases(endpoint: Endpoint) -> None:
    told: list[str] = []
    endpoint.once_idle(lambda: told.append("idle"))
    assert told == ["idle"]


def test_close_revokes_all_leases_and_calls_back_once(endpoint: Endpoint) -> None:
    told: list[str] = []
    leases = [endpoint.lease() for _ in range(2)]
    for lease in leases:
        lease.on_revoked(lambda why: told.append(why.message))
    endpoint.when_closed(lambda: told.append("pool"))
    endpoint.close(generation_ended("it died"))
    endpoint.close(generation_ended("again"))
    assert told == ["it died", "it died", "pool"]


def test_a_released_lease_is_not_revoked(endpoint: Endpoint) -> None:
    told: list[str] = []
    lease = endpoint.lease()
    lease.on_revoked(lambda why: told.append(why.message))
    lease.release()
    endpoint.close(generation_ended("it died"))
    assert told == []


@pytest.mark.parametrize(
    ("answers", "produced", "failures"),
    [
        ([(200, True), (200, True)], 2, 0),
        ([(500, True), (503, True), (501, True)], 0, 3),
        ([(500, True), (200, True), (500, True)], 1, 1),
        ([(500, True), (200, False), (500, True)], 0, 2),  # /props tells nothing of the model
        ([(500, True), (400, True), (500, True)], 0, 2),  # nor does what is refused before it comes so far
        ([(500, False)] * 3, 0, 0),
    ],
)
def test_only_inference_responses_count_as_output_or_failures(
    endpoint: Endpoint, answers: list[tuple[int, bool]], produced: int, failures: int
) -> None:
    for status, infers in answers:
        endpoint.count_answer(status, infers=infers)
    assert (endpoint.answered, endpoint.produced, endpoint.failures) == (len(answers), produced, failures)


def test_on_idle_is_called_each_time_the_last_lease_ends(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    read: list[float] = []

    def clock() -> float:
        read.append(100.0 + len(read))
        return read[-1]

    monkeypatch.setattr("llamasup.core.queueing.endpoint.monotonic", clock)
    endpoint.on_idle = lambda vacant: told.append(vacant.idle_since_s)
    first, second = endpoint.lease(infers=True), endpoint.lease(infers=True)
    read.clear()
    first.release()
    assert (told, len(read)) == ([], 1)  # how long it held its place
    second.release()
    second.release()
    assert (told, len(read)) == ([101.0], 2)  # and the same reading says since when it is idle
    third = endpoint.lease()
    assert len(read) == 2
    third.release()
    assert (told, len(read)) == ([101.0, 102.0], 3)


def test_clock_is_not_read_without_on_idle(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = endpoint.lease()
    monkeypatch.setattr("llamasup.core.queueing.endpoint.monotonic", None)
    lease.release()
    assert (endpoint.in_flight, endpoint.idle_since_s) == (0, 0.0)


def test_closed_endpoint_grants_no_lease(endpoint: Endpoint) -> None:
    endpoint.close(generation_ended("it died"))
    with pytest.raises(RuntimeError, match="closed generation 1"):
        endpoint.lease()


def test_lingering_lease_keeps_only_its_permit(endpoint: Endpoint) -> None:
    told: list[str] = []
    lease = endpoint.lease(infers=True)
    endpoint.once_idle(lambda: told.append("idle"))
    lease.linger(lambda why: told.append(why.message))
    assert (endpoint.in_flight, endpoint.at_work, endpoint.busy, told) == (0, 1, 1, ["idle"])
    lease.release()
    lease.release()
    assert (endpoint.at_work, endpoint.busy) == (0, 0)
    endpoint.close(generation_ended("gone"))
    assert told == ["idle"]


def test_close_revokes_lingering_leases(endpoint: Endpoint) -> None:
    told: list[str] = []
    lease = endpoint.lease(infers=True)
    lease.linger(lambda why: told.append(why.message))
    endpoint.close(generation_ended("gone"))
    assert told == ["gone"]
    lease.release()
    assert (endpoint.at_work, endpoint.busy) == (0, 0)


def test_request_of_several_jobs_holds_at_most_all_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.0, 14.0])
    monkeypatch.setattr("llamasup.core.queueing.endpoint.monotonic", lambda: next(times))
    told: list[int] = []
    endpoint = Endpoint("tiny", 1, UnixAddress("/run/1.sock"), max_concurrent=4)
    endpoint.on_permit_free = lambda: told.append(endpoint.busy)
    endpoint.lease().weigh(3)  # needs no place
    lease = endpoint.lease(infers=True)
    lease.weigh(3000)
    assert (endpoint.busy, endpoint.served, told) == (4, 1, [])
    lease.release()
    assert (endpoint.busy, endpoint.served, told, endpoint.held_s) == (0, 0, [0], 16.0)
    assert lease.permit_s == 16.0


def test_permit_is_free_only_below_max_concurrent() -> None:
    told: list[int] = []
    endpoint = Endpoint("tiny", 1, UnixAddress("/run/1.sock"), max_concurrent=2)
    endpoint.on_permit_free = lambda: told.append(endpoint.busy)
    first, second = endpoint.lease(infers=True), endpoint.lease(infers=True)
    second.weigh(2)
    assert endpoint.busy == 3
    first.release()
    assert (endpoint.busy, told) == (2, [])
    second.cancel_permit()
    assert (endpoint.busy, told) == (0, [0])


def test_permits_that_come_later_count_from_then_on(endpoint: Endpoint) -> None:
    lease = endpoint.lease(infers=True)
    lease.since_s = begun_s = monotonic() - 100.0
    lease.weigh(3)
    weighed_s = monotonic()
    lease.release(weighed_s + 10.0)
    assert lease.permit_s == pytest.approx((weighed_s - begun_s) + 3 * 10.0, abs=1.0)
