"""Requests that come before their model serves, or whose server ends before it answered (S9–S13)."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from llamasup.http.address import UnixAddress
from llamasup.models.access import ResolvedModel
from llamasup.proxy import ProxyConfig
from llamasup.proxy.downstream import Downstream
from llamasup.queueing.endpoint import Endpoint, Lease, Unavailable
from llamasup.queueing.wait_queue import GRACE_S, RequestQueue
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, field, get, post, status

LOADING = Unavailable(503, "Loading model", cause="loading", retry_after_s=1.0, queueable=True)
FAILED = Unavailable(503, "it ran out of memory", cause="out_of_memory", remedy="use a smaller context")
STOPPING = Unavailable(503, "The server is stopping", cause="stopping")
EVENT = chunk(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')


# --- what the instance does, in the order in which its runner does it


def becomes(rig: Rig, why: Unavailable) -> None:
    """No generation serves."""

    def tell() -> None:
        rig.backend.unavailable = why
        rig.backend.waiting.changed()

    rig.call(tell)


def ends(rig: Rig, why: Unavailable = LOADING) -> None:
    """The generation is gone, and so is what it was doing."""
    becomes(rig, why)
    rig.call(lambda: rig.backend.endpoint.close("llama-server was killed"))


def serves(rig: Rig) -> Endpoint:
    """The next generation is ready."""
    old = rig.backend.endpoint
    new = Endpoint(old.model, old.generation + 1, old.address)

    def tell() -> None:
        rig.backend.endpoint = new
        rig.backend.unavailable = None
        rig.backend.waiting.changed()

    rig.call(tell)
    return new


def wait_until(rig: Rig, count: int) -> None:
    """Until so many requests wait."""
    while rig.call(lambda: len(rig.backend.waiting)) != count:
        pass


def asked(rig: Rig, body: bytes, path: bytes = CHAT) -> Wire:
    client = rig.connect()
    client.send(post(path, body))
    return client


def reply(rig: Rig, response: bytes) -> None:
    """The child's, on a new connection."""
    child = rig.accept()
    child.message()
    child.send(response)


# --- before a generation serves


@pytest.fixture
def loading(rig: Rig) -> Rig:
    rig.backend.unavailable = LOADING
    return rig


def test_requests_wait_while_a_model_loads_and_are_served_in_order(loading: Rig) -> None:
    rig = loading
    clients = []
    for n in range(3):
        clients.append(asked(rig, b"%d" % n))
        wait_until(rig, n + 1)
    assert all(client.is_quiet() for client in clients)
    serves(rig)
    for n, client in enumerate(clients):
        child = rig.accept()
        assert child.message()[1] == b"%d" % n
        child.send(answer(b"served %d" % n))
        assert client.message()[1] == b"served %d" % n


def test_the_answer_says_how_long_its_request_waited_for_the_model(loading: Rig) -> None:
    client = asked(loading, b"{}")
    wait_until(loading, 1)
    serves(loading)
    reply(loading, answer())
    head, _ = client.message()
    timing = re.fullmatch(
        rb'queue;dur=([\d.]+);desc="position 1", load;dur=([\d.]+)', field(head, b"server-timing") or b""
    )
    assert timing is not None
    record = loading.record()
    assert (record.outcome, record.status, record.generation, record.replayed) == ("ok", 200, 2, False)
    assert 0.0 < record.waited_s <= record.queue_s
    assert float(timing[2]) == pytest.approx(record.waited_s * 1000, abs=0.051)


@pytest.mark.parametrize(
    "path",
    [
        *(b"/v1/completions", b"/v1/messages", b"/v1/embeddings", b"/v1/rerank", b"/tokenize", b"/infill"),
        b"/no-such-path",  # a POST that llamasup does not know may be work on a prompt
    ],
)
def test_all_that_works_on_a_prompt_waits(loading: Rig, path: bytes) -> None:
    client = asked(loading, b"{}", path)
    wait_until(loading, 1)
    serves(loading)
    reply(loading, answer(b"served"))
    assert client.message()[1] == b"served"


@pytest.mark.parametrize(
    "request_",
    [
        *(
            get(path)
            for path in (b"/health", b"/props", b"/slots", b"/v1/models", b"/", b"/v1/chat/completions")
        ),
        post(b"/v1/streams/lookup", b"[]"),
    ],
    ids=lambda request_: request_.partition(b" HTTP")[0].decode(),
)
def test_who_asks_about_the_server_is_answered_at_once(loading: Rig, request_: bytes) -> None:
    head, body = loading.ask(request_)
    assert status(head) == 503
    assert json.loads(body)["error"]["message"] == "Loading model"


