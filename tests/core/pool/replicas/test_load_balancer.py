"""Which waiting request suits a process that is free."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.pool.replicas import load_balancer
from llamasup.core.pool.replicas.load_balancer import MAX_READ_BYTES, LoadBalancer
from llamasup.core.queueing.endpoint import Endpoint, Lease, generation_ended
from llamasup.core.queueing.request_queue import QueueEntry


class Waits:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def served(self, lease: Lease) -> None:
        raise AssertionError(lease)

    def refused(self, why: HttpError) -> None:
        raise AssertionError(why)


def entry(text: str) -> QueueEntry:
    return QueueEntry(Waits(body(text)), 0.0, 0)


def body(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def endpoint(number: int, permits: int = 1) -> Endpoint:
    return Endpoint("tiny", number, UnixAddress(f"/run/{number}.sock"), max_concurrent=permits)


def with_conversation(text: str, permits: int = 1) -> tuple[LoadBalancer, Endpoint, Endpoint, Endpoint]:
    balancer = LoadBalancer()
    first, second, third = (endpoint(number, permits) for number in range(3))
    assert balancer.pick([first], infers=True, body=body(text)) is first
    return balancer, first, second, third


def test_request_suits_the_free_endpoint_that_has_it_and_no_other() -> None:
    balancer, home, other, _ = with_conversation("tale")
    known, new = entry("tale"), entry("other")
    busy = home.lease(infers=True)
    suits = balancer.preference([home, other])
    assert (suits(known), suits(new)) == (False, True)
    busy.release()
    other.lease(infers=True)
    assert balancer.preference([home, other])(known)


def test_request_whose_endpoint_has_gone_suits_every_one() -> None:
    balancer, home, other, third = with_conversation("tale")
    known = entry("tale")
    home.lease(infers=True)
    assert not balancer.preference([home, other, third])(known)
    assert balancer.preference([other, third])(known)
    home.close(generation_ended("It was killed"))
    assert balancer.preference([other, third])(known)


def test_caches_are_compared_again_after_some_requests() -> None:
    balancer, home, other, _ = with_conversation("tale")
    new = entry("other")
    other.lease(infers=True)
    assert balancer.preference([home, other])(new)
    for _ in range(2):
        balancer.pick([other], infers=True, body=body("other"))
    assert not balancer.preference([home, other])(new)


def test_request_does_not_suit_an_endpoint_that_is_much_busier() -> None:
    """``choose`` would send it to the other one."""
    balancer, home, other, third = with_conversation("tale", permits=4)
    known = entry("tale")
    leases = [home.lease(infers=True) for _ in range(3)]
    assert not balancer.preference([home, other, third])(known)
    leases[0].release()
    assert balancer.preference([home, other, third])(known)


def test_few_long_bodies_are_read_for_one_free_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(load_balancer, "read_conversation", read.append)
    balancer = LoadBalancer()
    entries = [entry("x" * (MAX_READ_BYTES // 2 - 100)) for _ in range(4)]
    for count in (2, 4):
        suits = balancer.preference([endpoint(1)])
        assert all(map(suits, entries))
        assert len(read) == count
