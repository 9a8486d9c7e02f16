"""API keys: names, rights, limits, and revocation (X4)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.auth.key_source import KeyFile
from llamasup.core.http.chunks import Dechunker
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.answers import ContextWindow
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.request import Request
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import await_queued, end_generation, make_unavailable
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import (
    CHAT,
    STREAM_HEAD,
    Rig,
    Wire,
    answer,
    chunk,
    error_of,
    eventually,
    field,
    get,
    post,
    status,
)

BODY = b'{"messages":[]}'


def bearer(key: bytes) -> bytes:
    return b"Authorization: Bearer " + key


def chat(key: bytes) -> bytes:
    return post(CHAT, BODY, bearer(key))


class Child:
    """The child, which answers all requests on one connection."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._wire: Wire | None = None

    def answers(self, body: bytes = b"{}") -> None:
        self._wire = self._wire or self._rig.accept()
        self._wire.message()
        self._wire.send(answer(body))


def usage(prompt: int, cached: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}}).encode()


def serve_request(client: Wire, child: Child, request: bytes, body: bytes = b"{}") -> None:
    client.send(request)
    child.answers(body)
    assert status(client.message()[0]) == 200


# --- rights

NODES = ProxyConfig(
    key_file=keys_of("infer\nnode rights=inference,node\ncontrol rights=control"), api_keys=("given",)
)


@pytest.mark.check("X4", "403")
@pytest.mark.parametrize("key", [b"infer", b"given", b"control"])
@pytest.mark.parametrize("request_of", [get, post], ids=["list", "chat"])
def test_header_of_a_node_needs_the_key_of_a_node(make_rig: MakeRig, key: bytes, request_of: object) -> None:
    rig = make_rig(NODES)
    mark = b"X-Llamasup-Node: other"
    request = (
        get(b"/v1/models", bearer(key), mark) if request_of is get else post(CHAT, BODY, bearer(key), mark)
    )
    assert error_of(rig.send(request), 403)["cause"] == "key_rights"
    assert rig.backend.requested_models == []


def test_key_of_a_node_marks_its_requests(make_rig: MakeRig) -> None:
    rig = make_rig(NODES)
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, post(CHAT, BODY, bearer(b"node"), b"X-Llamasup-Node: other"))
    serve_request(client, child, chat(b"node"))  # as every inference key


RIGHTS = ProxyConfig(
    key_file=keys_of("infer\ncontrol name=root rights=control\nboth rights=inference,control"),
    api_keys=("given",),
)


@pytest.mark.check("X4", "401 or 403")
@pytest.mark.parametrize(
    "header", [b"Authorization: Bearer ", b"x-api-key: ", b"X-Api-Key:", b"authorization: bearer "]
)
@pytest.mark.parametrize("path", [b"/llamasup/v1/status", b"http://localhost/llamasup/v1/status"])
def test_only_a_key_with_the_right_control_can_use_the_control_api(
    make_rig: MakeRig, header: bytes, path: bytes
) -> None:
    rig = make_rig(RIGHTS, control=True)
    client = rig.connect()
    for key in (b"infer", b"given"):
        client.send(get(path, header + key))
        assert error_of(client, 403)["cause"] == "key_rights"
    client.send(get(path, header + b"wrong"))
    assert error_of(client, 401)["cause"] == "api_key"
    client.send(get(path))
    assert error_of(client, 401)["cause"] == "api_key"
    client.send(get(path, header + b"control"))
    control = rig.accept_control()
    control.head()
    control.send(answer())
    assert status(client.message()[0]) == 200
    client.send(get(path, header + b"both"))
    control.head()
    control.send(answer())
    assert status(client.message()[0]) == 200
    assert rig.backend.requested_models == []


