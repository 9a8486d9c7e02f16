"""API keys as clients meet them: whose a key is, what it may do, how much of it, and until when (X4)."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llamasup.auth.key_source import KeyFile
from llamasup.http.chunks import Dechunker
from llamasup.http.context_end import ContextWindow
from llamasup.observability.metrics import RequestRecord
from llamasup.proxy import Limits, ProxyConfig
from llamasup.proxy.request import Request
from llamasup.queueing.endpoint import Unavailable
from tests.proxy.conftest import MakeRig
from tests.proxy.key_files import keys_of
from tests.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, eventually, field, get, post, status
from tests.proxy.test_waiting import becomes, ends

BODY = b'{"messages":[]}'


def bearer(key: bytes) -> bytes:
    return b"Authorization: Bearer " + key


def chat(key: bytes) -> bytes:
    return post(CHAT, BODY, bearer(key))


class Child:
    """The child's side of as many requests as come on one connection."""

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


def error_of(client: Wire, code: int) -> dict[str, object]:
    head, body = client.message()
    assert status(head) == code, body
    return dict(json.loads(body)["error"])


def served(client: Wire, child: Child, request: bytes, body: bytes = b"{}") -> None:
    client.send(request)
    child.answers(body)
    assert status(client.message()[0]) == 200


# --- rights


RIGHTS = ProxyConfig(
    key_file=keys_of("infer\ncontrol name=root rights=control\nboth rights=inference,control"),
    api_keys=("given",),
)


@pytest.mark.check("X4", "401 or 403 without the right")
@pytest.mark.parametrize(
    "header", [b"Authorization: Bearer ", b"x-api-key: ", b"X-Api-Key:", b"authorization: bearer "]
)
@pytest.mark.parametrize("path", [b"/llamasup/v1/status", b"http://localhost/llamasup/v1/status"])
def test_only_a_key_with_the_right_controls(make_rig: MakeRig, header: bytes, path: bytes) -> None:
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
    assert rig.backend.asked_for == []


@pytest.mark.check("X4", "403 for every key")
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
def test_an_odd_spelling_of_the_control_api_opens_to_nobody(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(RIGHTS, control=True)
    client = rig.connect()
    for key, cause in ((b"infer", "closed_path"), (b"control", "key_rights"), (b"both", "closed_path")):
        client.send(get(path, bearer(key), method=b"POST"))
        assert error_of(client, 403)["cause"] == cause
    client.send(get(path, method=b"POST"))
    assert error_of(client, 401)["cause"] == "api_key"
    assert rig.backend.asked_for == []


@pytest.mark.parametrize("path", [CHAT, b"/props", b"/", b"/slots", b"/anything"])
def test_a_key_for_control_alone_cannot_infer(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(RIGHTS)
    client = rig.connect()
    client.send(get(path, bearer(b"control")))
    error = error_of(client, 403)
    assert error["cause"] == "key_rights"
    assert error["message"] == "the key 'root' may control, not infer"
    assert rig.backend.asked_for == []


PROPS = b'{"total_slots":4,"model_path":"/srv/models/tiny.gguf","chat_template":"{{ x }}"}'
PROPS_FOR_ALL = b'{"total_slots":4,"model_path":"tiny.gguf"            ,"chat_template":"{{ x }}"}'


@pytest.mark.check("X4", "other keys see file names without folders")
@pytest.mark.parametrize("path", [b"/props", b"/props?model=tiny", b"/lora-adapters"])
@pytest.mark.parametrize("how", ["one read", "in pieces", "chunked", "chunked, HTTP/1.0"])
def test_only_keys_with_control_see_file_paths(make_rig: MakeRig, path: bytes, how: str) -> None:
    rig = make_rig(RIGHTS)
    for key, body in ((b"infer", PROPS_FOR_ALL), (b"given", PROPS_FOR_ALL), (b"both", PROPS)):
        client = rig.connect()
        request = get(path, bearer(key), b"Range: bytes=20-50", b"Accept-Encoding: gzip")
        client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0") if how.endswith("1.0") else request)
        child = rig.accept()
        asked = child.head().lower()
        assert (b"range" in asked, b"accept-encoding" in asked) == (body == PROPS, body == PROPS)
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


def test_without_keys_paths_are_passed_on(rig: Rig) -> None:
    client = rig.connect()
    client.send(get(b"/props"))
    child = rig.accept()
    child.head()
    child.send(answer(PROPS))
    assert client.message()[1] == PROPS


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def unchunked(body: bytes) -> bytes:
    found: list[bytes] = []
    Dechunker(found.append).write(body)
    return b"".join(found)


def test_any_key_reads_the_metrics_and_none_does_not(make_rig: MakeRig) -> None:
    rig = make_rig(RIGHTS, control=True)
    client = rig.connect()
    client.send(get(b"/metrics"))
    error_of(client, 401)
    control = None
    for key in (b"infer", b"control", b"both", b"given"):
        client.send(get(b"/metrics", bearer(key)))
        control = control or rig.accept_control()
        control.head()
        control.send(answer())
        assert status(client.message()[0]) == 200


def test_where_only_control_has_a_key_the_model_is_closed_too(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("k rights=control")))
    client = rig.connect()
    client.send(get(b"/props"))
    error_of(client, 401)
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200


def test_a_hashed_key_opens_and_its_hash_does_not(make_rig: MakeRig) -> None:
    line = f"sha256:abcdefgh:{hashlib.sha256(b'abcdefghone').hexdigest()}"
    rig = make_rig(ProxyConfig(key_file=keys_of(line)))
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"one"))
    client.send(chat(line.encode()))
    error_of(client, 401)


