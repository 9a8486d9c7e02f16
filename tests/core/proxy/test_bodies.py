"""Memory for request bodies has limits, in total and by client; key limits count from the head on (X8)."""

from __future__ import annotations

import json
import sys

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HeadRules
from llamasup.core.proxy import Limits, ProxyConfig, context
from llamasup.core.proxy.bodies import Bodies
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.request import UNREAD, Request
from llamasup.core.proxy.upload import Upload
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import (
    CHAT,
    Clock,
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
from tests.core.proxy.test_keys import bearer, chat

KIB = 1 << 10
BOUNDS = Limits(
    body_bytes=100 * KIB, bodies_bytes=260 * KIB, bodies_per_client_bytes=150 * KIB, small_body_bytes=10 * KIB
)


def send_part(rig: Rig, size: int, *, of: int = 100 * KIB, source: str = "127.0.0.1") -> Wire:
    """A client that has sent ``size`` bytes of a body, which the proxy has read."""
    before = held_bytes(rig)
    client = rig.send(post(CHAT, b"x" * of)[: size - of], source=source)
    eventually(lambda: held_bytes(rig) == before + size)
    return client


def held_bytes(rig: Rig) -> int:
    return rig.call(lambda: rig.proxy.bodies.held_bytes)


@pytest.fixture
def bounded(make_rig: MakeRig) -> Rig:
    return make_rig(ProxyConfig(limits=BOUNDS))


@pytest.mark.check("X8", "429 client_bodies_limit above two of the largest bodies")
def test_bodies_of_one_client_may_use_half_of_the_memory(bounded: Rig) -> None:
    first = send_part(bounded, 90 * KIB)
    client = bounded.send(post(CHAT, b"x" * (100 * KIB))[:-1])
    head, body = client.message()
    assert (status(head), field(head, b"retry-after")) == (429, b"1")
    assert json.loads(body)["error"]["cause"] == "client_bodies_limit"
    other = bounded.send(post(CHAT, b"y" * (100 * KIB)), source="127.0.0.2")
    bounded.accept().message()
    first.close()
    other.close()
    eventually(lambda: held_bytes(bounded) == 0)


@pytest.mark.check("X8", "503 bodies_limit above four of the largest bodies")
def test_all_bodies_have_a_limit_that_excludes_small_ones(bounded: Rig) -> None:
    clients = [
        send_part(bounded, 85 * KIB, of=90 * KIB, source=f"127.0.0.{number}") for number in range(2, 5)
    ]
    client = bounded.send(post(CHAT, b"x" * (20 * KIB))[:-1])
    head, body = client.message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    assert json.loads(body)["error"]["cause"] == "bodies_limit"
    small = bounded.connect()
    request = post(CHAT, b"s" * (10 * KIB))
    small.send(request[:-1])
    small.send(request[-1:])
    child = bounded.accept()
    assert child.message()[1] == b"s" * (10 * KIB)
    child.send(answer(b"small"))
    assert small.message()[1] == b"small"
    clients[0].send(b"x" * (5 * KIB))
    child.message()
    child.send(answer(b"large"))
    assert clients[0].message()[1] == b"large"
    clients[1].close()
    clients[2].close()
    eventually(lambda: held_bytes(bounded) == 0)


def test_chunked_body_counts_as_it_arrives(bounded: Rig) -> None:
    clients = [
        send_part(bounded, 85 * KIB, of=90 * KIB, source=f"127.0.0.{number}") for number in range(2, 5)
    ]
    client = bounded.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
    for _ in range(4):
        client.send(chunk(b"x" * (5 * KIB)))
    assert error_of(client, 503)["cause"] == "bodies_limit"
    for other in clients:
        other.close()
    eventually(lambda: held_bytes(bounded) == 0)


def test_body_counts_until_its_answer_begins(bounded: Rig) -> None:
    client = send_part(bounded, 90 * KIB)
    client.send(b"x" * (10 * KIB))
    child = bounded.accept()
    child.message()
    assert held_bytes(bounded) == 90 * KIB  # the last read is not counted
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n1")
    client.until(b"1")
    eventually(lambda: held_bytes(bounded) == 0)
    client.close()


@pytest.mark.check("X8")
def test_memory_is_returned_while_a_body_is_held(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(context, "give_memory_back", lambda: returned.append(True))
    rig = make_rig(ProxyConfig(limits=replace(BOUNDS, sweep_s=0.01)))
    others = [send_part(rig, 85 * KIB, source=f"127.0.0.{number}") for number in (2, 3)]
    stays = send_part(rig, 30 * KIB, of=40 * KIB)
    for other in others:
        other.close()
    eventually(lambda: bool(returned))
    assert held_bytes(rig) == 30 * KIB
    stays.close()
    eventually(lambda: held_bytes(rig) == 0)


def test_memory_is_returned_when_half_of_the_peak_is_free() -> None:
    bodies = Bodies(Limits(body_bytes=10 * KIB, small_body_bytes=0))

    def holds(size: int) -> Request:
        request = Request(UNREAD, b"id", keep_alive=True)
        request.body_bytes = size
        assert bodies.hold(request, None) is None
        return request

    first, second, third, fourth = (holds(size * KIB) for size in (30, 30, 30, 9))
    bodies.drop(first)
    assert not bodies.may_return_memory()  # 69 of 99 KiB
    bodies.drop(second)
    assert bodies.may_return_memory()
    assert not bodies.may_return_memory()
    bodies.drop(fourth)
    bodies.drop(third)
    assert bodies.may_return_memory()
    bodies.drop(holds(9 * KIB))
    assert not bodies.may_return_memory()  # less than 10 KiB


def sends_with_one_read(rig: Rig, size: int, source: str) -> Wire:
    before = rig.call(lambda: set(rig.proxy.clients))
    client = rig.connect(source=source)
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) > len(before))
    (connection,) = rig.call(lambda: set(rig.proxy.clients)) - before
    assert isinstance(connection, Downstream)
    rig.call(lambda: connection.data_received(post(CHAT, b"x" * size)))
    return client