@pytest.mark.check("X4", "403")
@pytest.mark.parametrize(
    "path",
    [
        b"//llamasup/v1/shutdown",
        b"/%6Clamasup/v1/shutdown",
        b"/llamasup%2fv1/shutdown",
        b"/LLAMASUP/v1/shutdown",
        b"/llamasup",
        b"/x/../llamasup/v1/shutdown",
        b"/x/%2e%2e/llamasup/v1/shutdown",
        b"/.//llamasup/v1/shutdown",
        b"http://localhost//llamasup/v1/shutdown",
        b"HTTP://LOCALHOST/%6clamasup/v1",
    ],
)
def test_no_key_opens_an_unusual_spelling_of_the_control_api(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(RIGHTS, control=True)
    client = rig.connect()
    for key, cause in ((b"infer", "closed_path"), (b"control", "key_rights"), (b"both", "closed_path")):
        client.send(get(path, bearer(key), method=b"POST"))
        assert error_of(client, 403)["cause"] == cause
    client.send(get(path, method=b"POST"))
    assert error_of(client, 401)["cause"] == "api_key"
    assert rig.backend.requested_models == []


@pytest.mark.parametrize("path", [CHAT, b"/props", b"/", b"/slots", b"/anything"])
def test_key_with_only_control_cannot_infer(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(RIGHTS)
    client = rig.send(get(path, bearer(b"control")))
    error = error_of(client, 403)
    assert error["cause"] == "key_rights"
    assert error["message"] == "the key 'root' has only the right `control`"
    assert rig.backend.requested_models == []


PROPS = b'{"total_slots":4,"model_path":"/srv/models/tiny.gguf","chat_template":"{{ x }}"}'
PROPS_FOR_ALL = b'{"total_slots":4,"model_path":"tiny.gguf"            ,"chat_template":"{{ x }}"}'


@pytest.mark.check("X4")
@pytest.mark.parametrize("path", [b"/props", b"/props?model=tiny", b"/lora-adapters"])
@pytest.mark.parametrize("how", ["one read", "in pieces", "chunked", "chunked, HTTP/1.0"])
def test_only_keys_with_control_see_file_paths(make_rig: MakeRig, path: bytes, how: str) -> None:
    rig = make_rig(RIGHTS)
    for key, body in ((b"infer", PROPS_FOR_ALL), (b"given", PROPS_FOR_ALL), (b"both", PROPS)):
        client = rig.connect()
        request = get(path, bearer(key), b"Range: bytes=20-50", b"Accept-Encoding: gzip")
        client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0") if how.endswith("1.0") else request)
        child = rig.accept()
        child_head = child.head().lower()
        assert (b"range" in child_head, b"accept-encoding" in child_head) == (body == PROPS, body == PROPS)
        if how.startswith("chunked"):
            child.send(CHUNKED_HEAD, *(chunk(PROPS[at : at + 9]) for at in range(0, len(PROPS), 9)))
            child.send(b"0\r\n\r\n")
            child.close()
        elif how == "in pieces":
            whole = answer(PROPS, b"Connection: close")
            child.send(*(whole[at : at + 1] for at in range(len(whole))))
        else:
            child.send(answer(PROPS, b"Connection: close"))
        head = client.head()
        if how == "chunked":
            assert unchunked(client.until(b"\r\n0\r\n\r\n")) == body
        elif how == "chunked, HTTP/1.0":
            assert client.rest() == body
        else:
            assert client.receive(int(field(head, b"content-length") or b"0")) == body
        client.close()


def test_without_keys_file_paths_are_forwarded(rig: Rig) -> None:
    client, child = rig.begin(get(b"/props"))
    child.send(answer(PROPS))
    assert client.message()[1] == PROPS


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def unchunked(body: bytes) -> bytes:
    found: list[bytes] = []
    Dechunker(found.append).write(body)
    return b"".join(found)


def test_metrics_need_any_key(make_rig: MakeRig) -> None:
    rig = make_rig(RIGHTS, control=True)
    client = rig.send(get(b"/metrics"))
    error_of(client, 401)
    control = None
    for key in (b"infer", b"control", b"both", b"given"):
        client.send(get(b"/metrics", bearer(key)))
        control = control or rig.accept_control()
        control.head()
        control.send(answer())
        assert status(client.message()[0]) == 200


def test_with_only_a_control_key_the_model_is_closed(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("k rights=control")))
    client = rig.send(get(b"/props"))
    error_of(client, 401)
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200


def test_hashed_key_is_accepted_and_its_hash_is_not(make_rig: MakeRig) -> None:
    line = f"sha256:abcdefgh:{hashlib.sha256(b'abcdefghone').hexdigest()}"
    rig = make_rig(ProxyConfig(key_file=keys_of(line)))
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"one"))
    client.send(chat(line.encode()))
    error_of(client, 401)