def test_keys_with_blanks_and_letters_beyond_ascii_open(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("with space\nclé")))
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"with space"))
    served(client, child, chat("clé".encode()))
    client.send(chat(b"with"))
    error_of(client, 401)


def test_a_request_is_known_by_its_keys_name(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(RIGHTS)
    clients: list[str] = []
    record_request = rig.proxy.record_request

    def told(request: Request, record: RequestRecord) -> None:
        clients.append(request.client)
        record_request(request, record)

    monkeypatch.setattr(rig.proxy, "record_request", told)
    client, child = rig.connect(), Child(rig)
    for _ in range(2):  # the second time from memory
        served(client, child, chat(b"both"))
    served(client, child, chat(b"given"))
    client.send(get(b"/livez"))
    client.message()
    client.send(get(b"/livez"))
    client.message()
    assert clients[:3] == ["key:key-2", "key:key-2", "key:given-1"]
    assert clients[3] == "127.0.0.1"


# --- a file that changes


def put(path: Path, text: str) -> None:
    """Change the file at one stroke: while one is written over, the sweeps of these tests see it empty."""
    new = path.with_name("new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


def with_file(path: Path, text: str) -> ProxyConfig:
    put(path, text)
    return ProxyConfig(key_file=KeyFile(path), limits=Limits(sweep_s=0.01))


def await_epoch(rig: Rig, epoch: int) -> None:
    """Until the proxy has taken over a change; each look is one sweep of its own."""
    while rig.call(lambda: rig.proxy.keys.epoch) < epoch:
        pass


@pytest.mark.check("X4", "401 from the next request on")
def test_a_revoked_key_stops_working_on_an_open_connection(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(with_file(path, "one name=a\ntwo name=b\n"))
    old, other, child = rig.connect(), rig.connect(), Child(rig)
    for request in (chat(b"one"), get(b"/props", bearer(b"one"))):
        for _ in range(3):  # from memory, by now
            served(old, child, request)
    served(other, child, chat(b"two"))
    put(path, "two name=b\nthree name=c\n")
    await_epoch(rig, 2)
    old.send(get(b"/props", bearer(b"one")))
    assert error_of(old, 401)["cause"] == "api_key"
    old.send(chat(b"one"))
    assert error_of(old, 401)["cause"] == "api_key"
    served(other, child, chat(b"two"))
    served(old, child, chat(b"three"))


def test_a_request_in_flight_ends_well_though_its_key_is_revoked(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(with_file(path, "one name=a concurrent=1\ntwo\n"))
    client = rig.connect()
    client.send(chat(b"one"))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    client.until(b"data: 1\n\n")
    put(path, "two\n")
    await_epoch(rig, 2)
    child.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert client.until(b"\r\n0\r\n\r\n").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    client.send(chat(b"one"))
    error_of(client, 401)


def test_the_first_connection_after_a_rest_finds_the_new_keys(make_rig: MakeRig, tmp_path: Path) -> None:
    """No timer runs while nobody is there, so the change is looked for when somebody comes."""
    path = tmp_path / "keys"
    config = with_file(path, "one\n")
    rig = make_rig(ProxyConfig(key_file=config.key_file, limits=Limits(sweep_s=3600)))
    put(path, "other\n")
    client = rig.connect()
    client.send(get(b"/props", bearer(b"one")))
    error_of(client, 401)
    served(client, Child(rig), get(b"/props", bearer(b"other")))


@pytest.mark.parametrize(
    "broken", ["one rpm=fast\n", "one\nsha256:half", None], ids=["bad", "half written", "gone"]
)
def test_a_broken_file_closes_nothing_and_opens_nothing(
    make_rig: MakeRig, tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    rig = make_rig(with_file(path, "one\n"))
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"one"))
    if broken is None:
        path.unlink()
    else:
        put(path, broken)
    rig.call(rig.proxy.keys.look)
    for _ in range(5):
        rig.call(rig.proxy.keys.look)
    served(client, child, chat(b"one"))
    client.send(get(b"/props"))
    error_of(client, 401)
    warnings = [record.getMessage() for record in caplog.records if record.name == "llamasup.keys"]
    assert len(warnings) == 1
    assert "Keeping the previous keys" in warnings[0]
    put(path, "two\n")
    await_epoch(rig, 2)
    client.send(chat(b"one"))
    error_of(client, 401)
    served(client, child, chat(b"two"))


@pytest.mark.check("X4", "401 for everybody")
@pytest.mark.parametrize("emptied", ["", "# all revoked\n"], ids=["empty", "comment"])
def test_a_file_whose_last_key_is_gone_lets_nobody_in(
    make_rig: MakeRig, tmp_path: Path, emptied: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    rig = make_rig(with_file(path, "one rights=inference,control\n"), control=True)
    client, child = rig.connect(), Child(rig)
    for _ in range(3):  # from memory, by now
        served(client, child, chat(b"one"))
    put(path, emptied)
    await_epoch(rig, 2)
    for request in (chat(b"one"), chat(b""), post(CHAT, BODY), get(b"/metrics"), get(b"/v1/models")):
        client.send(request)
        assert error_of(client, 401)["cause"] == "api_key"
    client.send(get(b"/llamasup/v1/status", bearer(b"one")))
    assert error_of(client, 403)["cause"] == "control_closed"
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200
    (warning,) = (each.getMessage() for each in caplog.records if each.name == "llamasup.keys")
    assert "every key from it is revoked" in warning
    put(path, "two\n")
    await_epoch(rig, 3)
    served(client, child, chat(b"two"))
    client.send(chat(b"one"))
    error_of(client, 401)


def test_a_key_that_was_given_beside_an_emptied_file_still_opens(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(replace(with_file(path, "one\n"), api_keys=("given",)))
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"one"))
    put(path, "")
    await_epoch(rig, 2)
    served(client, child, chat(b"given"))
    client.send(chat(b"one"))
    error_of(client, 401)


def test_a_file_that_is_replaced_as_a_whole_is_noticed(make_rig: MakeRig, tmp_path: Path) -> None:
    """Same size, same time: only the file is another one."""
    path, new = tmp_path / "keys", tmp_path / "new"
    rig = make_rig(with_file(path, "one\n"))
    new.write_text("two\n")
    stamp = path.stat().st_mtime_ns
    os.utime(new, ns=(stamp, stamp))
    new.replace(path)
    client = rig.connect()
    await_epoch(rig, 2)
    served(client, Child(rig), chat(b"two"))


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
    """An error of llamasup's own."""


def fail(*_: object, **__: object) -> None:
    raise Broken


@pytest.mark.check("X8", "500 or a broken connection, and the request no longer counts for its key")
@pytest.mark.parametrize("place", ["lease", "room", "pool_of", "_when_wanted"])
def test_an_error_of_ours_does_not_keep_a_keys_place(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    if place in {"room", "_when_wanted"}:
        rig.backend.unavailable = Unavailable(503, "Loading model", may_wait=True)
    owners = {"pool_of": rig.proxy, "_when_wanted": rig.backend.waiting}
    client = rig.connect()
    with monkeypatch.context() as broken:
        broken.setattr(owners.get(place, rig.backend), place, fail)
        client.send(chat(b"one"))
        if place in owners:  # there, an exchange has begun, or the request waits
            with pytest.raises(ConnectionResetError):
                client.rest()
        else:
            error = error_of(client, 500)
            assert (error["type"], error["remedy"]) == ("server_error", "see llamasup's log")
            assert client.sees_the_end()
        rig.record()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [Broken]
    assert rig.in_flight() == 0
    assert rig.call(lambda: len(rig.backend.waiting)) == 0
    rig.backend.unavailable = None
    served(rig.connect(), Child(rig), chat(b"one"))


@pytest.mark.check("X8", "429 for a second body of a key with `concurrent=1`, also while no server is ready")
def test_a_large_body_counts_from_its_first_piece_while_no_server_is_ready(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    rig.backend.unavailable = Unavailable(503, "Loading model", may_wait=True)
    piece = get(CHAT, b"Content-Length: 1000000", bearer(b"one"), method=b"POST") + b"x" * 100_000
    rig.connect().send(piece)
    eventually(lambda: rig.call(lambda: rig.proxy.bodies.held_bytes) > 0)
    client = rig.connect()
    client.send(piece)
    over_limit(client, "key_concurrent", 1)


@pytest.mark.check("X8", "a request that gets no server does not count towards rpm")
@pytest.mark.parametrize("waits", [True, False])
def test_a_request_that_gets_no_server_does_not_count(make_rig: MakeRig, *, waits: bool) -> None:
    rig, _ = limited(make_rig, "rpm=1")
    for _ in range(3):
        rig.backend.unavailable = Unavailable(503, "The model is broken", may_wait=waits)
        client = rig.connect()
        client.send(chat(b"one"))
        if waits:
            eventually(lambda: rig.call(lambda: len(rig.backend.waiting)) == 1)
            rig.backend.unavailable = Unavailable(503, "The model is broken")
            rig.call(rig.backend.waiting.changed)
        error_of(client, 503)
        assert rig.record().outcome == "unavailable"
    rig.backend.unavailable = None
    served(rig.connect(), Child(rig), chat(b"one"))
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_requests", 60)


def test_a_request_that_was_sent_before_a_crash_counts(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "rpm=1")
    client = rig.connect()
    client.send(chat(b"one"))
    rig.accept().message()
    ends(rig)
    becomes(rig, Unavailable(503, "The model is broken"))
    error_of(client, 503)
    assert rig.record().outcome == "unavailable"
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_requests", 60)


def test_requests_per_minute(make_rig: MakeRig) -> None:
    rig, clock = limited(make_rig, "rpm=2")
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"one"))
    served(client, child, chat(b"one"))
    client.send(chat(b"one"))
    over_limit(client, "key_requests", 30)
    served(client, child, chat(b"two"))  # another's limit is not theirs
    served(client, child, get(b"/props", bearer(b"one")))  # nor is what is no inference
    clock.now += 29
    client.send(post(CHAT, BODY, b"x-api-key: one"))  # one key, in whichever header
    over_limit(client, "key_requests", 1)
    clock.now += 1
    served(client, child, chat(b"one"))


@pytest.mark.check("X8", "it counts towards rpm and concurrent, and waits for a place")
@pytest.mark.parametrize("limit", ["rpm=1", "concurrent=1"])
def test_a_post_to_an_unknown_path_counts_as_inference(make_rig: MakeRig, limit: str) -> None:
    rig, _ = limited(make_rig, limit)
    first, second = rig.connect(), rig.connect()
    unknown = post(b"/v1/systemone", BODY, bearer(b"one"))
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


def test_so_many_requests_at_one_time(make_rig: MakeRig) -> None:
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


def test_a_place_is_free_again_however_the_request_ended(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "concurrent=1")
    leaver = rig.connect()
    leaver.send(chat(b"one"))
    child = rig.accept()
    child.message()
    leaver.close()
    assert rig.record().outcome == "client_gone"
    child.close()  # llama-server has let go of it
    eventually(lambda: not rig.call(lambda: rig.endpoint.at_work))
    client = rig.connect()
    client.send(chat(b"one"))
    child = rig.accept()
    child.message()
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
    served(client, Child(rig), chat(b"one"))


def test_tokens_per_minute_are_counted_when_an_answer_is_over(make_rig: MakeRig) -> None:
    rig, clock = limited(make_rig, "tpm=600")
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"one"), usage(1000, 600, 209))  # 609: those in the cache are free
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 1)
    clock.now += 1
    served(client, child, chat(b"one"), usage(10, 0, 20))
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 3)


