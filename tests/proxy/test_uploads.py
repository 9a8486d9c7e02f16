"""Large bodies that nobody here has to read: they are sent on while they come."""

from __future__ import annotations

import json
import socket

import pytest

from llamasup.proxy import Limits, ProxyConfig
from llamasup.proxy.downstream import Downstream
from llamasup.queueing.endpoint import Endpoint
from tests.patience import PATIENCE_S
from tests.proxy.conftest import MakeRig
from tests.proxy.key_files import keys_of
from tests.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, field, get, post, status
from tests.proxy.test_waiting import LOADING, STOPPING, becomes, ends, serves, wait_until

KIB = 1 << 10
MIB = 1 << 20
PART = bytes(range(256)) * 512  # 128 KiB: more than is read ahead


def config(**limits: float) -> ProxyConfig:
    return ProxyConfig(route_by_model=False, limits=Limits(sweep_s=0.02, **limits))  # type: ignore[arg-type]


@pytest.fixture
def run(make_rig: MakeRig) -> Rig:
    """As ``run`` and ``wrap`` have it: one model, whatever a body says."""
    return make_rig(config())


def announced(size: int, *lines: bytes) -> bytes:
    return get(CHAT, b"Content-Length: %d" % size, *lines, method=b"POST")


CHUNKED = get(CHAT, b"Transfer-Encoding: chunked", method=b"POST")


def uploading(rig: Rig, head: bytes = announced(16 * len(PART))) -> tuple[Wire, Wire]:
    """A client, and a child that has got the first part of sixteen."""
    client = rig.connect()
    client.send(head, PART if head != CHUNKED else chunk(PART))
    child = rig.accept()
    child.head()
    if head == CHUNKED:
        assert dechunked(child, len(PART)) == PART
    else:
        assert child.receive(len(PART)) == PART
    return client, child


def dechunked(wire: Wire, size: int) -> bytes:
    """So many bytes of a chunked body; its chunks end where these do."""
    body = b""
    while len(body) < size:
        body += wire.receive(int(wire.until(b"\r\n"), 16))
        assert wire.receive(2) == b"\r\n"
    return body


def uploads(rig: Rig) -> int:
    return rig.call(lambda: rig.proxy.uploads)


# --- on the way


def test_a_large_body_is_sent_on_before_it_is_here(run: Rig) -> None:
    client, child = uploading(run)
    for _ in range(15):  # each part arrives before the next is sent
        client.send(PART)
        assert child.receive(len(PART)) == PART
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"
    client.send(post(CHAT, b"next"))
    assert child.message()[1] == b"next"  # both connections are fit for the next one
    child.send(answer(b"too"))
    assert client.message()[1] == b"too"
    assert [run.record().outcome for _ in range(2)] == ["ok", "ok"]
    assert uploads(run) == 0


def test_it_keeps_the_length_that_the_client_said(run: Rig) -> None:
    client = run.connect()
    client.send(announced(2 * len(PART)), PART)
    head = run.accept().head()
    assert field(head, b"content-length") == b"%d" % (2 * len(PART))
    assert field(head, b"transfer-encoding") is None


def test_a_chunked_body_goes_on_chunked_afresh_and_without_its_trailers(run: Rig) -> None:
    client = run.connect()
    client.send(CHUNKED, b"20000;name=value\r\n" + PART + b"\r\n")
    child = run.accept()
    head = child.head()
    assert field(head, b"transfer-encoding") == b"chunked"
    assert field(head, b"content-length") is None
    assert dechunked(child, len(PART)) == PART
    client.send(b"".join(chunk(b"%d" % n) for n in range(5)), b"0\r\nX-Trailer: t\r\n\r\n")
    assert dechunked(child, 5) == b"01234"
    assert child.receive(5) == b"0\r\n\r\n"
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"
    client.send(get())
    assert child.head().startswith(b"GET /props ")


def test_what_comes_in_one_read_goes_out_as_one_chunk(run: Rig) -> None:
    client, child = uploading(run, CHUNKED)
    client.send(b"".join(chunk(b"x") for _ in range(100)))
    size = int(child.until(b"\r\n"), 16)
    assert size > 1  # a read that was cut in two makes two