def test_keys_with_spaces_and_non_ascii_letters_are_accepted(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("with space\nclé")))
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"with space"))
    serve_request(client, child, chat("clé".encode()))
    client.send(chat(b"with"))
    error_of(client, 401)


def test_client_of_a_request_is_the_name_of_its_key(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(RIGHTS)
    clients: list[str] = []
    record_request = rig.proxy.record_request

    def record(request: Request, record: RequestRecord) -> None:
        clients.append(request.client)
        record_request(request, record)

    monkeypatch.setattr(rig.proxy, "record_request", record)
    client, child = rig.connect(), Child(rig)
    for _ in range(2):  # the second time with a known head
        serve_request(client, child, chat(b"both"))
    serve_request(client, child, chat(b"given"))
    client.send(get(b"/livez"))
    client.message()
    client.send(get(b"/livez"))
    client.message()
    assert clients[:3] == ["key:key-2", "key:key-2", "key:given-1"]
    assert clients[3] == "127.0.0.1"


# --- changes of the key file


def replace_file(path: Path, text: str) -> None:
    """Replace the file atomically: the sweeps of these tests would read a partly written file."""
    new = path.with_name("new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


def config_with_file(path: Path, text: str) -> ProxyConfig:
    replace_file(path, text)
    return ProxyConfig(key_file=KeyFile(path), limits=Limits(sweep_s=0.01))


def await_epoch(rig: Rig, epoch: int) -> None:
    """Wait until the proxy uses the changed keys."""
    while rig.call(lambda: rig.proxy.keys.epoch) < epoch:
        pass


@pytest.mark.check("X4", "401 for the next request")
def test_revoked_key_stops_working_on_an_open_connection(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(config_with_file(path, "one name=a\ntwo name=b\n"))
    old, other, child = rig.connect(), rig.connect(), Child(rig)
    for request in (chat(b"one"), get(b"/props", bearer(b"one"))):
        for _ in range(3):  # until the head is known
            serve_request(old, child, request)
    serve_request(other, child, chat(b"two"))
    replace_file(path, "two name=b\nthree name=c\n")
    await_epoch(rig, 2)
    old.send(get(b"/props", bearer(b"one")))
    refused = error_of(old, 401)
    assert (refused["cause"], "perhaps it was revoked" in str(refused["remedy"])) == ("api_key", True)
    old.send(chat(b"one"))
    assert error_of(old, 401)["cause"] == "api_key"
    serve_request(other, child, chat(b"two"))
    serve_request(old, child, chat(b"three"))


def test_request_in_flight_completes_after_its_key_is_revoked(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(config_with_file(path, "one name=a concurrent=1\ntwo\n"))
    client, child = rig.begin(chat(b"one"))
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    client.until(b"data: 1\n\n")
    replace_file(path, "two\n")
    await_epoch(rig, 2)
    child.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert client.until(b"\r\n0\r\n\r\n").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    client.send(chat(b"one"))
    error_of(client, 401)


def test_first_connection_after_idle_time_finds_the_new_keys(make_rig: MakeRig, tmp_path: Path) -> None:
    """No timer runs without a connection, so a new connection checks the file."""
    path = tmp_path / "keys"
    config = config_with_file(path, "one\n")
    rig = make_rig(ProxyConfig(key_file=config.key_file, limits=Limits(sweep_s=3600)))
    replace_file(path, "other\n")
    client = rig.send(get(b"/props", bearer(b"one")))
    error_of(client, 401)
    serve_request(client, Child(rig), get(b"/props", bearer(b"other")))


@pytest.mark.parametrize(
    "broken", ["one rpm=fast\n", "one\nsha256:half", None], ids=["bad", "half written", "gone"]
)
def test_invalid_key_file_changes_no_access(
    make_rig: MakeRig, tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    rig = make_rig(config_with_file(path, "one\n"))
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"one"))
    if broken is None:
        path.unlink()
    else:
        replace_file(path, broken)
    rig.call(rig.proxy.keys.look)
    for _ in range(5):
        rig.call(rig.proxy.keys.look)
    serve_request(client, child, chat(b"one"))
    client.send(get(b"/props"))
    error_of(client, 401)
    warnings = [record.getMessage() for record in caplog.records if record.name == "llamasup.keys"]
    assert len(warnings) == 1
    assert "Keeping the previous keys" in warnings[0]
    replace_file(path, "two\n")
    await_epoch(rig, 2)
    client.send(chat(b"one"))
    error_of(client, 401)
    serve_request(client, child, chat(b"two"))


@pytest.mark.check("X4", "401 for every key")
@pytest.mark.parametrize("emptied", ["", "# all revoked\n"], ids=["empty", "comment"])
def test_key_file_without_keys_gives_no_access(
    make_rig: MakeRig, tmp_path: Path, emptied: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    rig = make_rig(config_with_file(path, "one rights=inference,control\n"), control=True)
    client, child = rig.connect(), Child(rig)
    for _ in range(3):  # until the head is known
        serve_request(client, child, chat(b"one"))
    replace_file(path, emptied)
    await_epoch(rig, 2)
    for request in (chat(b"one"), chat(b""), post(CHAT, BODY), get(b"/metrics"), get(b"/v1/models")):
        client.send(request)
        assert error_of(client, 401)["cause"] == "api_key"
    client.send(get(b"/llamasup/v1/status", bearer(b"one")))
    assert error_of(client, 403)["cause"] == "control_closed"
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "llamasup.keys")
    assert "every key from it is revoked" in warning
    replace_file(path, "two\n")
    await_epoch(rig, 3)
    serve_request(client, child, chat(b"two"))
    client.send(chat(b"one"))
    error_of(client, 401)


def test_key_from_option_stays_valid_when_key_file_is_emptied(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(replace(config_with_file(path, "one\n"), api_keys=("given",)))
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"one"))
    replace_file(path, "")
    await_epoch(rig, 2)
    serve_request(client, child, chat(b"given"))
    client.send(chat(b"one"))
    error_of(client, 401)


def test_replaced_key_file_is_noticed(make_rig: MakeRig, tmp_path: Path) -> None:
    """Same size, same time: only the inode differs."""
    path, new = tmp_path / "keys", tmp_path / "new"
    rig = make_rig(config_with_file(path, "one\n"))
    new.write_text("two\n")
    stamp = path.stat().st_mtime_ns
    os.utime(new, ns=(stamp, stamp))
    new.replace(path)
    client = rig.connect()
    await_epoch(rig, 2)
    serve_request(client, Child(rig), chat(b"two"))


# --- limits


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limited(make_rig: MakeRig, limits: str) -> tuple[Rig, ManualClock]:
    rig = make_rig(ProxyConfig(key_file=keys_of(f"one name=a {limits}\ntwo name=b")))
    rig.proxy.keys.clock = clock = ManualClock()
    return rig, clock


def over_limit(client: Wire, cause: str, retry_after: int) -> None:
    head, body = client.message()
    assert status(head) == 429, body
    assert field(head, b"retry-after") == str(retry_after).encode()
    error = json.loads(body)["error"]
    assert error["cause"] == cause
    assert error["type"] == "rate_limit_error"


class Broken(Exception):
    """An internal error."""


def fail(*_: object, **__: object) -> None:
    raise Broken


@pytest.mark.check("X8")
@pytest.mark.parametrize("failing", ["lease", "queue", "pool_of", "_on_wanted"])
def test_internal_error_releases_the_quota_of_the_key(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    if failing in {"queue", "_on_wanted"}:
        rig.backend.unavailable = HttpError(503, "Loading model", queueable=True)
    owners = {"pool_of": rig.proxy, "_on_wanted": rig.backend.waiting}
    client = rig.connect()
    with monkeypatch.context() as broken:
        if failing == "queue":
            broken.setattr(type(rig.backend), failing, property(fail))
        else:
            broken.setattr(owners.get(failing, rig.backend), failing, fail)
        client.send(chat(b"one"))
        if failing in owners:  # now an exchange has begun, or the request waits
            with pytest.raises(ConnectionResetError):
                client.rest()
        else:
            error = error_of(client, 500)
            assert (error["type"], error["remedy"]) == ("server_error", "See llamasup's log.")
            assert client.sees_the_end()
        rig.record()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [Broken]
    assert rig.in_flight() == 0
    assert rig.call(lambda: len(rig.backend.waiting)) == 0
    rig.backend.unavailable = None
    serve_request(rig.connect(), Child(rig), chat(b"one"))


@pytest.mark.check("X8", "429 for a second body with `concurrent=1`")
def test_large_body_counts_from_its_first_piece_while_no_server_is_ready(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    rig.backend.unavailable = HttpError(503, "Loading model", queueable=True)
    piece = get(CHAT, b"Content-Length: 1000000", bearer(b"one"), method=b"POST") + b"x" * 100_000
    rig.connect().send(piece)
    eventually(lambda: rig.call(lambda: rig.proxy.bodies.held_bytes) > 0)
    client = rig.send(piece)
    over_limit(client, "key_concurrent", 1)


@pytest.mark.check("X8")
@pytest.mark.parametrize("waits", [True, False])
def test_request_that_gets_no_server_does_not_count(make_rig: MakeRig, *, waits: bool) -> None:
    rig, _ = limited(make_rig, "rpm=1")
    for _ in range(3):
        rig.backend.unavailable = HttpError(503, "The model is broken", queueable=waits)
        client = rig.send(chat(b"one"))
        if waits:
            await_queued(rig, 1)
            rig.backend.unavailable = HttpError(503, "The model is broken")
            rig.call(rig.backend.waiting.changed)
        error_of(client, 503)
        assert rig.record().outcome == "unavailable"
    rig.backend.unavailable = None
    serve_request(rig.connect(), Child(rig), chat(b"one"))
    client = rig.send(chat(b"one"))
    over_limit(client, "key_requests", 60)


def test_request_of_a_batch_that_waits_does_not_count(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "rpm=1")
    rig.send(chat(b"two"))
    rig.accept().message()
    waiting = post(CHAT, BODY, bearer(b"one"), b"X-Llamasup-Priority: batch")
    for _ in range(3):
        error_of(rig.send(waiting), 503)
        assert rig.record().outcome == "gave_way"
    serve_request(rig.connect(), Child(rig), chat(b"one"))


def test_request_sent_before_a_crash_counts(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "rpm=1")
    client = rig.send(chat(b"one"))
    rig.accept().message()
    end_generation(rig)
    make_unavailable(rig, HttpError(503, "The model is broken"))
    error_of(client, 503)
    assert rig.record().outcome == "unavailable"
    client = rig.send(chat(b"one"))
    over_limit(client, "key_requests", 60)


def test_requests_per_minute(make_rig: MakeRig) -> None:
    rig, clock = limited(make_rig, "rpm=2")
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"one"))
    serve_request(client, child, chat(b"one"))
    client.send(chat(b"one"))
    over_limit(client, "key_requests", 30)
    serve_request(client, child, chat(b"two"))  # each key has its own limit
    serve_request(client, child, get(b"/props", bearer(b"one")))  # only inference counts
    clock.now += 29
    client.send(post(CHAT, BODY, b"x-api-key: one"))  # the same key in the other header
    over_limit(client, "key_requests", 1)
    clock.now += 1
    serve_request(client, child, chat(b"one"))


@pytest.mark.check("X8")
@pytest.mark.parametrize("limit", ["rpm=1", "concurrent=1"])
def test_post_to_an_unknown_path_counts_as_inference(make_rig: MakeRig, limit: str) -> None:
    rig, _ = limited(make_rig, limit)
    first, second = rig.connect(), rig.connect()
    unknown = post(b"/v1/newer", BODY, bearer(b"one"))
    first.send(unknown)
    child = rig.accept()
    child.message()
    assert rig.call(lambda: rig.backend.endpoint.busy) == 1
    for request in (unknown, chat(b"one")):
        second.send(request)
        assert str(error_of(second, 429)["cause"]).startswith("key_")
    child.send(answer())
    first.message()
    assert "other" in [rig.record().route for _ in range(3)]
    second.send(get(b"/index.html", bearer(b"one")))  # a page of the web interface
    child.message()
    child.send(answer())
    assert status(second.message()[0]) == 200


def test_concurrent_limit_of_a_key(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    first, second = rig.connect(), rig.connect()
    first.send(chat(b"one"))
    child = rig.accept()
    child.message()
    second.send(chat(b"one"))
    over_limit(second, "key_concurrent", 1)
    child.send(answer())
    first.message()
    second.send(chat(b"one"))
    child.message()
    child.send(answer())
    assert status(second.message()[0]) == 200


@pytest.mark.usefixtures("no_cause")
def test_quota_is_released_however_the_request_ends(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    leaver, child = rig.begin(chat(b"one"))
    leaver.close()
    assert rig.record().outcome == "client_gone"
    child.close()  # llama-server has freed the slot
    eventually(lambda: not rig.call(lambda: rig.endpoint.at_work))
    client, child = rig.begin(chat(b"one"))
    child.send(b"no HTTP at all\r\n\r\n")
    assert status(client.message()[0]) == 502
    client.send(chat(b"one"))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    client.until(b"data: 1\n\n")
    child.close()
    client.rest()
    client = rig.connect()
    serve_request(client, Child(rig), chat(b"one"))


def test_tokens_per_minute_count_when_an_answer_ends(make_rig: MakeRig) -> None:
    rig, clock = limited(make_rig, "tpm=600")
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"one"), usage(1000, 600, 209))  # 609: cached tokens are free
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 1)
    clock.now += 1
    serve_request(client, child, chat(b"one"), usage(10, 0, 20))
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 3)