@pytest.mark.check("X8")
def test_body_that_arrives_in_one_read_is_counted(bounded: Rig) -> None:
    clients = [send_part(bounded, 85 * KIB, of=90 * KIB, source=f"127.0.0.{number}") for number in (2, 3)]
    first = sends_with_one_read(bounded, 80 * KIB, "127.0.0.4")
    child = bounded.accept()
    child.message()
    assert held_bytes(bounded) == (85 + 85 + 80) * KIB
    assert error_of(sends_with_one_read(bounded, 20 * KIB, "127.0.0.5"), 503)["cause"] == "bodies_limit"
    child.send(answer())
    first.message()
    assert held_bytes(bounded) == 2 * 85 * KIB
    for client in clients:
        client.close()
    eventually(lambda: held_bytes(bounded) == 0)


TINY = chunk(b"xx") * (10 * KIB)


def size_of(value: object) -> int:
    """Bytes of memory, including the items of a list."""
    return sys.getsizeof(value) + (sum(map(size_of, value)) if isinstance(value, list) else 0)


def memory_of(rig: Rig) -> int:
    """Bytes of memory for the received data of the only connection."""

    def memory() -> int:
        (connection,) = rig.proxy.clients
        assert isinstance(connection, Downstream)
        request = connection._reader.partial
        parts: list[object] = [connection._unparsed]
        for holder in (request, connection._upload):
            if isinstance(holder, Request | Upload):
                names = getattr(holder, "__struct_fields__", None) or vars(holder)
                parts += [getattr(holder, name, None) for name in names]
        return sum(size_of(part) for part in parts if isinstance(part, bytes | bytearray | list))

    return rig.call(memory)


def received(rig: Rig) -> int:
    """Bytes of the body that the only connection is reading."""

    def count() -> int:
        for connection in rig.proxy.clients:
            if isinstance(connection, Downstream) and connection._reader.partial is not None:
                return connection._reader.partial.body_bytes
        return 0

    return rig.call(count)