def test_tokens_of_a_stream_count_too(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    client = rig.connect()
    client.send(chat(b"one"))
    child = rig.accept()
    child.message()
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


def test_who_leaves_a_stream_before_its_end_pays_for_what_has_come(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.backend.endpoint, "tokens_per_s", 0.001))
    client = rig.connect()
    client.send(chat(b"one"))
    child = rig.accept()
    child.message()
    event = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    child.send(STREAM_HEAD, event * 100)
    for _ in range(100):
        client.until(b"\n\n\r\n")
    client.close()
    assert rig.record().outcome == "client_gone"
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 46)  # 100 events, and 5 tokens for a prompt of 15 bytes


@pytest.mark.check("X8", "the key is charged by time, at most the context")
@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_whose_tokens_make_no_event_is_paid_for(make_rig: MakeRig, *, begun: bool) -> None:
    rig, clock = limited(make_rig, "tpm=60")
    endpoint = rig.backend.endpoint
    rig.call(lambda: setattr(endpoint, "tokens_per_s", 1e9))
    rig.call(lambda: setattr(endpoint, "window", ContextWindow(500, 500)))
    client = rig.connect()
    client.send(post(CHAT, b'{"stream":true}', bearer(b"one")))
    child = rig.accept()
    child.message()
    if begun:
        child.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
        client.until(b"data: {}\n\n")
    client.close()
    assert rig.record().outcome == "client_gone"
    rig.call(lambda: setattr(endpoint, "tokens_per_s", 10.0))
    clock.now += 2.0  # until llama-server frees the slot; two tokens flow in
    child.close()
    eventually(lambda: not rig.call(lambda: rig.endpoint.at_work))
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 500 - 2 - 60 + 1)  # the 20 of these seconds are beyond its context


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
        + b"".join(chunk(b"data: " + each + b"\n\n" + b": \n\n" * 9000) for each in ITEMS)
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