def test_tokens_of_a_stream_count_too(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    client, child = rig.begin(chat(b"one"))
    child.send(
        STREAM_HEAD,
        chunk(b'data: {"choices":[]}\n\n'),
        chunk(b"data: " + usage(50, 0, 70) + b"\n\n"),
        chunk(b"data: [DONE]\n\n"),
        b"0\r\n\r\n",
    )
    client.until(b"\r\n0\r\n\r\n")
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 61)


def test_client_that_leaves_a_stream_pays_for_received_tokens(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.backend.endpoint, "tokens_per_s", 0.001))
    client, child = rig.begin(chat(b"one"))
    event = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    child.send(STREAM_HEAD, event * 100)
    for _ in range(100):
        client.until(b"\n\n\r\n")
    client.close()
    assert rig.record().outcome == "client_gone"
    client = rig.send(chat(b"one"))
    over_limit(client, "key_tokens", 46)  # 100 events, and 5 tokens for a prompt of 15 bytes


@pytest.mark.check("X8", "by time, at most the context")
@pytest.mark.parametrize("begun", [True, False])
def test_stream_without_token_events_is_charged(make_rig: MakeRig, *, begun: bool) -> None:
    rig, clock = limited(make_rig, "tpm=60")
    endpoint = rig.backend.endpoint
    rig.call(lambda: setattr(endpoint, "tokens_per_s", 1e9))
    rig.call(lambda: setattr(endpoint, "window", ContextWindow(500, 500)))
    client, child = rig.begin(post(CHAT, b'{"stream":true}', bearer(b"one")))
    if begun:
        child.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
        client.until(b"data: {}\n\n")
    client.close()
    assert rig.record().outcome == "client_gone"
    rig.call(lambda: setattr(endpoint, "tokens_per_s", 10.0))
    clock.now += 2.0  # until llama-server frees the slot; two tokens flow in
    child.close()
    eventually(lambda: not rig.call(lambda: rig.endpoint.at_work))
    client = rig.send(chat(b"one"))
    over_limit(
        client, "key_tokens", 500 - 2 - 60 + 1
    )  # the 20 tokens of these seconds are beyond its context