def test_a_small_body_waits_until_it_is_here(run: Rig) -> None:
    client, second = run.connect(), run.connect()
    client.send(announced(1000), b"x" * 999)
    second.send(announced(10 * MIB), b"x" * 64 * KIB)  # to announce much is not to send it
    run.ask(get(b"/livez"))
    assert run.in_flight() == 0
    client.send(b"x")
    assert run.accept().message()[1] == b"x" * 1000


def test_a_body_that_names_the_model_is_read_whole(rig: Rig) -> None:
    client = rig.connect()
    client.send(announced(2 * len(PART)), PART)
    rig.ask(get(b"/livez"))
    assert rig.in_flight() == 0
    client.send(PART)
    assert rig.accept().message()[1] == PART * 2


def test_what_is_pipelined_behind_it_is_answered_behind_it(run: Rig) -> None:
    client, child = uploading(run, announced(len(PART) + 5))
    client.send(b"after" + post(b"/a", b"a") + get(b"/livez") + get(b"/b")[:10])
    assert child.receive(5) == b"after"
    client.send(get(b"/b")[10:])
    assert child.is_quiet()
    for name in (b"read", b"a"):
        child.send(answer(name))
        assert client.message()[1] == name
        if name == b"read":
            assert child.message()[1] == b"a"
    assert client.message()[1] == b'{"status":"ok"}'
    assert child.head().startswith(b"GET /b ")


def test_a_client_that_expects_100_continue_is_told_to_go_on_once(run: Rig) -> None:
    client = run.connect()
    client.send(announced(2 * len(PART), b"Expect: 100-continue"))
    assert client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(PART)
    child = run.accept()
    assert field(child.head(), b"expect") is None
    client.send(PART)
    assert child.receive(2 * len(PART)) == 2 * PART
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_an_http_1_0_client_may_send_a_large_body(run: Rig) -> None:
    client, child = uploading(run, announced(len(PART) + 1).replace(b"HTTP/1.1", b"HTTP/1.0"))
    client.send(b"x")
    assert child.receive(1) == b"x"
    child.send(answer(b"read"))
    head, body = client.message()
    assert (field(head, b"connection"), body) == (b"close", b"read")
    assert client.sees_the_end()


def fills(rig: Rig, client: Wire) -> int:
    """The only client, after its first part, sends until it is paused. How much it has sent in all."""
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    client.sock.setblocking(False)
    sent, full = len(PART), 0
    while full < 3:  # three looks in a row find every buffer full, and that not taken for the client's fault
        try:
            sent += client.sock.send(b"x" * (64 * KIB))
            full = 0
        except BlockingIOError:
            full = full + 1 if rig.call(lambda: connection._deadline) == float("inf") else 0
        assert sent < 31 * MIB
    client.sock.settimeout(PATIENCE_S)
    return sent


def sends(client: Wire, child: Wire, size: int) -> None:
    """The client sends ``size`` bytes, and the child reads them."""
    while size:
        part = b"x" * min(MIB, size)
        client.send(part)
        assert child.receive(len(part)) == part
        size -= len(part)


def test_a_child_that_does_not_read_pauses_the_client(run: Rig) -> None:
    client, child = uploading(run, announced(31 * MIB))
    sent = fills(run, client)
    assert sent < 24 * MIB  # buffers of the kernel, and little of ours
    child.receive(sent - len(PART))
    sends(client, child, 31 * MIB - sent)
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_only_so_many_at_a_time_hold_a_connection_while_they_come(make_rig: MakeRig) -> None:
    rig = make_rig(config(uploads=2))
    first, second = (uploading(rig) for _ in range(2))
    third = rig.connect()
    third.send(announced(2 * len(PART)), PART)
    rig.ask(get(b"/livez"))
    assert (rig.in_flight(), uploads(rig)) == (2, 2)
    first[0].close()
    assert first[1].sees_the_end()
    second[0].send(PART * 15)
    second[1].receive(15 * len(PART))
    second[1].send(answer())
    second[0].message()
    assert uploads(rig) == 0
    third.send(PART)
    assert second[1].message()[1] == PART * 2  # whole, over the connection that came free


# --- what ends it


def test_a_chunked_body_that_grows_too_large_ends_at_the_child_and_is_a_413(make_rig: MakeRig) -> None:
    rig = make_rig(config(body_bytes=200 * KIB))
    client, child = uploading(rig, CHUNKED)
    client.send(chunk(PART))
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (413, b"close")
    assert json.loads(body)["error"]["cause"] == "body_limit"
    assert len(child.rest()) <= 200 * KIB
    assert client.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("refused", 413)
    assert (rig.in_flight(), uploads(rig)) == (0, 0)