@pytest.mark.check("X8", "less than twice their length")
@pytest.mark.parametrize("route_by_model", [True, False], ids=["buffered", "forwarded"])
def test_body_in_tiny_chunks_takes_no_extra_memory(make_rig: MakeRig, *, route_by_model: bool) -> None:
    limits = Limits(stream_above_bytes=1 * KIB)
    rig = make_rig(ProxyConfig(route_by_model=route_by_model, limits=limits))
    client = rig.connect()
    head = get(CHAT, b"Transfer-Encoding: chunked", method=b"POST")
    client.send(head, chunk(b"x" * (2 * KIB)))
    if not route_by_model:
        rig.accept().head()
    client.send(TINY)
    eventually(lambda: received(rig) == 22 * KIB)
    assert 22 * KIB < memory_of(rig) < 44 * KIB


def test_pipelined_requests_in_tiny_reads_take_no_extra_memory(rig: Rig) -> None:
    rig.send(post(CHAT, b"{}"))
    rig.accept().message()
    before = memory_of(rig)
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    for _ in range(1000):
        rig.call(lambda: connection.data_received(b"x"))
    assert memory_of(rig) - before < 2000


@pytest.mark.check("X8", "413 above 64 KiB")
@pytest.mark.parametrize("path", [b"/health", b"/v1/health", b"/livez", b"/readyz", b"/llm/health"])
@pytest.mark.parametrize("framing", ["announced", "chunked"])
def test_client_without_a_key_cannot_send_a_large_body(make_rig: MakeRig, path: bytes, framing: str) -> None:
    rules = HeadRules(prefix=b"/llm" if path.startswith(b"/llm") else b"")
    rig = make_rig(ProxyConfig(key_file=keys_of("one name=one"), limits=BOUNDS, rules=rules))
    client = rig.connect()
    if framing == "announced":
        client.send(get(path, b"Content-Length: %d" % (10 * KIB + 1)))
    else:
        client.send(get(path, b"Transfer-Encoding: chunked"), chunk(b"x" * (9 * KIB)))
        client.send(chunk(b"x" * (2 * KIB)))
    error = error_of(client, 413)
    assert (error["cause"], held_bytes(rig)) == ("body_limit", 0)
    assert rig.backend.requested_models == []


def test_client_without_a_key_may_send_a_small_body_to_a_public_path(make_rig: MakeRig) -> None:
    rig = limited(make_rig, "")
    client = rig.connect()
    request = get(b"/livez", b"Content-Length: 10000") + b"x" * 10_000
    client.send(request[:5000])
    eventually(lambda: received(rig) > 0)
    client.send(request[5000:])
    assert status(client.message()[0]) == 200


def test_client_with_a_key_may_send_a_large_body(make_rig: MakeRig) -> None:
    rig = limited(make_rig, "")
    client = rig.send(post(CHAT, b"x" * (100 * KIB), bearer(b"one")))
    child = rig.accept()
    assert len(child.message()[1]) == 100 * KIB
    child.send(answer())
    assert status(client.message()[0]) == 200


def limited(make_rig: MakeRig, limits: str) -> Rig:
    return make_rig(ProxyConfig(key_file=keys_of(f"one name=one {limits}"), limits=BOUNDS))


def in_flight(rig: Rig) -> int:
    quotas = rig.proxy.keys._quotas
    return rig.call(lambda: quotas["one"].in_flight if "one" in quotas else 0)


@pytest.mark.check("X8", "429 before the body is read")
@pytest.mark.parametrize("sent", [0, 1, 90 * KIB])
def test_request_counts_for_its_key_while_its_body_arrives(make_rig: MakeRig, sent: int) -> None:
    rig = limited(make_rig, "concurrent=1")
    request = post(CHAT, b"x" * (100 * KIB), bearer(b"one"))
    first = rig.send(request[: sent - 100 * KIB])
    eventually(lambda: in_flight(rig) == 1)
    second = rig.send(
        get(CHAT, bearer(b"one"), b"Content-Length: 102400", b"Expect: 100-continue", method=b"POST")
    )
    assert error_of(second, 429)["cause"] == "key_concurrent"  # and no 100 Continue
    assert second.sees_the_end()
    first.send(request[sent - 100 * KIB :])
    child = rig.accept()
    child.message()
    child.send(answer())
    assert status(first.message()[0]) == 200
    eventually(lambda: in_flight(rig) == 0)