TIMINGS = b'"timings":{"cache_n":1,"prompt_n":%d,"predicted_n":%d,"predicted_per_second":50.0}'


def item(index: int, evaluated: int, predicted: int, more: bytes = b"") -> bytes:
    return b'{"index":%d,"content":"x",%b%b}' % (index, TIMINGS % (evaluated, predicted), more)


PROBABILITIES = b',"completion_probabilities":[%b]' % b",".join(
    [b'{"id":1,"token":"x","logprob":-1.5}'] * 2000
)
ITEMS = [item(at, 20, 40) for at in range(5)]
EMBEDDINGS = b'{"usage":{"prompt_tokens":299,"total_tokens":299},"data":[%b]}' % b",".join([b"0.125"] * 9000)
COSTS = {
    "counts before probabilities": (b"/completion", answer(item(0, 100, 200, PROBABILITIES)), 300),
    "prompts": (b"/completion", answer(b"[" + b",".join(ITEMS) + b"]"), 300),
    "prompts, of which the first is long": (
        b"/completion",
        answer(b"[" + item(0, 100, 152) + b"," + item(1, 8, 40, PROBABILITIES) + b"]"),
        300,
    ),
    "prompts, as a stream": (
        b"/completion",
        STREAM_HEAD
        + b"".join(chunk(b"data: " + event + b"\n\n" + b": \n\n" * 9000) for event in ITEMS)
        + b"0\r\n\r\n",
        300,
    ),
    "n of one prompt": (
        CHAT,
        answer(b'{"choices":[{"index":0},{"index":1}],' + TIMINGS % (100, 100) + b"}"),
        300,
    ),
    "large embeddings": (b"/v1/embeddings", answer(EMBEDDINGS), 299),
    "embeddings without counts": (b"/embedding", answer(b'[{"index":0,"embedding":[[0.5]]}]'), 300),
}


