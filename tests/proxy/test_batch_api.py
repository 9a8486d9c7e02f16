"""The paths of the API for batches: who answers them, who may send how much, and whose they are."""

from __future__ import annotations

import json

import pytest

from llamasup.proxy import Limits, ProxyConfig
from tests.proxy.conftest import MakeRig
from tests.proxy.key_files import keys_of
from tests.proxy.rig import Rig, answer, field, get, post, status

KEYS = "anna\nadmin rights=control"
FILE = b"/v1/files"
MIB = 1 << 20


def with_api(upload_bytes: int = 4 * MIB, keys: str | None = None) -> ProxyConfig:
    return ProxyConfig(
        upload_bytes=upload_bytes,
        key_file=None if keys is None else keys_of(keys),
        limits=Limits(body_bytes=MIB),
    )


def cause(message: tuple[bytes, bytes]) -> tuple[int, str]:
    head, body = message
    return status(head), json.loads(body)["error"]["cause"]


@pytest.mark.parametrize("path", [FILE, b"/v1/files/file-1/content", b"/v1/batches", b"/v1/batches/b/cancel"])
def test_control_application_answers_the_paths_of_batches(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(with_api(), control=True)
    client = rig.send(get(path))
    control = rig.accept_control()
    assert control.head().startswith(b"GET " + path)
    control.send(answer(b"{}"))
    assert status(client.message()[0]) == 200


def test_without_the_api_llama_server_answers_them(rig: Rig) -> None:
    client = rig.send(get(FILE))
    child = rig.accept()
    child.head()
    child.send(answer(b"its own"))
    assert client.message()[1] == b"its own"


def test_request_names_its_client_and_no_client_can_name_another(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(keys="anna name=anna-is@home"), control=True)
    rig.send(get(FILE, b"Authorization: Bearer anna", b"X-Llamasup-Client: key:ben"))
    head = rig.accept_control().head()
    assert field(head, b"x-llamasup-client") == b"key%3Aanna-is%40home"
    assert b"ben" not in head


def test_client_without_a_key_has_no_name(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(), control=True)
    rig.send(get(FILE, b"X-Llamasup-Client: key:ben"))
    assert b"lamasup-Client" not in rig.accept_control().head()


def test_files_need_a_key_that_may_infer(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(keys=KEYS), control=True)
    assert cause(rig.ask(get(FILE))) == (401, "api_key")
    assert cause(rig.ask(get(FILE, b"Authorization: Bearer admin"))) == (403, "key_rights")


def test_upload_may_be_larger_than_other_bodies_and_is_forwarded_while_it_arrives(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(), control=True)
    body = bytes(range(256)) * (2 * MIB // 256)
    head = get(FILE, b"Content-Length: %d" % len(body), method=b"POST")
    client = rig.send(head, body[:MIB])
    control = rig.accept_control()
    control.head()
    assert control.receive(MIB) == body[:MIB]
    client.send(body[MIB:])
    assert control.receive(MIB) == body[MIB:]
    control.send(answer(b"{}"))
    assert status(client.message()[0]) == 200


def test_upload_above_its_limit_is_refused_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(), control=True)
    head = get(FILE, b"Content-Length: %d" % (4 * MIB + 1), method=b"POST")
    assert cause(rig.send(head).message()) == (413, "body_limit")


def test_small_body_is_not_searched_for_a_model(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(), control=True)
    rig.send(post(b"/v1/batches", b"[" * 2000))
    assert rig.accept_control().message()[1] == b"[" * 2000
    assert rig.backend.requested_models == []
