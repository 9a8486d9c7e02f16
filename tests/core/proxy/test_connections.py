"""The limits of client connections, and which one is closed for a new one (X8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.connections import REFUSALS, Connections, most_connections
from llamasup.core.proxy.listeners.bind import bind_unix
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, eventually, field, get, post, status

FOUR = ProxyConfig(
    limits=Limits(connections=4, connections_per_client=3)
)  # one client gets at most 2, half of the total


def connect_all(rig: Rig, *clients: str) -> list[Wire]:
    """An idle connection from each address."""
    wires = []
    for address in clients:
        wires.append(rig.connect(source=address))
        wires[-1].send(get(b"/livez"))
        assert status(wires[-1].message()[0]) == 200
    return wires


def busy_connection(rig: Rig, client: str) -> Wire:
    """A connection with a running request."""
    wire = rig.send(post(CHAT, b"{}"), source=client)
    rig.accept().message()
    return wire


KEY = b"Authorization: Bearer sesame"
WITH_A_KEY = replace(FOUR, api_keys=("sesame",))


@pytest.mark.check("X8")
def test_one_client_cannot_have_more_connections_than_its_limit(make_rig: MakeRig) -> None:
    rig = make_rig(FOUR)
    first, second = busy_connection(rig, "127.0.0.2"), busy_connection(rig, "127.0.0.2")
    third = rig.connect(source="127.0.0.2")
    head, body = third.message()
    assert (status(head), field(head, b"connection"), field(head, b"retry-after")) == (429, b"close", b"1")
    assert json.loads(body)["error"]["cause"] == "too_many_connections"
    assert third.sees_the_end()
    connect_all(rig, "127.0.0.3")  # other clients are served
    for wire in (first, second, third):
        wire.close()
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 1)
    connect_all(rig, "127.0.0.2", "127.0.0.2")  # closed connections do not count


@pytest.mark.check("X8")
def test_client_at_its_limit_loses_its_longest_idle_connection(make_rig: MakeRig) -> None:
    rig = make_rig(FOUR)
    other, first, second = connect_all(rig, "127.0.0.3", "127.0.0.2", "127.0.0.2")
    first.send(get(b"/livez"))
    first.message()
    connect_all(rig, "127.0.0.2")
    assert second.sees_the_end()
    for wire in (first, other):
        wire.send(get(b"/livez"))
        assert status(wire.message()[0]) == 200


SILENT = {
    "nothing": b"",
    "a public request": get(b"/livez"),
    "half a head": b"GET /v1/models HTTP/1.1\r\nHost: ",
    "a wrong key": post(CHAT, b"{}", b"Authorization: Bearer wrong"),
    "half a body behind a wrong key": post(CHAT, b"x" * 100, b"Authorization: Bearer wrong")[:-50],
    "half a body for a public path": post(b"/livez", b"x" * 100)[:-50],
}


@pytest.mark.check("X8")
@pytest.mark.parametrize("sent", SILENT.values(), ids=SILENT)
def test_connections_without_a_key_cannot_keep_clients_with_a_key_out(make_rig: MakeRig, sent: bytes) -> None:
    rig = make_rig(WITH_A_KEY)
    known = rig.send(post(CHAT, b"{}", KEY), source="127.0.0.2")
    child = rig.accept()
    child.message()
    child.send(answer())
    known.message()
    unauthenticated = []
    for _ in range(5):  # from one address, whose limit is two
        unauthenticated.append(rig.connect(source="127.0.0.2"))
        unauthenticated[-1].send(sent)
        if sent.startswith(b"GET /livez"):
            unauthenticated[-1].message()
        rig.call(lambda: None)
    other = rig.send(post(CHAT, b"{}", KEY), source="127.0.0.2")
    child.message()
    child.send(answer(b"served"))
    assert other.message()[1] == b"served"
    known.send(post(CHAT, b"{}", KEY))
    child.message()
    child.send(answer(b"again"))
    assert known.message()[1] == b"again"


@pytest.mark.check("X8", "the oldest first")
def test_at_the_total_limit_connections_without_a_key_are_closed_first(make_rig: MakeRig) -> None:
    rig = make_rig(WITH_A_KEY)
    known = rig.send(get(b"/v1/models", KEY), source="127.0.0.2")
    child = rig.accept()
    child.head()
    child.send(answer())
    known.message()
    half = [rig.connect(source=f"127.0.0.{number}") for number in (3, 4, 5)]
    for wire in half:
        wire.send(b"GET /li")
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 4)
    connect_all(rig, "127.0.0.6", "127.0.0.7")
    assert [half[0].sees_the_end(), half[1].sees_the_end()] == [True, True]
    half[2].send(b"vez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(half[2].message()[0]) == 200
    known.send(get(b"/livez"))
    assert status(known.message()[0]) == 200


def test_new_connection_is_refused_if_all_connections_with_key_are_busy(make_rig: MakeRig) -> None:
    rig = make_rig(WITH_A_KEY)
    for _ in range(2):
        rig.send(post(CHAT, b"{}", KEY), source="127.0.0.2")
        rig.accept().message()
    assert status(rig.connect(source="127.0.0.2").message()[0]) == 429


def test_at_total_limit_longest_idle_connection_is_closed(make_rig: MakeRig) -> None:
    rig = make_rig(FOUR)
    one, two, three, four = connect_all(rig, "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
    one.send(get(b"/livez"))  # now ``two`` has the longest idle time
    one.message()
    connect_all(rig, "127.0.0.6")
    assert two.sees_the_end()
    for wire in (one, three, four):
        wire.send(get(b"/livez"))
        assert status(wire.message()[0]) == 200


def test_at_total_limit_silent_connection_is_closed(make_rig: MakeRig) -> None:
    rig = make_rig(FOUR)
    silent = [rig.connect(source=f"127.0.0.{number}") for number in range(2, 6)]
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 4)
    connect_all(rig, "127.0.0.6")
    assert silent[0].sees_the_end()


@pytest.mark.check("X8", "503")
def test_if_all_connections_are_busy_only_the_new_one_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(FOUR)
    half = rig.send(b"GET /li", source="127.0.0.2")
    rig.send(post(CHAT, b"x" * 100)[:-50], source="127.0.0.3")
    running = [busy_connection(rig, client) for client in ("127.0.0.4", "127.0.0.5")]
    eventually(lambda: rig.call(lambda: (len(rig.proxy.clients), len(rig.proxy.clients.idle))) == (4, 0))
    head, text = rig.connect(source="127.0.0.6").message()
    assert (status(head), field(head, b"connection"), field(head, b"retry-after")) == (503, b"close", b"1")
    assert "ulimit" in json.loads(text)["error"]["remedy"]
    half.send(b"vez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(half.message()[0]) == 200
    connect_all(rig, "127.0.0.7")  # replaces ``half``
    assert half.sees_the_end()
    for wire in running:
        assert wire.is_quiet()


@pytest.mark.both_loops
def test_refused_connection_is_closed_after_linger_time(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(connections=2, linger_s=0.1, sweep_s=0.05)))
    busy_connection(rig, "127.0.0.2")
    extra = [rig.connect(source="127.0.0.2") for _ in range(3)]
    for wire in extra:
        assert status(wire.message()[0]) == 429
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 1)


@pytest.mark.both_loops
def test_connection_beyond_open_refusals_is_aborted(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(connections=2, linger_s=60.0)))
    busy_connection(rig, "127.0.0.2")
    first_refused = [rig.connect(source="127.0.0.2") for _ in range(REFUSALS)]
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 1 + REFUSALS)
    assert is_closed_at_once(rig, "127.0.0.2")
    assert status(first_refused[-1].message()[0]) == 429


def is_closed_at_once(rig: Rig, source: str) -> bool:
    """The connection may be closed before connect() has returned (seen on a busy machine)."""
    try:
        wire = rig.connect(source=source)
    except ConnectionResetError:
        return True
    return wire.sees_the_end()


def test_unix_socket_connections_have_no_limit_per_client(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(FOUR, sockets=[bind_unix(str(tmp_path / "front.sock"))])
    wires = [rig.connect() for _ in range(4)]
    for wire in wires:
        wire.send(get(b"/livez"))
        assert status(wire.message()[0]) == 200


@pytest.mark.parametrize(("descriptors", "clients"), [(1024, 448), (20_000, 9_936), (64, 8)])
def test_each_client_needs_two_descriptors_and_some_are_reserved(descriptors: int, clients: int) -> None:
    assert most_connections(descriptors) == clients


def test_decision_takes_constant_time_for_any_number_of_connections() -> None:
    """20,000 connections at the limit are decided at once, without a loop over the others."""

    class Stub:
        closed = 0

        def close_if_idle(self) -> None:
            Stub.closed += 1

        def abort(self) -> None: ...

        def sweep(self, now: float) -> None: ...

        def live(self, now: float) -> None: ...

        def held_slots(self) -> None: ...

        def waits_since(self) -> float:
            return 0.0

        def interrupt(self, error: HttpError, outcome: str) -> None: ...

    for unauthenticated in (False, True):
        Stub.closed = 0
        connections = Connections(Limits(connections=5_000, connections_per_client=10))
        clients = [f"10.0.{number % 4096}" for number in range(20_000)]
        refused = [connections.enter(Stub(), client, unauthenticated=unauthenticated) for client in clients]
        assert refused.count(None) == len(refused)
        assert Stub.closed == 15_000