def test_a_body_that_is_no_chunk_ends_at_the_child_and_is_a_400(run: Rig) -> None:
    client, child = uploading(run, CHUNKED)
    client.send(b"nonsense\r\n" + get(b"/never"))
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (400, b"close")
    assert child.sees_the_end()
    assert client.sees_the_end()


def test_a_body_that_stops_is_a_408(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=100.0))
    client, child = uploading(rig)
    clock.pass_until_heard(client, 60.0)
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (408, b"close")
    assert json.loads(body)["error"]["message"] == "the request's body took too long"
    assert child.sees_the_end()
    assert rig.record().outcome == "refused"


def test_a_body_that_trickles_in_gets_no_more_time(make_rig: MakeRig, clock: Clock) -> None:
    """It holds a thread of llama-server's."""
    rig = make_rig(config(body_idle_s=100.0))
    client, _ = uploading(rig)
    client.sock.settimeout(0.01)
    answered = b""
    while not answered:
        client.send(b"x")
        clock.pass_s(30.0)
        try:
            answered = client.sock.recv(100)
        except TimeoutError:
            continue
    assert status(answered) == 408


def slowly(rig: Rig, clock: Clock, step_s: float) -> tuple[Wire, Wire]:
    """A client that has sent four parts, with a pause before all but the first."""
    client, child = uploading(rig, announced(5 * len(PART)))
    for _ in range(3):
        clock.pass_s(step_s)
        client.send(PART)
        assert child.receive(len(PART)) == PART
    return client, child


@pytest.mark.check("X8", "408 for a forwarded body, too, when its average rate is below 16 KiB per second")
def test_a_body_that_is_sent_on_has_a_total_deadline(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=1 * MIB))
    client, child = slowly(rig, clock, 300.0)
    clock.pass_s(200.0)  # 1,100 s in all, and 200 s since its last piece
    assert status(client.message()[0]) == 408
    assert child.sees_the_end()


def test_a_body_that_is_sent_on_and_keeps_its_pace_is_served(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=64))  # time for 2,048 s more with each part
    client, child = slowly(rig, clock, 900.0)
    client.send(PART)
    assert child.receive(len(PART)) == PART
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_the_time_in_which_the_child_does_not_read_is_not_the_clients(
    make_rig: MakeRig, clock: Clock
) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=1 * MIB))
    client, child = uploading(rig, announced(31 * MIB))
    sent = fills(rig, client)
    clock.pass_s(100_000.0)
    child.receive(sent - len(PART))
    sends(client, child, 31 * MIB - sent - 1)
    clock.pass_s(500.0)
    sends(client, child, 1)
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_a_body_that_is_read_whole_after_a_crash_has_its_time_again(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=1 * MIB))
    client, child = slowly(rig, clock, 300.0)
    ends(rig)
    assert child.sees_the_end()
    clock.pass_s(200.0)
    client.send(PART)
    wait_until(rig, 1)
    serves(rig)
    again = rig.accept()
    assert again.message()[1] == PART * 5
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"


def test_a_client_that_leaves_in_mid_body_ends_the_childs_connection(run: Rig) -> None:
    client, child = uploading(run)
    client.close()
    assert child.sees_the_end()
    record = run.record()
    assert (record.outcome, record.status) == ("client_gone", 499)
    assert (run.in_flight(), uploads(run)) == (0, 0)


# --- answered before the body is whole


def test_an_early_answer_passes_at_once_and_both_connections_end(run: Rig) -> None:
    client, child = uploading(run)
    child.send(answer(b'{"error":1}', code=b"400 Bad Request"))
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (400, b"close")
    assert body == b'{"error":1}'
    client.send(PART)  # read and dropped, so that the client reads its answer before any reset
    assert client.sees_the_end()
    assert child.sees_the_end()
    assert run.record().outcome == "ok"
    assert uploads(run) == 0


