"""The models of a fleet for clients that enter at Ray Serve."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.features.peers.nodes import ExpectedModel
from llamasup.fleet.ingress import IngressModels, no_node, replica_ended
from llamasup.fleet.messages import ListedModel, NodeLoad, routing_load, routing_stats

MODELS = IngressModels([ListedModel("tiny", ("gpt-tiny",)), ListedModel("other")], {"tiny"}.__contains__)
LIMITED = ApiKey("bob", b"", b"", models=("tiny",))
ANY = ApiKey("alice", b"", b"")


@pytest.mark.parametrize(
    ("name", "key", "found"),
    [
        ("tiny", None, "tiny"),
        ("gpt-tiny", ANY, "tiny"),
        ("OTHER:latest", ANY, "other"),
        ("GPT-Tiny", LIMITED, "tiny"),
        ("other", LIMITED, "key_models"),
        ("nope", LIMITED, "key_models"),
        ("nope", None, "model_not_found"),
        (None, None, "model_unnamed"),
        (None, LIMITED, "model_unnamed"),
    ],
)
def test_name_leads_to_a_model_or_to_a_refusal(name: str | None, key: ApiKey | None, found: str) -> None:
    resolved = MODELS.resolve(name, key)
    assert (resolved.cause if isinstance(resolved, HttpError) else resolved.id) == found


def test_key_learns_only_of_its_models() -> None:
    refusal = MODELS.resolve(None, LIMITED)
    assert isinstance(refusal, HttpError)
    assert refusal.remedy == 'set "model" to tiny'
    assert b"other" not in MODELS.all(LIMITED)
    assert b"other" in MODELS.all(None)
    assert b'"value":"unloaded"' in MODELS.one(ResolvedModel(("other",)))


def test_error_says_why_no_replica_serves() -> None:
    tiny = ResolvedModel(("tiny",))
    expected = [ExpectedModel("other", message="?"), ExpectedModel("tiny", message="It loads", eta_s=9)]
    why = no_node(tiny, expected)
    assert (why.status, why.message, why.eta_s, why.retry_after_s) == (503, "It loads", 9, 9)
    assert "No node serves the model yet" in no_node(tiny, []).message
    assert "'tiny'" in replica_ended(tiny).message


ASLEEP = routing_stats(NodeLoad(4, asleep=True, ready=False), ended=False)
LOADS = routing_stats(NodeLoad(4, ready=False), ended=False)


@pytest.mark.parametrize(
    ("stats", "sent", "load"),
    [
        ({}, 0, 0.0),
        ({}, 2, 2.0),
        ({"slots": 4, "busy": 1, "queued": 2, "waiting": 1.5}, 2, 1.25),
        ({"slots": 4, "busy": 1, "queued": 0}, 2, 0.75),
        ({"slots": 4, "busy": 3, "queued": 0, "by_serve": 2}, 2, 0.75),
        ({"slots": 4, "busy": 3, "queued": 0, "by_serve": 2}, 0, 0.25),
        ({"slots": 4, "busy": 1, "queued": 0, "by_serve": 2}, 1, 0.25),  # it has just begun
        ({"slots": 4, "busy": 3, "queued": 0, "by_serve": 2}, None, 0.75),
        (ASLEEP, 0, 0.875),
        (ASLEEP, None, 0.875),
        (ASLEEP, 1, 0.8125),  # it wakes
        (ASLEEP, 4, 1.0),
        (LOADS, 0, 0.8125),
        (LOADS, 5, 1.25),
        ({"slots": 0, "busy": 1, "queued": 0}, 0, 1.0),
        (routing_stats(NodeLoad(4, 1), ended=False), 0, 0.25),
        (routing_stats(NodeLoad(4, 1), ended=True), 0, math.inf),
    ],
)
def test_load_of_a_replica_counts_the_requests_of_fronts_too(
    stats: dict[str, Any], sent: int | None, load: float
) -> None:
    assert routing_load(stats, sent) == load


def test_free_slots_come_before_loads_and_loads_before_sleep() -> None:
    for slots in (1, 2, 4):
        replica = NodeLoad(slots)
        states = (
            replace(replica, busy=slots - 1),
            replace(replica, asleep=False, ready=False),
            replace(replica, asleep=True, ready=False),
            replace(replica, busy=slots),
        )
        loads = [routing_load(routing_stats(state, ended=False), None) for state in states]
        assert loads == sorted(set(loads))
        asleep = routing_stats(states[2], ended=False)
        assert routing_load(asleep, 0, woken=True) == loads[1]