@pytest.mark.check("X8", "tpm counts the tokens of every item, at any position in the answer")
@pytest.mark.parametrize(("path", "answered", "cost"), COSTS.values(), ids=COSTS)
def test_a_key_pays_for_all_tokens_that_an_answer_reports(
    make_rig: MakeRig, path: bytes, answered: bytes, cost: int
) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    client = rig.connect()
    client.send(post(path, b"x" * 900, bearer(b"one")))
    child = rig.accept()
    child.message()
    child.send(answered)
    assert status(client.head()) == 200
    assert rig.record().outcome == "ok"
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", cost - 60 + 1)  # a minute's 60 were there, and one is needed


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


@pytest.mark.check("X8", "the key is charged for each item, also if `response_fields` leaves out its index")
@pytest.mark.parametrize(("answered", "cost"), UNNUMBERED.values(), ids=UNNUMBERED)
def test_a_key_pays_for_items_without_an_index(make_rig: MakeRig, answered: bytes, cost: int) -> None:
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
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", cost - 60 + 1)


@pytest.mark.parametrize("what", ["counts before probabilities", "large embeddings"])
def test_metrics_report_them_without_a_limit(make_rig: MakeRig, what: str) -> None:
    path, answered, cost = COSTS[what]
    rig = make_rig()
    client = rig.connect()
    client.send(post(path, b"{}"))
    child = rig.accept()
    child.message()
    child.send(answered)
    client.message()
    record = rig.record()
    told = (record.tokens_prompt or 0) - (record.tokens_cached or 0) + (record.tokens_completion or 0)
    assert told == cost