@pytest.mark.check("X8")
@pytest.mark.parametrize(("path", "answered", "cost"), COSTS.values(), ids=COSTS)
def test_key_pays_for_all_tokens_that_an_answer_reports(
    make_rig: MakeRig, path: bytes, answered: bytes, cost: int
) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    client, child = rig.begin(post(path, b"x" * 900, bearer(b"one")))
    child.send(answered)
    assert status(client.head()) == 200
    assert rig.record().outcome == "ok"
    client = rig.send(chat(b"one"))
    over_limit(
        client, "key_tokens", cost - 60 + 1
    )  # 60 tokens were available, and the next request needs one


UNNUMBERED = {
    "timings": (answer(b"[%b]" % b",".join([b"{%b}" % (TIMINGS % (4, 80))] * 3)), 539),
    "completion tokens": (answer(b"[%b]" % b",".join([b'{"tokens_predicted":80}'] * 3)), 540),
    "timings of a stream": (
        STREAM_HEAD
        + b"".join(chunk(b"data: {}\n\n") for _ in range(237))
        + b"".join(chunk(b"data: {%b}\n\n" % (TIMINGS % (4, 80))) for _ in range(3))
        + b"0\r\n\r\n",
        539,  # one token of the prompt was in the cache
    ),
}


@pytest.mark.check("X8")
@pytest.mark.parametrize(("answered", "cost"), UNNUMBERED.values(), ids=UNNUMBERED)
def test_key_pays_for_items_without_an_index(make_rig: MakeRig, answered: bytes, cost: int) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.backend.endpoint, "tokens_per_s", 0.001))
    client = rig.connect()
    body = b'{"prompt":["a","b","%b"]}' % (b"c" * 879)
    client.send(post(b"/completion", body, bearer(b"one")))
    child = rig.accept()
    child.message()
    child.send(answered)
    assert status(client.head()) == 200
    assert rig.record().outcome == "ok"
    client = rig.send(chat(b"one"))
    over_limit(client, "key_tokens", cost - 60 + 1)