@pytest.mark.parametrize("code", [b"401 Unauthorized", b"404 Not Found", b"403 Forbidden"])
def test_an_answer_of_a_child_that_has_closed_its_connection_unread_is_not_lost(
    run: Rig, code: bytes
) -> None:
    """As llama-server does when a request's head is enough to refuse it (b11434)."""
    client = run.connect()
    client.send(announced(16 * len(PART)), PART)
    child = run.accept()
    child.head()
    (connection,) = run.call(lambda: tuple(run.proxy.clients))
    assert isinstance(connection, Downstream)

    def meanwhile() -> None:  # nothing of it is read before the next write fails
        child.send(answer(b"refused", code=code))
        child.close()
        connection.data_received(PART)

    run.call(meanwhile)
    head, body = client.message()
    assert head.startswith(b"HTTP/1.1 " + code)
    assert body == b"refused"
    assert client.sees_the_end()


def test_a_stream_may_begin_before_the_body_is_whole(run: Rig) -> None:
    client, child = uploading(run)
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    assert field(client.head(), b"connection") == b"close"
    assert client.until(b"1\n\n\r\n") == chunk(b"data: 1\n\n")
    client.send(PART * 15)
    assert child.receive(15 * len(PART)) == PART * 15
    child.send(b"0\r\n\r\n")
    assert client.rest() == b"0\r\n\r\n"
    assert child.sees_the_end()


def test_a_body_that_breaks_after_its_answer_has_begun_breaks_the_answer(run: Rig) -> None:
    client, child = uploading(run, CHUNKED)
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    client.head()
    client.send(b"nonsense\r\n")
    assert client.receive(4) == b"half"
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert child.sees_the_end()


def test_a_child_that_breaks_off_is_a_502_or_503_and_the_connection_ends(run: Rig) -> None:
    client = run.connect()
    client.send(get(b"/v1/streams/lookup", b"Content-Length: 1000000", method=b"POST"), PART)
    child = run.accept()
    child.head()
    child.close()
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (502, b"close")
    assert client.sees_the_end()


# --- sent again


def test_a_body_that_was_sent_on_is_sent_again_after_a_crash(run: Rig) -> None:
    client, child = uploading(run, announced(2 * len(PART)))
    client.send(PART)
    child.receive(len(PART))
    ends(run)
    new: Endpoint = serves(run)
    again = run.accept()
    assert again.message()[1] == PART * 2
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    record = run.record()
    assert (record.generation, record.replayed) == (new.generation, True)


@pytest.mark.parametrize("head", [announced(2 * len(PART)), CHUNKED], ids=["length", "chunked"])
def test_a_crash_in_mid_body_has_it_read_whole_and_sent_to_the_next(run: Rig, head: bytes) -> None:
    client, child = uploading(run, head)
    ends(run)
    assert child.sees_the_end()
    assert uploads(run) == 0
    client.send(*(chunk(PART), b"0\r\n\r\n") if head == CHUNKED else (PART,))
    wait_until(run, 1)
    serves(run)
    again = run.accept()
    head, body = again.message()
    assert body == PART * 2
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    assert not run.record().replayed  # the one that ended had not begun with it


def test_the_copy_of_a_body_that_was_sent_on_counts_until_its_answer_begins(run: Rig) -> None:
    client, child = uploading(run, announced(2 * len(PART)))
    client.send(PART)
    child.receive(len(PART))
    bodies = run.proxy.bodies
    assert run.call(lambda: bodies.held_bytes) == 2 * len(PART)
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"
    assert run.call(lambda: bodies.held_bytes) == 0


def test_without_memory_for_a_copy_a_body_is_not_sent_again(make_rig: MakeRig) -> None:
    rig = make_rig(config(bodies_bytes=len(PART)))
    client, child = uploading(rig, announced(2 * len(PART)))
    client.send(PART)
    child.receive(len(PART))
    assert rig.call(lambda: rig.proxy.bodies.held_bytes) == 0
    ends(rig)
    assert status(client.message()[0]) == 503
    assert rig.record().outcome == "revoked"


def test_a_body_larger_than_what_is_kept_is_not_sent_again(run: Rig) -> None:
    client, child = uploading(run)
    client.send(PART * 15)
    child.receive(15 * len(PART))
    ends(run)
    head, body = client.message()
    assert status(head) == 503
    assert json.loads(body)["error"]["message"] == "llama-server was killed"
    assert run.record().outcome == "revoked"