def test_a_client_that_leaves_while_it_waits_frees_its_place_and_is_never_sent_on(loading: Rig) -> None:
    rig = loading
    closed, half_closed, stays = (asked(rig, b"%d" % n) for n in range(3))
    wait_until(rig, 3)
    closed.close()
    wait_until(rig, 2)
    half_closed.sock.shutdown(socket.SHUT_WR)
    wait_until(rig, 1)
    for _ in range(2):
        record = rig.record()
        assert (record.outcome, record.status, record.model) == ("client_gone", 499, "tiny")
        assert record.waited_s > 0.0
    serves(rig)
    child = rig.accept()
    assert child.message()[1] == b"2"
    child.send(answer(b"served"))
    assert stays.message()[1] == b"served"


def test_what_is_pipelined_behind_a_request_that_waits_is_answered_behind_it(loading: Rig) -> None:
    client = loading.connect()
    client.send(post(CHAT, b"first") + get(b"/livez") + get(b"/health"))
    wait_until(loading, 1)
    assert client.is_quiet()
    serves(loading)
    reply(loading, answer(b"served"))
    assert client.message()[1] == b"served"
    assert client.message()[1] == b'{"status":"ok"}'
    assert status(client.message()[0]) == 200


def test_no_more_than_256_wait_and_the_next_is_told_when_to_come_back(loading: Rig) -> None:
    clients = [asked(loading, b"{}") for _ in range(256)]
    wait_until(loading, 256)
    head, body = loading.ask(post(CHAT, b"{}"))
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["cause"] == "waiting_room_full"
    assert loading.record().outcome == "unavailable"
    clients[0].close()
    wait_until(loading, 255)
    asked(loading, b"{}")
    wait_until(loading, 256)


def test_a_request_that_waited_too_long_is_a_503_and_its_connection_goes_on(make_rig: MakeRig) -> None:
    rig = make_rig(wait_timeout_s=0.05)
    rig.backend.unavailable = LOADING
    client = asked(rig, b"{}")
    head, body = client.message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["message"] == "Loading model; this request has waited for 0.05 s"
    record = rig.record()
    assert (record.outcome, record.status) == ("unavailable", 503)
    assert record.waited_s >= 0.05
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200


def test_without_time_to_wait_the_answer_comes_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(wait_timeout_s=0.0)
    rig.backend.unavailable = LOADING
    head, body = rig.ask(post(CHAT, b"{}"))
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["message"] == "Loading model"


def test_when_the_model_fails_all_who_wait_learn_the_cause_and_the_remedy(loading: Rig) -> None:
    clients = [asked(loading, b"{}") for _ in range(3)]
    wait_until(loading, 3)
    becomes(loading, FAILED)
    for client in clients:
        head, body = client.message()
        error = json.loads(body)["error"]
        assert status(head) == 503
        assert (error["message"], error["cause"], error["remedy"]) == (
            "it ran out of memory",
            "out_of_memory",
            "use a smaller context",
        )


def test_a_stop_answers_those_who_wait_at_once_and_lets_those_in_flight_finish(rig: Rig) -> None:
    busy = asked(rig, b"busy")
    child = rig.accept()
    child.message()
    becomes(rig, LOADING)
    waits = asked(rig, b"waits")
    wait_until(rig, 1)
    becomes(rig, STOPPING)
    rig.call(rig.proxy.drain)
    assert status(waits.message()[0]) == 503
    assert waits.sees_the_end()
    late = asked(rig, b"late")
    assert status(late.message()[0]) == 503
    child.send(answer(b"finished"))
    assert busy.message()[1] == b"finished"


def test_nothing_is_left_when_the_proxy_closes_while_requests_wait(loading: Rig) -> None:
    client = asked(loading, b"{}")
    wait_until(loading, 1)
    loading.close_proxy()
    assert client.sees_the_end()
    assert len(loading.backend.waiting) == 0


# --- after a generation has broken a request off


def test_a_request_whose_generation_ends_before_its_answer_is_sent_to_the_next(rig: Rig) -> None:
    client = asked(rig, b"precious")
    child = rig.accept()
    child.message()
    ends(rig)
    assert child.sees_the_end()
    wait_until(rig, 1)
    new = serves(rig)
    again = rig.accept()
    assert again.message()[1] == b"precious"
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    record = rig.record()
    assert (record.outcome, record.generation, record.replayed) == ("ok", 2, True)
    assert rig.in_flight() == 0
    assert rig.call(lambda: new.in_flight) == 0
    assert rig.proxy.metrics.replays == {"tiny": 1}


