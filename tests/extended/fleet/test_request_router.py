"""Which replica Ray Serve chooses for a request that enters there. Needs Ray, but no cluster."""

from __future__ import annotations

import importlib.util
import json
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.async_tests import async_test

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


def pending_request(body: bytes, method: str = "forward") -> Any:
    from ray.serve.request_router import PendingRequest

    metadata: Any = SimpleNamespace(call_method=method)
    return PendingRequest([b"/v1/chat/completions", b"", body], {}, metadata, future=Future())


class Replica:
    """As Serve's router sees it."""

    def __init__(self, name: str) -> None:
        from ray.serve._private.common import DeploymentID, ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("model", "app"))
        self.name = name
        self.routing_stats: dict[str, Any] = {"slots": 4}
        self.node_id, self.availability_zone = "node", None
        self.multiplexed_model_ids: frozenset[str] = frozenset()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Replicas:
    """Serve's own router with our choice, and its replicas."""

    def __init__(self, *names: str) -> None:
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID

        from llamasup.fleet.request_router import PromptRouter

        source = DeploymentHandleSource.REPLICA
        self.router: Any = PromptRouter(
            DeploymentID("model", "app"), source, use_replica_queue_len_cache=True
        )
        self.router.initialize_state()
        self.known = [Replica(name) for name in names]
        self.router.update_replicas(self.known)

    def of(self, name: str) -> Replica:
        return next(replica for replica in self.known if replica.name == name)

    def send(self, name: str, requests: int) -> None:
        """Serve has so many requests there."""
        self.router.on_new_queue_len_info(self.of(name).replica_id, requests)

    async def chosen(self, *said: str, method: str = "forward") -> list[list[str]]:
        pending = pending_request(body_of(*said), method)
        ranks = await self.router.choose_replicas(self.known, pending)
        assert pending.routing_context.should_backoff
        return [[replica.name for replica in rank] for rank in ranks]