def test_no_more_of_it_is_held_than_that(run: Rig) -> None:
    client, child = uploading(run)
    client.send(PART * 14)
    child.receive(14 * len(PART))
    (connection,) = run.call(lambda: tuple(run.proxy.clients))
    assert isinstance(connection, Downstream)
    request = run.call(lambda: connection._reader.partial)
    assert request is not None
    assert connection._upload is not None
    assert run.call(connection._upload._received) == b""
    assert (request.body, request._received) == (b"", None)
    client.send(PART)
    child.receive(len(PART))
    child.send(answer())
    client.message()


def test_a_connection_that_the_child_was_closing_is_replaced(run: Rig) -> None:
    client = run.connect()
    client.send(get())
    stale = run.accept()
    stale.head()
    stale.send(answer())
    client.message()
    client.send(announced(2 * len(PART)), PART)
    stale.head()
    stale.close()
    fresh = run.accept()
    assert fresh.head().startswith(b"POST ")
    client.send(PART)
    assert fresh.receive(2 * len(PART)) == PART * 2
    fresh.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_while_nothing_serves_it_is_read_whole_and_waits(run: Rig) -> None:
    becomes(run, LOADING)
    client = run.connect()
    client.send(announced(2 * len(PART)), PART)
    run.ask(get(b"/livez"))
    client.send(PART)
    wait_until(run, 1)
    serves(run)
    child = run.accept()
    assert child.message()[1] == PART * 2
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"


def test_a_server_that_cannot_be_reached_has_it_read_whole(run: Rig) -> None:
    run.stop_listening()
    client = run.connect()
    client.send(announced(2 * len(PART)), PART)
    run.ask(get(b"/livez"))
    run.listen_again()
    client.send(PART)
    child = run.accept()
    assert child.message()[1] == PART * 2
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"


def test_a_stop_in_mid_body_is_told_at_once(run: Rig) -> None:
    client, child = uploading(run, announced(2 * len(PART)))
    becomes(run, STOPPING)
    ends(run, STOPPING)
    assert child.sees_the_end()
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (503, b"close")


def test_nothing_is_left_when_the_proxy_closes_in_mid_body(run: Rig) -> None:
    client, child = uploading(run)
    run.close_proxy()
    assert child.sees_the_end()
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert (run.in_flight(), run.proxy.uploads) == (0, 0)


def test_a_client_may_end_its_connection_by_a_reset_while_it_is_paused(run: Rig) -> None:
    client, child = uploading(run, announced(31 * MIB))
    client.sock.setblocking(False)
    sent = len(PART)
    with pytest.raises(BlockingIOError):
        while True:
            sent += client.sock.send(b"x" * 64 * KIB)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    child.rest()  # what was on its way, and then the end
    assert run.record().outcome == "client_gone"


def test_a_crash_in_mid_body_does_not_cost_its_key_another_turn(make_rig: MakeRig) -> None:
    key_file = keys_of("secret name=one concurrent=1")
    rig = make_rig(ProxyConfig(key_file=key_file, route_by_model=False))
    authorized = b"Authorization: Bearer secret"
    client, _ = uploading(rig, announced(2 * len(PART), authorized))
    ends(rig)
    serves(rig)
    client.send(PART)
    again = rig.accept()
    assert again.message()[1] == PART * 2
    second = rig.connect()
    second.send(post(CHAT, b"{}", authorized))
    assert status(second.message()[0]) == 429  # the first is being served, and takes the only turn
    again.send(answer())
    assert status(client.message()[0]) == 200
    client.send(post(CHAT, b"{}", authorized))
    again.message()
    again.send(answer())
    assert status(client.message()[0]) == 200


@pytest.mark.parametrize("whole", [False, True], ids=["in mid-body", "behind its body"])
def test_a_client_that_leaves_after_a_crash_in_mid_body_leaves_its_keys_turn(
    make_rig: MakeRig, *, whole: bool
) -> None:
    key_file = keys_of("secret name=one concurrent=1")
    rig = make_rig(ProxyConfig(key_file=key_file, route_by_model=False))
    authorized = b"Authorization: Bearer secret"
    client, child = uploading(rig, announced(2 * len(PART), authorized))
    ends(rig)
    assert child.sees_the_end()
    if whole:
        client.send(PART)
        wait_until(rig, 1)
    client.close()
    record = rig.record()
    assert (record.status, record.outcome, record.client) == (499, "client_gone", "key:one")
    serves(rig)
    second = rig.connect()
    second.send(post(CHAT, b"{}", authorized))
    again = rig.accept()
    again.message()
    again.send(answer())
    assert status(second.message()[0]) == 200