@pytest.mark.parametrize("limits", ["rpm=1", "tpm=1"])
def test_key_over_its_limit_is_refused_before_the_body_arrives(make_rig: MakeRig, limits: str) -> None:
    rig = limited(make_rig, limits)
    first, child = rig.begin(chat(b"one"))
    child.send(answer(b'{"usage":{"prompt_tokens":9,"completion_tokens":9}}'))
    first.message()
    second = rig.send(get(CHAT, bearer(b"one"), b"Content-Length: 1000", method=b"POST"))
    assert str(error_of(second, 429)["cause"]) in ("key_requests", "key_tokens")


@pytest.mark.parametrize(
    "ends", ["leaves", "half-closes", "resets", "malformed", "too large", "too slow", "closed"]
)
def test_request_that_ends_during_its_body_leaves_its_quota_once(make_rig: MakeRig, ends: str) -> None:
    limits = Limits(body_bytes=100 * KIB, small_body_bytes=10 * KIB, body_idle_s=0.3, sweep_s=0.01)
    config = ProxyConfig(key_file=keys_of("one name=one concurrent=2"), limits=limits)
    rig = make_rig(config if ends == "too slow" else ProxyConfig(key_file=config.key_file, limits=BOUNDS))
    client = rig.send(
        get(CHAT, bearer(b"one"), b"Transfer-Encoding: chunked", method=b"POST"), chunk(b"x" * (20 * KIB))
    )
    eventually(lambda: in_flight(rig) == 1)
    match ends:
        case "leaves":
            client.close()
        case "half-closes":
            client.sock.shutdown(1)
        case "resets":
            client.sock.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
            client.close()
        case "malformed":
            client.send(b"no chunk\r\n")
            error_of(client, 400)
        case "too large":
            for _ in range(4):
                client.send(chunk(b"x" * (25 * KIB)))
            error_of(client, 413)
        case "too slow":
            error_of(client, 408)
        case _:
            rig.close_proxy()
    eventually(lambda: in_flight(rig) == 0)
    eventually(lambda: held_bytes(rig) == 0)
    client.close()
    eventually(lambda: len(rig.proxy.clients) == 0)
    assert in_flight(rig) == 0


# --- how long a body may take


@pytest.mark.check("X8", "408 below 16 KiB/s")
def test_body_below_the_minimum_rate_is_a_408(make_rig: MakeRig) -> None:
    limits = Limits(body_idle_s=0.5, body_rate_bytes=1 << 20, sweep_s=0.01)
    rig = make_rig(ProxyConfig(limits=limits))
    client = rig.send(get(CHAT, b"Content-Length: 100000", method=b"POST"))
    while rig._records.empty():  # each byte arrives long before ``body_idle_s``
        client.send(b"x")
        assert not rig.call(lambda: rig.endpoint.in_flight)
    assert error_of(client, 408)["cause"] == "slow_request"


def test_slow_body_above_the_minimum_rate_is_served(make_rig: MakeRig, clock: Clock) -> None:
    limits = Limits(body_idle_s=30.0, body_rate_bytes=1, sweep_s=0.01)  # time for 100,000 s
    rig = make_rig(ProxyConfig(limits=limits))
    client = rig.send(get(CHAT, b"Content-Length: 100000", method=b"POST"))
    began_s = clock()
    for sent in range(10_000, 100_000, 10_000):
        client.send(b"x" * 10_000)
        eventually(lambda: received(rig) == sent)  # noqa: B023 - called at once
        clock.pass_s(20.0)
    assert clock() > began_s + limits.body_idle_s
    client.send(b"x" * 10_000)
    child = rig.accept()
    assert len(child.message()[1]) == 100_000
    child.send(answer())
    assert status(client.message()[0]) == 200