def test_the_connection_may_break_before_the_end_of_the_generation_is_seen(rig: Rig) -> None:
    client = asked(rig, b"precious")
    child = rig.accept()
    child.message()
    child.send(b"HTTP/1.1 200 OK\r\nContent-Le")  # of this nothing has gone downstream
    child.close()
    wait_until(rig, 1)
    ends(rig)
    serves(rig)
    again = rig.accept()
    assert again.message()[1] == b"precious"
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"


def test_requests_that_are_sent_again_come_in_their_old_order_before_later_ones(rig: Rig) -> None:
    early = []
    for n in range(4):
        early.append(asked(rig, b"early %d" % n))
        rig.accept().message()
    ends(rig)
    late = asked(rig, b"late")
    wait_until(rig, 5)
    serves(rig)
    for n, client in enumerate([*early, late]):
        child = rig.accept()
        assert child.message()[1] == (b"late" if client is late else b"early %d" % n)
        child.send(answer(b"%d" % n))
        assert client.message()[1] == b"%d" % n


def test_a_request_that_ends_every_server_is_not_sent_a_third_time(rig: Rig) -> None:
    client = asked(rig, b"poison")
    rig.accept().message()
    ends(rig)
    serves(rig)
    rig.accept().message()
    ends(rig)
    head, body = client.message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["message"] == "llama-server was killed"
    record = rig.record()
    assert (record.outcome, record.generation, record.replayed) == ("revoked", 2, True)
    assert rig.call(lambda: len(rig.backend.waiting)) == 0


def test_a_server_that_breaks_a_connection_and_lives_gets_the_request_once_more(rig: Rig) -> None:
    client = asked(rig, b"precious")
    child = rig.accept()
    child.message()
    child.close()
    again = rig.accept()
    assert again.message()[1] == b"precious"
    again.close()
    head, body = client.message()
    assert status(head) == 502
    assert json.loads(body)["error"]["message"] == "llama-server closed the connection"
    record = rig.record()
    assert (record.outcome, record.generation) == ("upstream_failed", 1)
    assert record.waited_s >= GRACE_S * 0.9


def test_a_stale_connection_and_then_a_dead_server_count_as_one_try(rig: Rig) -> None:
    client = asked(rig, b"first")
    child = rig.accept()
    child.message()
    child.send(answer())
    client.message()
    client.send(post(CHAT, b"precious"))
    child.message()
    rig.stop_listening()
    child.close()  # begun or not, nobody knows: it is tried again at once, and there is no server any more
    wait_until(rig, 1)
    ends(rig)
    rig.listen_again()
    serves(rig)
    assert rig.accept().message()[1] == b"precious"
    ends(rig)
    assert status(client.message()[0]) == 503
    rig.record()
    assert rig.record().replayed


def test_nothing_is_sent_again_once_the_client_has_had_a_byte(rig: Rig) -> None:
    plain = asked(rig, b"plain")
    child = rig.accept()
    child.message()
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
    plain.head()
    stream = asked(rig, b'{"stream":true}')
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + EVENT)
    stream.until(EVENT)
    ends(rig)
    with pytest.raises(ConnectionResetError):
        plain.rest()
    assert b'data: {"error":{"message":"llama-server was killed"' in stream.rest()
    assert rig.call(lambda: len(rig.backend.waiting)) == 0


@pytest.mark.parametrize(
    "path", [b"/completion", b"/v1/completions", b"/infill", b"/v1/responses", b"/v1/messages"]
)
def test_a_stream_that_is_cut_ends_with_the_error_event_of_its_api(rig: Rig, path: bytes) -> None:
    client = asked(rig, b'{"stream":true}', path)
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    ends(rig)
    size, _, rest = client.rest().partition(b"\r\n")
    assert rest[int(size, 16) :] == b"\r\n"  # the chunk is whole, and the last chunk is not there
    event = rest[: int(size, 16)]
    named = path in (b"/v1/responses", b"/v1/messages")
    assert event.startswith(b"event: error\ndata: {" if named else b'data: {"error":{')
    assert event.endswith(b"}\n\n")


def test_an_error_of_llama_server_is_an_answer_and_is_passed_on(rig: Rig) -> None:
    client = asked(rig, b"{}")
    child = rig.accept()
    child.message()
    child.send(answer(b'{"error":{}}', code=b"500 Internal Server Error"))
    assert status(client.message()[0]) == 500
    assert rig.call(lambda: len(rig.backend.waiting)) == 0