@pytest.mark.parametrize("what", ["counts before probabilities", "large embeddings"])
def test_metrics_report_tokens_without_a_limit(make_rig: MakeRig, what: str) -> None:
    path, answered, cost = COSTS[what]
    rig = make_rig()
    client, child = rig.begin(post(path, b"{}"))
    child.send(answered)
    client.message()
    record = rig.record()
    tokens = (record.tokens_prompt or 0) - (record.tokens_cached or 0) + (record.tokens_completion or 0)
    assert tokens == cost


def test_request_refused_by_llama_server_costs_no_tokens(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    client, child = rig.begin(post(CHAT, b"x" * 900, bearer(b"one")))
    child.send(answer(b"{}", code=b"400 Bad Request"))
    assert status(client.message()[0]) == 400
    serve_request(client, Child(rig), chat(b"one"))


@pytest.mark.check("X8", "by an estimate")
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_client_that_disconnects_before_the_answer_pays_for_the_prompt(
    make_rig: MakeRig, stream: bytes
) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.backend.endpoint, "tokens_per_s", 0.001))
    client = rig.send(post(CHAT, b'{"stream":%b,"x":"%b"}' % (stream, b"x" * 878), bearer(b"one")))
    rig.accept().message()
    client.close()
    assert rig.record().outcome == "client_gone"
    client = rig.send(chat(b"one"))
    over_limit(client, "key_tokens", 300 - 60 + 1)