def body_of(*said: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": words} for words in said]}).encode()


@async_test
async def test_conversation_goes_to_the_replica_that_has_it_in_its_cache() -> None:
    replicas = Replicas("a", "b", "c", "d")
    first = [(await replicas.chosen(word * 50))[0] for word in "klmn"]
    assert sorted(first) == [["a"], ["b"], ["c"], ["d"]], "new conversations spread"
    for word, before in zip("klmn", first, strict=True):
        ranks = await replicas.chosen(word * 50, "An answer", "A question")
        assert ranks[0] == before
        assert len(ranks) == 3
        assert before not in ranks[1:]


@async_test
async def test_busy_replica_loses_its_conversation_also_if_a_front_keeps_it_busy() -> None:
    replicas = Replicas("a", "b")
    talk = "k" * 50
    ((first,), (other,)) = await replicas.chosen(talk)
    replicas.send(first, 3)
    assert (await replicas.chosen(talk))[0] == [other]
    replicas = Replicas("a", "b")
    ((first,), (other,)) = await replicas.chosen(talk)
    replicas.of(first).routing_stats = {"slots": 4, "busy": 3, "queued": 0}
    assert (await replicas.chosen(talk))[0] == [other], "a front has sent them"


@async_test
async def test_full_replica_loses_its_conversation_to_one_with_a_free_slot() -> None:
    replicas = Replicas("a", "b")
    talk = "k" * 50
    ((first,), (other,)) = await replicas.chosen(talk)
    replicas.send(first, 4)
    replicas.send(other, 3)
    assert (await replicas.chosen(talk))[0] == [other]
    replicas.send(other, 5)
    assert (await replicas.chosen("m" * 50))[0] == [first], "both are full"


@async_test
async def test_prompt_is_read_once_for_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamasup.fleet import request_router

    read: list[bytes] = []
    monkeypatch.setattr(request_router, "read_conversation", read.append)
    replicas = Replicas("a", "b")
    first, second = pending_request(b"{}"), pending_request(b"[]")
    for pending in (first, first, second):
        await replicas.router.choose_replicas(replicas.known, pending)
    assert read == [b"{}", b"[]"]


@async_test
async def test_call_without_a_prompt_goes_to_the_least_busy_replica() -> None:
    replicas = Replicas("a", "b")
    replicas.send("a", 1)
    assert await replicas.chosen("hello", method="wake") == [["b"], ["a"]]
    assert (await replicas.router.choose_replicas(replicas.known))[0][0].name == "b"
    alone = Replicas("a")
    assert await alone.chosen("hello") == [["a"]]


@async_test
async def test_conversation_stays_where_serve_could_send_it() -> None:
    replicas = Replicas("a", "b")
    talk = ("k" * 50,)
    ((first,), (other,)) = await replicas.chosen(*talk)
    replicas.router.on_request_routed(pending_request(body_of(*talk)), replicas.of(other).replica_id, None)
    replicas.send(first, 1)
    assert (await replicas.chosen(*talk, "An answer", "A question"))[0] == [other]


ASLEEP = {"slots": 4, "asleep": True, "ready": False}


@async_test
async def test_replica_that_is_awake_comes_before_one_that_sleeps() -> None:
    replicas = Replicas("a", "b", "c")
    for asleep in replicas.known[:2]:
        asleep.routing_stats = ASLEEP
    replicas.send("c", 3)
    assert (await replicas.chosen("hello"))[0] == ["c"]
    replicas.send("c", 5)
    ((woken,), *_) = await replicas.chosen("good day")
    assert woken != "c", "it has no free slot"
    assert (await replicas.chosen("good evening"))[0] == [woken], "it wakes already"
    assert (await replicas.chosen("good night"))[0] == [woken], "also before its report"
    replicas.send("c", 3)
    assert (await replicas.chosen("good morning"))[0] == ["c"], "the other one still loads"
    replicas.send("c", 5)
    replicas.send(woken, 4)
    assert (await replicas.chosen("goodbye"))[0] not in (["c"], [woken]), "both have no free slot"


def all_asleep(*names: str) -> Replicas:
    replicas = Replicas(*names)
    for replica in replicas.known:
        replica.routing_stats = ASLEEP
    replicas.router.update_replicas(replicas.known)
    return replicas


async def next_four(replicas: Replicas) -> list[str]:
    """Where new conversations go."""
    return [(await replicas.chosen(word * 50))[0][0] for word in "wxyz"]


@async_test
async def test_replica_that_serve_could_not_reach_sleeps_on() -> None:
    replicas = all_asleep("a", "b")
    pending = pending_request(body_of("hello"))
    _, (other,) = await replicas.router.choose_replicas(replicas.known, pending)
    replicas.router.on_request_routed(pending, other.replica_id, None)
    assert await next_four(replicas) == [other.name] * 4


@async_test
async def test_second_attempt_forgets_the_choice_of_the_first() -> None:
    replicas = all_asleep("a", "b")
    pending = pending_request(body_of("hello"))
    (chosen,), (other,) = await replicas.router.choose_replicas(replicas.known, pending)
    replicas.send(chosen.name, 4)
    assert (await replicas.router.choose_replicas(replicas.known, pending))[0] == [other]
    replicas.router.on_request_routed(pending, other.replica_id, None)
    replicas.send(chosen.name, 0)
    assert await next_four(replicas) == [other.name] * 4


@async_test
async def test_two_requests_that_serve_sends_elsewhere_wake_one_replica() -> None:
    replicas = all_asleep("a", "b")
    first, second = pending_request(body_of("hello")), pending_request(body_of("good day"))
    (chosen,), (other,) = await replicas.router.choose_replicas(replicas.known, first)
    assert (await replicas.router.choose_replicas(replicas.known, second))[0] == [chosen]
    for pending in (first, second):
        replicas.router.on_request_routed(pending, other.replica_id, None)
    assert await next_four(replicas) == [other.name] * 4


@async_test
async def test_request_that_reached_a_replica_counts_after_one_that_did_not() -> None:
    replicas = all_asleep("a", "b", "c")
    first, second = pending_request(body_of("hello")), pending_request(body_of("good day"))
    (chosen,), *_ = await replicas.router.choose_replicas(replicas.known, first)
    replicas.router.on_request_routed(first, chosen.replica_id, None)
    (again,), (other,), _ = await replicas.router.choose_replicas(replicas.known, second)
    assert again == chosen
    replicas.router.on_request_routed(second, other.replica_id, None)
    replicas.send(other.name, 4)
    assert await next_four(replicas) == [chosen.name] * 4


@async_test
async def test_report_of_sleep_that_is_older_than_a_request_wakes_no_other_replica() -> None:
    replicas = Replicas("a", "b")
    ((first,), (other,)) = await replicas.chosen("hello")  # as if both were awake
    for replica in replicas.known:
        replica.routing_stats = ASLEEP
    replicas.router.update_replicas(replicas.known)
    assert await next_four(replicas) == [first] * 4
    replicas.send(first, 4)
    assert (await replicas.chosen("goodbye"))[0] == [other]


@async_test
async def test_replica_that_serve_lists_again_has_got_no_request() -> None:
    replicas = all_asleep("a", "b")
    ((first,), (other,)) = await replicas.chosen("hello")
    replicas.router.update_replicas([replicas.of(other)])
    replicas.router.update_replicas(replicas.known)
    replicas.send(other, 1)
    assert await next_four(replicas) == [other] * 4, f"{first} sleeps"


@async_test
async def test_replica_that_sleeps_has_lost_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamasup.fleet import request_router

    replicas = Replicas("a", "b")
    talk = ("k" * 50,)
    ((first,), (other,)) = await replicas.chosen(*talk)
    replicas.of(first).routing_stats = ASLEEP
    replicas.router.update_replicas(replicas.known)
    replicas.send(other, 2)
    assert (await replicas.chosen(*talk, "An answer", "A question"))[0] == [other]
    replicas.send(other, 4)
    ((woken,), _) = await replicas.chosen("m" * 50)
    assert woken == first
    replicas.router.update_replicas(replicas.known)
    replicas.send(other, 3)
    assert (await replicas.chosen("m" * 50, "An answer", "A question"))[0] == [first], "a late report"
    later_s = time.monotonic() + 60
    monkeypatch.setattr(request_router, "time", SimpleNamespace(monotonic=lambda: later_s))
    replicas.router.update_replicas(replicas.known)
    assert (await replicas.chosen("m" * 50, "An answer", "A question"))[0] == [other], "it slept again"


@async_test
async def test_second_attempt_prefers_the_least_busy_and_avoids_one_that_has_ended() -> None:
    replicas = Replicas("a", "b", "c", "d")
    ((first,), *_) = await replicas.chosen("hello")
    ended, asleep, awake = (replica for replica in replicas.known if replica.name != first)
    ended.routing_stats = {"slots": 4, "ended": True}
    asleep.routing_stats = ASLEEP
    replicas.send(awake.name, 2)
    assert await replicas.chosen("hello") == [[first], [awake.name], [asleep.name]]


@async_test
async def test_replica_that_serve_no_longer_lists_is_forgotten() -> None:
    replicas = Replicas("a", "b")
    ((first,), (other,)) = await replicas.chosen("k" * 50)
    replicas.router.update_replicas([replicas.of(other)])
    replicas.router.update_replicas(replicas.known)  # a new one with the same name, for example
    replicas.send(first, 1)
    assert (await replicas.chosen("k" * 50))[0] == [other]
