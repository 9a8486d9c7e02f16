"""Which replica Ray Serve chooses for a request that enters there. Needs Ray, but no cluster."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.async_tests import async_test

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


def pending_request(body: bytes, method: str = "forward") -> Any:
    from ray.serve.request_router import PendingRequest

    metadata: Any = SimpleNamespace(call_method=method)
    return PendingRequest([b"/v1/chat/completions", b"", body], {}, metadata, future=Future())


class Replicas:
    """A router, its replicas, and the requests that Serve has sent to each."""

    def __init__(self, *names: str) -> None:
        from llamasup.fleet.request_router import PromptRouter
        from llamasup.pool.replicas.affinity import Affinity

        self.sent: dict[str, int] = {}
        self.router: Any = PromptRouter.__new__(PromptRouter)
        self.router._affinity = Affinity()
        self.router._replica_queue_len_cache = self.sent
        self.known = [SimpleNamespace(replica_id=name, routing_stats={"slots": 4}) for name in names]

    async def chosen(self, *said: str, method: str = "forward") -> list[list[str]]:
        body = json.dumps({"messages": [{"role": "user", "content": words} for words in said]}).encode()
        pending = pending_request(body, method)
        ranks = await self.router.choose_replicas(self.known, pending)
        assert pending.routing_context.should_backoff
        return [[replica.replica_id for replica in rank] for rank in ranks]


@async_test
async def test_conversation_goes_to_the_replica_that_has_it_in_its_cache() -> None:
    replicas = Replicas("a", "b", "c", "d")
    first = [(await replicas.chosen(word * 50))[0] for word in "klmn"]
    assert sorted(first) == [["a"], ["b"], ["c"], ["d"]], "new conversations spread"
    for word, before in zip("klmn", first, strict=True):
        ranks = await replicas.chosen(word * 50, "An answer", "A question")
        assert ranks[0] == before
        assert len(ranks[1]) == 2
        assert before[0] not in ranks[1]


@async_test
async def test_busy_replica_loses_its_conversation_also_if_a_front_keeps_it_busy() -> None:
    replicas = Replicas("a", "b")
    talk = "k" * 50
    ((first,), (other,)) = await replicas.chosen(talk)
    replicas.sent[first] = 3
    assert (await replicas.chosen(talk))[0] == [other]
    replicas = Replicas("a", "b")
    ((first,), (other,)) = await replicas.chosen(talk)
    busy = next(replica for replica in replicas.known if replica.replica_id == first)
    busy.routing_stats = {"slots": 4, "busy": 3, "queued": 0}
    assert (await replicas.chosen(talk))[0] == [other], "a front has sent them"


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
    replicas.sent["a"] = 1
    assert await replicas.chosen("hello", method="wake") == [["b"], ["a"]]
    assert (await replicas.router.choose_replicas(replicas.known))[0][0].replica_id == "b"
    alone = Replicas("a")
    assert await alone.chosen("hello") == [["a"], []]
