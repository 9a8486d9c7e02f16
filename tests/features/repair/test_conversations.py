"""Requests with malformed tool calls, to a model that repairs them (``repair/history.py``)."""

from __future__ import annotations

import json

import pytest

from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.settings import KIB
from llamasup.core.settings.model import Repairs
from llamasup.features.repair.history import MARK
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, Rig, answer, field, post
from tests.features.repair.conversations import conversation

BAD = json.dumps(conversation('{"city": "Par')).encode()
GOOD = json.dumps(conversation('{"city": "Paris"}')).encode()
MARKED = b"x-llamasup-repaired"


def set_repairs(rig: Rig) -> Rig:
    rig.call(lambda: setattr(rig.backend, "repairs", Repairs(tool_calls=True)))
    return rig


def exchange(rig: Rig, request: bytes, reply: bytes = b"") -> tuple[bytes, bytes]:
    """The body that llama-server gets, and the head that the client gets."""
    client = rig.send(request)
    child = rig.accept()
    _head, received = child.message()
    child.send(reply or answer(b"{}"))
    head, _body = client.message()
    client.close()
    child.close()
    return received, head


def sent_arguments(body: bytes) -> str:
    text: str = json.loads(body)["messages"][1]["tool_calls"][0]["function"]["arguments"]
    return text


def test_malformed_arguments_are_repaired_marked_and_counted(rig: Rig) -> None:
    received, head = exchange(set_repairs(rig), post(CHAT, BAD))
    assert json.loads(sent_arguments(received)) == {MARK: '{"city": "Par'}
    assert field(head, MARKED) == b"arguments"
    assert rig.proxy.metrics.repaired == {("tiny", "arguments"): 1}


def test_error_of_a_repaired_request_is_marked(rig: Rig) -> None:
    error = answer(b'{"error":{"code":400,"message":"no"}}', code=b"400 Bad Request")
    _received, head = exchange(set_repairs(rig), post(CHAT, BAD), error)
    assert field(head, MARKED) == b"arguments"


def test_answer_to_another_node_is_marked(rig: Rig) -> None:
    _received, head = exchange(set_repairs(rig), post(CHAT, BAD, b"X-Llamasup-Node: other"))
    assert field(head, MARKED) == b"arguments"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize", b"/v1/messages"])
def test_bodies_without_conversations_stay(rig: Rig, path: bytes) -> None:
    received, _head = exchange(set_repairs(rig), post(path, BAD))
    assert received == BAD


@pytest.mark.parametrize("path", [CHAT, b"/apply-template"])
def test_other_requests_stay_byte_for_byte(rig: Rig, path: bytes) -> None:
    received, head = exchange(set_repairs(rig), post(path, GOOD))
    assert received == GOOD
    assert field(head, MARKED) is None
    assert rig.proxy.metrics.repaired == {}


def test_nothing_is_repaired_by_default(rig: Rig) -> None:
    received, head = exchange(rig, post(CHAT, BAD))
    assert received == BAD
    assert field(head, MARKED) is None


def test_large_conversation_is_read_whole_before_it_is_sent(make_rig: MakeRig) -> None:
    rig = set_repairs(make_rig(ProxyConfig(route_by_model=False, holds_bodies=True)))
    large = conversation("{")
    large["messages"][0]["content"] = "x" * (200 * KIB)
    received, head = exchange(rig, post(CHAT, json.dumps(large).encode()))
    assert json.loads(sent_arguments(received)) == {MARK: "{"}
    assert field(head, MARKED) == b"arguments"