@pytest.mark.parametrize(
    "request_", [get(b"/props"), post(b"/v1/streams/lookup", b"[]"), post(b"/other", b"{}")]
)
def test_what_only_asks_or_changes_something_is_not_sent_again(rig: Rig, request_: bytes) -> None:
    client = rig.connect()
    client.send(request_)
    rig.accept().head()
    ends(rig)
    assert status(client.message()[0]) == 503


def test_what_a_failing_generation_broke_off_is_told_why(rig: Rig) -> None:
    client = asked(rig, b"{}")
    rig.accept().message()
    ends(rig, FAILED)
    head, body = client.message()
    error = json.loads(body)["error"]
    assert status(head) == 503
    assert (error["message"], error["remedy"]) == ("it ran out of memory", "use a smaller context")


def test_a_client_that_leaves_while_it_waits_for_the_next_generation_frees_its_place(rig: Rig) -> None:
    client = asked(rig, b"{}")
    rig.accept().message()
    ends(rig)
    wait_until(rig, 1)
    client.close()
    wait_until(rig, 0)
    record = rig.record()
    assert (record.outcome, record.model, record.generation, record.replayed) == (
        "client_gone",
        "tiny",
        1,
        True,
    )


def test_a_server_that_cannot_be_reached_is_waited_for(rig: Rig) -> None:
    """Its socket file was removed, say: supervision will see it, and start another."""
    rig.stop_listening()
    client = asked(rig, b"precious")
    wait_until(rig, 1)
    rig.listen_again()
    assert rig.accept().message()[1] == b"precious"
    rig.stop_listening()
    ends(rig)
    rig.listen_again()
    serves(rig)
    again = rig.accept()  # what it could not reach did not count as a try
    assert again.message()[1] == b"precious"
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"


def test_no_more_are_sent_again_than_the_budget_allows(rig: Rig) -> None:
    for _ in range(70):
        asked(rig, b"{}")
        rig.accept().message()
    ends(rig)
    wait_until(rig, 64)
    records = [rig.record() for _ in range(6)]
    assert {(record.outcome, record.status, record.replayed) for record in records} == {
        ("revoked", 503, False)
    }


def test_an_upload_is_forgotten_once_its_answer_has_begun(rig: Rig) -> None:
    client = asked(rig, b'{"stream":true}')
    child = rig.accept()
    child.message()
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    exchange = connection._exchange
    assert exchange is not None
    assert exchange._request.body
    child.send(STREAM_HEAD + EVENT)
    client.head()
    assert exchange._request.body == b""


# --- several models


def test_one_models_crash_touches_no_request_of_another(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(ProxyConfig(route_by_model=True))
    stable = Endpoint("stable", 1, UnixAddress(str(tmp_path / "stable.sock")))
    stable_child = rig.listen(str(tmp_path / "stable.sock"))
    stable_room = RequestQueue(lambda: (stable,), timeout_s=10.0)
    one = rig.backend

    class Two:
        def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
            if model == "stable":
                return stable.lease_if_free(infers=infers)
            return one.lease(model, infers=infers)

        def room(self, model: str | None) -> RequestQueue:
            return stable_room if model == "stable" else one.waiting

        def readiness(self) -> Unavailable | None:
            return None

        def meant(self, model: str | None) -> ResolvedModel:
            return ResolvedModel((model or "tiny",))

        def listing(self) -> None:
            return None

    rig.proxy.backend = Two()
    client = asked(rig, b'{"model":"stable"}')
    child = rig.keep(Wire(stable_child.accept()[0]))
    child.message()
    other = asked(rig, b'{"model":"tiny"}')
    rig.accept().message()
    ends(rig)
    wait_until(rig, 1)
    assert client.is_quiet()
    assert rig.call(lambda: stable.in_flight) == 1
    child.send(answer(b"untouched"))
    assert client.message()[1] == b"untouched"
    assert other.is_quiet()
    stable_child.close()


def test_a_crowd_that_finds_the_servers_backlog_full_is_served_all_the_same(rig: Rig) -> None:
    """The child accepts nothing for a while; its backlog is 64 here, and 512 in llama-server (b11434)."""
    clients = [asked(rig, b"%d" % n) for n in range(70)]
    while not rig.call(lambda: len(rig.backend.waiting)):
        pass  # asyncio finds this out later than uvloop
    bodies = set()
    for _ in clients:
        child = rig.accept()
        bodies.add(child.message()[1])
        child.send(answer(b"", b"Connection: close"))
    assert [status(client.message()[0]) for client in clients] == [200] * 70
    assert bodies == {b"%d" % n for n in range(70)}
    assert rig.proxy.metrics.replays == {}