def test_a_refusal_of_llama_servers_costs_nothing(make_rig: MakeRig) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    client = rig.connect()
    client.send(post(CHAT, b"x" * 900, bearer(b"one")))
    child = rig.accept()
    child.message()
    child.send(answer(b"{}", code=b"400 Bad Request"))
    assert status(client.message()[0]) == 400
    served(client, Child(rig), chat(b"one"))


@pytest.mark.check("X8", "the key is charged an estimate, whether the answer has begun or not")
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_disconnects_before_the_answer_pays_for_the_prompt(
    make_rig: MakeRig, stream: bytes
) -> None:
    rig, _ = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.backend.endpoint, "tokens_per_s", 0.001))
    client = rig.connect()
    client.send(post(CHAT, b'{"stream":%b,"x":"%b"}' % (stream, b"x" * 878), bearer(b"one")))
    rig.accept().message()
    client.close()
    assert rig.record().outcome == "client_gone"
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 300 - 60 + 1)


def test_a_client_that_disconnects_during_the_body_or_in_the_queue_pays_nothing(make_rig: MakeRig) -> None:
    config = ProxyConfig(key_file=keys_of("one name=a tpm=60"), route_by_model=False)
    rig = make_rig(config, max_concurrent=1)
    client = rig.connect()
    client.send(get(CHAT, b"Content-Length: 1000000", bearer(b"one"), method=b"POST"), b"x" * 200_000)
    child = rig.accept()
    child.head()
    client.close()
    assert rig.record().outcome == "client_gone"
    busy, waits = rig.connect(), rig.connect()
    busy.send(chat(b"one"))
    child = rig.accept()
    child.message()
    waits.send(post(CHAT, b"x" * 900, bearer(b"one")))
    eventually(lambda: rig.call(lambda: len(rig.backend.waiting)) == 1)
    waits.close()
    assert rig.record().outcome == "client_gone"
    child.send(answer(usage(1, 0, 1)))
    busy.message()
    busy.send(chat(b"one"))
    child.message()


