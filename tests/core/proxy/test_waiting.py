"""Requests that arrive before their model serves, or whose server ends before its answer (S9 to S13)."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Self

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.backend import ModelRoute
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.exchange import Exchange
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.settings.model import NO_REPAIRS
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import (
    FAILED,
    LOADING,
    STOPPING,
    await_queued,
    end_generation,
    make_unavailable,
    send_chat,
    start_generation,
)
from tests.core.proxy.rig import CHAT, EVENT, STREAM_HEAD, Rig, Wire, answer, field, get, post, status
from tests.kit.backends import Unlisted


def answer_next(rig: Rig, response: bytes) -> None:
    """The child answers the next request on a new connection."""
    child = rig.accept()
    child.message()
    child.send(response)


# --- before a generation serves


@pytest.fixture
def loading(make_rig: MakeRig) -> Rig:
    rig = make_rig(ProxyConfig(route_by_model=False))
    rig.backend.unavailable = LOADING
    return rig


def test_requests_wait_while_model_loads_and_are_served_in_order(loading: Rig) -> None:
    rig = loading
    clients = []
    for n in range(3):
        clients.append(send_chat(rig, b"%d" % n))
        await_queued(rig, n + 1)
    assert all(client.is_quiet() for client in clients)
    start_generation(rig)
    for n, client in enumerate(clients):
        child = rig.accept()
        assert child.message()[1] == b"%d" % n
        child.send(answer(b"served %d" % n))
        assert client.message()[1] == b"served %d" % n


def test_server_timing_reports_wait_for_the_model(loading: Rig) -> None:
    client = send_chat(loading, b"{}")
    await_queued(loading, 1)
    start_generation(loading)
    answer_next(loading, answer())
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
        b"/no-such-path",  # an unknown POST may contain a prompt
    ],
)
def test_every_request_with_a_prompt_waits(loading: Rig, path: bytes) -> None:
    client = send_chat(loading, b"{}", path)
    await_queued(loading, 1)
    start_generation(loading)
    answer_next(loading, answer(b"served"))
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
def test_request_about_the_server_does_not_wait(loading: Rig, request_: bytes) -> None:
    head, body = loading.ask(request_)
    assert status(head) == 503
    assert json.loads(body)["error"]["message"] == "Loading model"


def test_waiting_request_of_disconnected_client_is_never_sent(loading: Rig) -> None:
    rig = loading
    closed, half_closed, stays = (send_chat(rig, b"%d" % n) for n in range(3))
    await_queued(rig, 3)
    closed.close()
    await_queued(rig, 2)
    half_closed.sock.shutdown(socket.SHUT_WR)
    await_queued(rig, 1)
    for _ in range(2):
        record = rig.record()
        assert (record.outcome, record.status, record.model) == ("client_gone", 499, "tiny")
        assert record.waited_s > 0.0
    start_generation(rig)
    child = rig.accept()
    assert child.message()[1] == b"2"
    child.send(answer(b"served"))
    assert stays.message()[1] == b"served"


def test_requests_pipelined_after_waiting_one_are_answered_in_order(loading: Rig) -> None:
    client = loading.send(post(CHAT, b"first") + get(b"/livez") + get(b"/health"))
    await_queued(loading, 1)
    assert client.is_quiet()
    start_generation(loading)
    answer_next(loading, answer(b"served"))
    assert client.message()[1] == b"served"
    assert client.message()[1] == b'{"status":"ok"}'
    assert status(client.message()[0]) == 200


def test_at_most_256_requests_wait_and_next_is_a_503_with_retry_after(loading: Rig) -> None:
    clients = [send_chat(loading, b"{}") for _ in range(256)]
    await_queued(loading, 256)
    head, body = loading.ask(post(CHAT, b"{}"))
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["cause"] == "waiting_room_full"
    assert loading.record().outcome == "unavailable"
    clients[0].close()
    await_queued(loading, 255)
    send_chat(loading, b"{}")
    await_queued(loading, 256)


def test_wait_timeout_is_a_503_and_connection_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig(wait_timeout_s=0.05)
    rig.backend.unavailable = LOADING
    client = send_chat(rig, b"{}")
    head, body = client.message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["message"] == "Loading model; this request has waited for 0.05 s"
    record = rig.record()
    assert (record.outcome, record.status) == ("unavailable", 503)
    assert record.waited_s >= 0.05
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200


def test_wait_timeout_of_0_answers_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(wait_timeout_s=0.0)
    rig.backend.unavailable = LOADING
    head, body = rig.ask(post(CHAT, b"{}"))
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["message"] == "Loading model"


def test_failed_model_answers_waiting_requests_with_cause_and_remedy(loading: Rig) -> None:
    clients = [send_chat(loading, b"{}") for _ in range(3)]
    await_queued(loading, 3)
    make_unavailable(loading, FAILED)
    for client in clients:
        head, body = client.message()
        error = json.loads(body)["error"]
        assert status(head) == 503
        assert (error["message"], error["cause"], error["remedy"]) == (
            "it ran out of memory",
            "out_of_memory",
            "Use a smaller context.",
        )


def test_stop_answers_waiting_requests_and_completes_those_in_flight(rig: Rig) -> None:
    busy, child = rig.begin(post(CHAT, b"busy"))
    make_unavailable(rig, LOADING)
    waits = send_chat(rig, b"waits")
    await_queued(rig, 1)
    make_unavailable(rig, STOPPING)
    rig.call(rig.proxy.drain)
    assert status(waits.message()[0]) == 503
    assert waits.sees_the_end()
    late = send_chat(rig, b"late")
    assert status(late.message()[0]) == 503
    child.send(answer(b"finished"))
    assert busy.message()[1] == b"finished"


def test_closing_proxy_empties_the_queue(loading: Rig) -> None:
    client = send_chat(loading, b"{}")
    await_queued(loading, 1)
    loading.close_proxy()
    assert client.sees_the_end()
    assert len(loading.backend.waiting) == 0


# --- after the end of a generation


def test_request_without_answer_is_sent_to_next_generation(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b"precious"))
    end_generation(rig)
    assert child.sees_the_end()
    await_queued(rig, 1)
    new = start_generation(rig)
    again = rig.accept()
    assert again.message()[1] == b"precious"
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    record = rig.record()
    assert (record.outcome, record.generation, record.replayed) == ("ok", 2, True)
    assert rig.in_flight() == 0
    assert rig.call(lambda: new.in_flight) == 0
    assert rig.proxy.metrics.replays == {"tiny": 1}


def test_request_of_closed_connection_waits_for_next_generation(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b"precious"))
    child.send(b"HTTP/1.1 200 OK\r\nContent-Le")  # not forwarded yet
    child.close()
    await_queued(rig, 1)
    end_generation(rig)
    start_generation(rig)
    again = rig.accept()
    assert again.message()[1] == b"precious"
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"


def test_requests_sent_again_keep_their_order_before_later_ones(rig: Rig) -> None:
    early = []
    for n in range(4):
        early.append(send_chat(rig, b"early %d" % n))
        rig.accept().message()
    end_generation(rig)
    late = send_chat(rig, b"late")
    await_queued(rig, 5)
    start_generation(rig)
    for n, client in enumerate([*early, late]):
        child = rig.accept()
        assert child.message()[1] == (b"late" if client is late else b"early %d" % n)
        child.send(answer(b"%d" % n))
        assert client.message()[1] == b"%d" % n


def test_request_that_crashes_two_generations_is_not_sent_a_third_time(rig: Rig) -> None:
    client = send_chat(rig, b"poison")
    rig.accept().message()
    end_generation(rig)
    start_generation(rig)
    rig.accept().message()
    end_generation(rig)
    head, body = client.message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["message"] == "llama-server was killed"
    record = rig.record()
    assert (record.outcome, record.generation, record.replayed) == ("revoked", 2, True)
    assert rig.call(lambda: len(rig.backend.waiting)) == 0


def test_server_that_only_closes_connection_gets_request_once_more(no_cause: float, rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b"precious"))
    child.close()
    again = rig.accept()
    assert again.message()[1] == b"precious"
    again.close()
    head, body = client.message()
    assert status(head) == 502
    assert json.loads(body)["error"]["message"] == "llama-server closed the connection"
    record = rig.record()
    assert (record.outcome, record.generation) == ("upstream_failed", 1)
    assert record.waited_s >= no_cause * 0.9


def test_closing_connection_and_dead_server_count_as_one_attempt(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b"first"))
    child.send(answer())
    client.message()
    client.send(post(CHAT, b"precious"))
    child.message()
    rig.stop_listening()
    child.close()  # the request is sent again at once, but no server listens
    await_queued(rig, 1)
    end_generation(rig)
    rig.listen_again()
    start_generation(rig)
    assert rig.accept().message()[1] == b"precious"
    end_generation(rig)
    assert status(client.message()[0]) == 503
    rig.record()
    assert rig.record().replayed


def test_request_is_not_sent_again_after_first_byte_to_client(rig: Rig) -> None:
    plain, child = rig.begin(post(CHAT, b"plain"))
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
    plain.head()
    stream, child = rig.begin(post(CHAT, b'{"stream":true}'))
    child.send(STREAM_HEAD + EVENT)
    stream.until(EVENT)
    end_generation(rig)
    with pytest.raises(ConnectionResetError):
        plain.rest()
    assert b'data: {"error":{"message":"llama-server was killed"' in stream.rest()
    assert rig.call(lambda: len(rig.backend.waiting)) == 0


@pytest.mark.parametrize(
    "path", [b"/completion", b"/v1/completions", b"/infill", b"/v1/responses", b"/v1/messages"]
)
def test_broken_stream_ends_with_error_event_of_its_api(rig: Rig, path: bytes) -> None:
    client, child = rig.begin(post(path, b'{"stream":true}'))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    end_generation(rig)
    size, _, rest = client.rest().partition(b"\r\n")
    assert rest[int(size, 16) :] == b"\r\n"  # the chunk is complete, and the last chunk is missing
    event = rest[: int(size, 16)]
    named = path in (b"/v1/responses", b"/v1/messages")
    assert event.startswith(b"event: error\ndata: {" if named else b'data: {"error":{')
    assert event.endswith(b"}\n\n")


def test_error_of_llama_server_is_forwarded(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b"{}"))
    child.send(answer(b'{"error":{}}', code=b"500 Internal Server Error"))
    assert status(client.message()[0]) == 500
    assert rig.call(lambda: len(rig.backend.waiting)) == 0


@pytest.mark.parametrize(
    "request_", [get(b"/props"), post(b"/v1/streams/lookup", b"[]"), post(b"/other", b"{}")]
)
def test_request_without_prompt_is_not_sent_again(rig: Rig, request_: bytes) -> None:
    client = rig.send(request_)
    rig.accept().head()
    end_generation(rig)
    assert status(client.message()[0]) == 503


def test_request_of_failed_generation_gets_cause_and_remedy(rig: Rig) -> None:
    client = send_chat(rig, b"{}")
    rig.accept().message()
    end_generation(rig, FAILED)
    head, body = client.message()
    error = json.loads(body)["error"]
    assert status(head) == 503
    assert (error["message"], error["remedy"]) == ("it ran out of memory", "Use a smaller context.")


def test_disconnect_while_waiting_for_next_generation_leaves_the_queue(rig: Rig) -> None:
    client = send_chat(rig, b"{}")
    rig.accept().message()
    end_generation(rig)
    await_queued(rig, 1)
    client.close()
    await_queued(rig, 0)
    record = rig.record()
    assert (record.outcome, record.model, record.generation, record.replayed) == (
        "client_gone",
        "tiny",
        1,
        True,
    )


@pytest.mark.usefixtures("no_cause")
def test_request_waits_for_unreachable_server(rig: Rig) -> None:
    """For example without its socket file: supervision will start another server."""
    rig.stop_listening()
    client = send_chat(rig, b"precious")
    await_queued(rig, 1)
    rig.listen_again()
    assert rig.accept().message()[1] == b"precious"
    rig.stop_listening()
    end_generation(rig)
    rig.listen_again()
    start_generation(rig)
    again = rig.accept()  # the failed connect did not count as an attempt
    assert again.message()[1] == b"precious"
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"


def test_body_is_dropped_once_its_answer_begins(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b'{"stream":true}'))
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    exchange = connection._exchange
    assert isinstance(exchange, Exchange)
    assert exchange.request.body
    child.send(STREAM_HEAD + EVENT)
    client.head()
    assert rig.call(lambda: exchange.request.body) == b""  # after the callback that sent the head


# --- several models


def test_crash_of_one_model_affects_no_request_of_another(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(ProxyConfig(route_by_model=True))
    stable = Endpoint("stable", 1, UnixAddress(str(tmp_path / "stable.sock")))
    stable_child = rig.listen(str(tmp_path / "stable.sock"))
    stable_room = RequestQueue(lambda: (stable,), timeout_s=10.0)
    one = rig.backend

    class Stable(Unlisted):
        model = ResolvedModel(("stable",))
        queue = stable_room

        @property
        def served(self) -> Self:
            return self

        repairs = NO_REPAIRS

        def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
            return stable.lease_if_free(infers=infers)

    class Two(Unlisted):
        def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> ModelRoute:
            return Stable() if model == "stable" else one

    rig.proxy.backend = Two()
    client = send_chat(rig, b'{"model":"stable"}')
    child = rig.keep(Wire(stable_child.accept()[0]))
    child.message()
    other = send_chat(rig, b'{"model":"tiny"}')
    rig.accept().message()
    end_generation(rig)
    await_queued(rig, 1)
    assert client.is_quiet()
    assert rig.call(lambda: stable.in_flight) == 1
    child.send(answer(b"untouched"))
    assert client.message()[1] == b"untouched"
    assert other.is_quiet()
    stable_child.close()


@pytest.mark.both_loops
def test_requests_that_meet_a_full_backlog_are_served(rig: Rig) -> None:
    """The child accepts no connection for a while; its backlog is 64, llama-server's is 512 (b11434)."""
    clients = [send_chat(rig, b"%d" % n) for n in range(70)]
    while not rig.call(lambda: len(rig.backend.waiting)):
        pass  # asyncio notices this later than uvloop
    bodies = set()
    for _ in clients:
        child = rig.accept()
        bodies.add(child.message()[1])
        child.send(answer(b"", b"Connection: close"))
    assert [status(client.message()[0]) for client in clients] == [200] * 70
    assert bodies == {b"%d" % n for n in range(70)}
    assert rig.proxy.metrics.replays == {}