def test_client_that_disconnects_during_body_or_in_queue_pays_nothing(make_rig: MakeRig) -> None:
    config = ProxyConfig(key_file=keys_of("one name=a tpm=60"), route_by_model=False)
    rig = make_rig(config, max_concurrent=1)
    client = rig.send(get(CHAT, b"Content-Length: 1000000", bearer(b"one"), method=b"POST"), b"x" * 200_000)
    child = rig.accept()
    child.head()
    client.close()
    assert rig.record().outcome == "client_gone"
    busy, waits = rig.connect(), rig.connect()
    busy.send(chat(b"one"))
    child = rig.accept()
    child.message()
    waits.send(post(CHAT, b"x" * 900, bearer(b"one")))
    await_queued(rig, 1)
    waits.close()
    assert rig.record().outcome == "client_gone"
    child.send(answer(usage(1, 0, 1)))
    busy.message()
    busy.send(chat(b"one"))
    child.message()


def test_usage_of_a_key_survives_a_change_of_the_file(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(config_with_file(path, "one name=a rpm=1\ntwo name=b rpm=1\n"))
    rig.proxy.keys.clock = ManualClock()
    client, child = rig.connect(), Child(rig)
    serve_request(client, child, chat(b"one"))
    serve_request(client, child, chat(b"two"))
    replace_file(path, "changed name=a rpm=1\ntwo name=c rpm=1\n")
    await_epoch(rig, 2)
    client.send(chat(b"changed"))  # the same name with another key
    over_limit(client, "key_requests", 60)
    serve_request(client, child, chat(b"two"))  # another name is another client
    replace_file(path, "changed name=a rpm=2\n")
    await_epoch(rig, 3)
    serve_request(client, child, chat(b"changed"))  # one more than before
    client.send(chat(b"changed"))
    over_limit(client, "key_requests", 30)
    replace_file(path, "changed name=a\n")
    await_epoch(rig, 4)
    serve_request(client, child, chat(b"changed"))


def test_key_revoked_while_body_arrives_completes_its_request(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(config_with_file(path, "one name=a rpm=1\ntwo name=b\n"))
    client, child = rig.connect(), Child(rig)
    expects = b"Expect: 100-continue"
    client.send(get(CHAT, bearer(b"one"), expects, b"Content-Length: 2", method=b"POST"))
    assert status(client.head()) == 100  # the request has access
    replace_file(path, "two name=b\n")
    await_epoch(rig, 2)
    client.send(b"{}")
    child.answers()
    assert status(client.message()[0]) == 200
    client.send(chat(b"one"))
    error_of(client, 401)


def test_large_body_over_key_limit_is_refused_before_it_is_complete(make_rig: MakeRig) -> None:
    config = ProxyConfig(key_file=keys_of("one rpm=1"), route_by_model=False)
    rig = make_rig(config)
    client = rig.connect()
    serve_request(client, Child(rig), chat(b"one"))
    client.send(get(CHAT, bearer(b"one"), b"Content-Length: 1000000", method=b"POST") + b"x" * 100_000)
    head, _ = client.message()
    assert status(head) == 429
    assert field(head, b"connection") == b"close"
    assert rig.in_flight() == 0


def test_forwarded_body_counts_once_for_its_key(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("one rpm=2 concurrent=1"), route_by_model=False))
    client = rig.connect()
    body = b"x" * 200_000
    child = None
    for _ in range(2):
        client.send(post(CHAT, body[:100_000], bearer(b"one")).replace(b": 100000", b": 200000"))
        child = child or rig.accept()
        child.until(b"\r\n\r\n")  # the upload has begun
        client.send(body[100_000:])
        child.receive(200_000)
        child.send(answer())
        assert status(client.message()[0]) == 200
    client.send(chat(b"one"))
    over_limit(client, "key_requests", 30)