def test_what_a_key_has_used_outlives_a_change_of_the_file(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    rig = make_rig(with_file(path, "one name=a rpm=1\ntwo name=b rpm=1\n"))
    rig.proxy.keys.clock = ManualClock()
    client, child = rig.connect(), Child(rig)
    served(client, child, chat(b"one"))
    served(client, child, chat(b"two"))
    put(path, "changed name=a rpm=1\ntwo name=c rpm=1\n")
    await_epoch(rig, 2)
    client.send(chat(b"changed"))  # the same name with another key
    over_limit(client, "key_requests", 60)
    served(client, child, chat(b"two"))  # another name: somebody else
    put(path, "changed name=a rpm=2\n")
    await_epoch(rig, 3)
    served(client, child, chat(b"changed"))  # one more than before
    client.send(chat(b"changed"))
    over_limit(client, "key_requests", 30)
    put(path, "changed name=a\n")
    await_epoch(rig, 4)
    served(client, child, chat(b"changed"))


def test_a_key_that_goes_while_a_body_comes_serves_its_last_request(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    rig = make_rig(with_file(path, "one name=a rpm=1\ntwo name=b\n"))
    client, child = rig.connect(), Child(rig)
    expects = b"Expect: 100-continue"
    client.send(get(CHAT, bearer(b"one"), expects, b"Content-Length: 2", method=b"POST"))
    assert status(client.head()) == 100  # it has come in
    put(path, "two name=b\n")
    await_epoch(rig, 2)
    client.send(b"{}")
    child.answers()
    assert status(client.message()[0]) == 200
    client.send(chat(b"one"))
    error_of(client, 401)


def test_a_large_body_over_the_limit_is_refused_before_it_is_whole(make_rig: MakeRig) -> None:
    config = ProxyConfig(key_file=keys_of("one rpm=1"), route_by_model=False)
    rig = make_rig(config)
    client = rig.connect()
    served(client, Child(rig), chat(b"one"))
    client.send(get(CHAT, bearer(b"one"), b"Content-Length: 1000000", method=b"POST") + b"x" * 100_000)
    head, _ = client.message()
    assert status(head) == 429
    assert field(head, b"connection") == b"close"
    assert rig.in_flight() == 0


def test_a_large_body_that_is_sent_on_as_it_comes_counts_once(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("one rpm=2 concurrent=1"), route_by_model=False))
    client = rig.connect()
    body = b"x" * 200_000
    child = None
    for _ in range(2):
        client.send(post(CHAT, body[:100_000], bearer(b"one")).replace(b": 100000", b": 200000"))
        child = child or rig.accept()
        child.until(b"\r\n\r\n")  # by now it is under way
        client.send(body[100_000:])
        child.receive(200_000)
        child.send(answer())
        assert status(client.message()[0]) == 200
    client.send(chat(b"one"))
    over_limit(client, "key_requests", 30)
