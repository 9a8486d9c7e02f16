"""The paths of the API for batches: who answers them, who may send how much, and whose they are."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HeadRules
from llamasup.core.http.routes import route_of
from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import Clock, Rig, Wire, answer, eventually, field, get, post, status

KEYS = "anna\nadmin rights=control"
FILE = b"/v1/files"
MIB = 1 << 20


def with_api(keys: str | None = None, **limits: float) -> ProxyConfig:
    return ProxyConfig(
        rules=HeadRules(batches=True),
        key_file=None if keys is None else keys_of(keys),
        limits=Limits(body_bytes=MIB, file_bytes=4 * MIB, **limits),  # type: ignore[arg-type]
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


@pytest.mark.parametrize("path", [FILE, b"/v1/files/file-1/content", b"/v1/batches", b"/v1/batches/b/cancel"])
def test_without_the_api_they_are_paths_like_any_unknown_one(path: bytes) -> None:
    assert route_of(path) is route_of(b"/unknown")
    assert route_of(path, batches=True).of_batches
    assert not route_of(b"/unknown", batches=True).of_batches


def test_without_the_api_a_body_is_searched_for_its_model(rig: Rig) -> None:
    rig.send(post(FILE, b'{"model": "other"}'))
    rig.accept().message()
    assert rig.backend.requested_models == ["other"]


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


def upload_head(size: int, key: bytes | None = None) -> bytes:
    lines = [b"Content-Length: %d" % size, *([] if key is None else [b"Authorization: Bearer " + key])]
    return get(FILE, *lines, method=b"POST")


def begin_upload(rig: Rig, key: bytes | None = None) -> Wire:
    """The first half of a body has arrived."""
    client = rig.send(upload_head(2 * MIB, key), bytes(MIB))
    control = rig.accept_control()
    control.head()
    control.receive(MIB)
    return client


def test_uploads_have_places_of_their_own(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(file_uploads=1), control=True)
    begin_upload(rig)
    assert (rig.proxy.uploads, rig.proxy.file_uploads.total()) == (0, 1)
    refused = rig.send(upload_head(MIB), bytes(MIB // 2))
    assert cause(refused.message()) == (503, "uploads_limit")


@pytest.mark.check("X8", "429 client_uploads_limit")
def test_one_client_leaves_places_for_uploads_to_others(make_rig: MakeRig) -> None:
    rig = make_rig(with_api("anna\nben", file_uploads=3, file_uploads_per_client=2), control=True)
    uploads = [begin_upload(rig, b"anna"), begin_upload(rig, b"anna")]
    refused = rig.send(upload_head(MIB, b"anna"), bytes(MIB // 2))
    assert cause(refused.message()) == (429, "client_uploads_limit")
    begin_upload(rig, b"ben")
    uploads[0].close()
    eventually(lambda: rig.proxy.file_uploads.total() == 2)
    begin_upload(rig, b"anna")


@pytest.mark.check("X8", "`concurrent` and `rpm`")
@pytest.mark.parametrize("size", [1000, 2 * MIB])
@pytest.mark.parametrize("limit", ["concurrent", "requests"])
def test_uploads_of_files_count_for_the_limits_of_their_key(make_rig: MakeRig, limit: str, size: int) -> None:
    rig = make_rig(with_api(f"one {limit.replace('requests', 'rpm')}=1"), control=True)
    begin_upload(rig, b"one")
    refused = rig.send(upload_head(size, b"one"), bytes(size // 2))
    assert cause(refused.message()) == (429, f"key_{limit}")
    rig.send(get(FILE, b"Authorization: Bearer one"))
    assert rig.accept_control().head().startswith(b"GET")


def test_upload_that_takes_too_long_is_ended(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(with_api(sweep_s=0.01, body_idle_s=1e9, file_upload_s=3600.0), control=True)
    client = begin_upload(rig)
    clock.pass_s(3600.0)
    assert cause(client.message()) == (504, "request_timeout")
    eventually(lambda: not rig.proxy.file_uploads)


def test_download_may_take_long(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(replace(with_api(sweep_s=0.01), request_timeout_s=60.0), control=True)
    client = rig.send(get(b"/v1/files/f/content"))
    control = rig.accept_control()
    control.head()
    slow = rig.send(get(b"/props"))  # of llama-server: its end shows that the sweep has come
    rig.accept().head()
    clock.pass_s(7200.0)
    assert cause(slow.message()) == (504, "request_timeout")
    control.send(answer(b"lines"))
    assert client.message()[1] == b"lines"


def test_upload_is_refused_while_nothing_takes_it(make_rig: MakeRig) -> None:
    rig = make_rig(with_api())  # the control application is away
    client = rig.send(get(FILE, b"Content-Length: %d" % (2 * MIB), method=b"POST"), bytes(MIB))
    assert status(client.message()[0]) == 404


def test_upload_above_its_limit_is_refused_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(), control=True)
    head = get(FILE, b"Content-Length: %d" % (4 * MIB + 1), method=b"POST")
    assert cause(rig.send(head).message()) == (413, "body_limit")


def test_small_body_is_not_searched_for_a_model(make_rig: MakeRig) -> None:
    rig = make_rig(with_api(), control=True)
    rig.send(post(b"/v1/batches", b'{"a":' * 2000))
    assert rig.accept_control().message()[1] == b'{"a":' * 2000
    assert rig.backend.requested_models == []
