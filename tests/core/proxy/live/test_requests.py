"""The requests in flight, as the control API lists them, and their cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from time import monotonic

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.answers import SlotProgress
from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.live.requests import MAX_ENDED, LiveRequests
from llamasup.core.proxy.live.state import LivePhase, LiveRequest
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.errors import RequestUnknown
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, error_of, eventually, get, post, status, streaming

LOADING = HttpError(503, "Loading model", cause="loading", retry_after_s=12.0, queueable=True)


class LiveView:
    """The live requests of a rig. ``slots``: what the llama-server answers."""

    def __init__(
        self, rig: Rig, clock: Callable[[], float] | None = None, *, needs_key: bool = False
    ) -> None:
        self.slots: Sequence[SlotProgress] | None = ()
        self.queries = 0
        self.rig = rig
        self.now_s: float | None = None

        async def query_slots(endpoint: Endpoint) -> Sequence[SlotProgress] | None:
            assert endpoint is rig.endpoint
            self.queries += 1
            return self.slots

        self.live = LiveRequests(rig.proxy.clients, query_slots, needs_key=lambda: needs_key)

    def requests(self) -> tuple[LiveRequest, ...]:
        self.live._answered_s = float("-inf")  # as if the last query was long ago
        return self.rig.complete(self.live.in_flight())

    def only(self) -> LiveRequest:
        (request,) = self.requests()
        return request

    def until(self, phase: LivePhase) -> LiveRequest:
        eventually(lambda: [request.phase for request in self.requests()] == [phase])
        return self.only()

    def cancel(self, request_id: str) -> tuple[LiveRequest, ...]:
        return self.rig.call(lambda: self.live.cancel(request_id))


def ended(client: Wire) -> dict[str, object]:
    """The error object of a client whose request was cancelled."""
    return error_of(client, 499)


# --- phases


def test_stream_at_its_prompt(make_rig: MakeRig) -> None:
    rig = make_rig()
    view = LiveView(rig)
    assert view.requests() == ()
    client, child = rig.begin(post(CHAT, b'{"stream":true}', b"X-Request-Id: mine"))
    view.slots = [SlotProgress(3, 100, 40, 0)]
    shown = view.only()
    assert (shown.id, shown.method, shown.path, shown.model) == ("mine", "POST", CHAT.decode(), "tiny")
    assert (shown.phase, shown.percent, shown.tokens_prompt) == (LivePhase.PROMPT, 40.0, 100)
    assert (shown.generation, shown.bytes_in, shown.key, shown.client) == (1, 15, None, "127.0.0.1")
    child.send(answer(b'{"choices":[]}'))
    client.message()
    rig.record()
    assert view.requests() == ()


def test_slots_are_held_from_the_permit_to_the_end(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("infer name=phone")))
    view = LiveView(rig)
    client, child = rig.begin(post(CHAT, b'{"stream":true}', b"x-api-key: infer"))
    (held,) = rig.call(view.live.held_slots)
    assert (held.model, held.client, held.slots) == ("tiny", "key:phone", 1)
    assert 0.0 < held.since_s <= monotonic()
    assert rig.call(view.live.waiting_since) == []
    child.send(answer(b'{"choices":[]}'))
    client.message()
    assert rig.record().client == held.client
    assert rig.call(view.live.held_slots) == []


def test_request_that_waits_holds_no_slot(make_rig: MakeRig) -> None:
    rig = make_rig()
    view = LiveView(rig)
    rig.call(lambda: setattr(rig.backend, "unavailable", LOADING))
    rig.send(post(CHAT, b"{}"))
    view.until(LivePhase.LOADING)
    assert rig.call(view.live.held_slots) == []
    (since_s,) = rig.call(view.live.waiting_since)
    assert 0.0 < since_s <= monotonic()


def test_stream_that_has_begun(make_rig: MakeRig) -> None:
    rig = make_rig()
    view = LiveView(rig)
    streaming(rig)
    view.slots = [SlotProgress(4, 100, 100, 6)]
    shown = view.only()
    assert (shown.phase, shown.percent, shown.tokens_completion) == (LivePhase.GENERATING, None, 6)
    assert shown.bytes_out > 0
    assert shown.tokens_per_s is not None


def test_plain_request_generates_as_soon_as_its_slot_does(make_rig: MakeRig) -> None:
    """Its speed is known at the second query: nothing counts its tokens before."""
    rig = make_rig()
    view = LiveView(rig)
    rig.begin(post(CHAT, b"{}"))
    view.slots = [SlotProgress(1, 10, 10, 5)]
    first = view.only()
    assert (first.phase, first.tokens_completion, first.tokens_per_s) == (LivePhase.GENERATING, 5, None)
    view.slots = [SlotProgress(1, 10, 10, 25)]
    assert (view.only().tokens_per_s or 0.0) > 0.0


def test_server_without_slots_shows_no_tokens(make_rig: MakeRig) -> None:
    rig = make_rig()
    view = LiveView(rig)
    rig.begin(post(CHAT, b"{}"))
    view.slots = None
    shown = view.only()
    assert (shown.phase, shown.tokens_prompt, shown.tokens_completion) == (LivePhase.PROMPT, None, None)


def test_request_that_waits_for_its_model(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.call(lambda: setattr(rig.backend, "unavailable", LOADING))
    rig.send(post(CHAT, b"{}"))
    shown = LiveView(rig).until(LivePhase.LOADING)
    assert (shown.model, shown.position, shown.expected_wait_s) == ("tiny", 1, 12.0)


def test_request_that_waits_for_a_slot(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent=1)
    rig.call(lambda: setattr(rig.endpoint, "held_s", 4.0))
    rig.begin(post(CHAT, b"{}"))
    rig.send(post(CHAT, b"{}", b"X-Request-Id: second"), source="127.0.0.2")
    view = LiveView(rig)
    eventually(lambda: len(view.requests()) == 2)
    second = next(request for request in view.requests() if request.id == "second")
    assert (second.phase, second.position, second.expected_wait_s) == (LivePhase.QUEUED, 1, 4.0)
    assert second.client == "127.0.0.2"


def test_body_that_arrives(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.send(post(CHAT, b"{}" * 100)[:-50])
    shown = LiveView(rig).until(LivePhase.SENDING)
    assert (shown.bytes_in, shown.position) == (150, None)


def test_body_that_is_forwarded_while_it_arrives(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False, limits=Limits(stream_above_bytes=100)))
    rig.send(post(CHAT, b" " * 1000)[:-50])
    rig.accept().head()
    shown = LiveView(rig).until(LivePhase.SENDING)
    assert (shown.model, shown.bytes_in) == ("tiny", 950)


def test_work_without_a_slot(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.begin(post(b"/tokenize", b"{}"))
    view = LiveView(rig)
    assert view.only().phase is LivePhase.ANSWERING
    assert view.queries == 0


def test_name_of_the_key_is_shown_and_not_the_key(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("secret name=phone")))
    rig.begin(post(CHAT, b"{}", b"Authorization: Bearer secret"))
    shown = LiveView(rig).only()
    assert shown.key == "phone"
    assert "secret" not in repr(shown)


# --- queries


def test_two_queries_read_the_slots_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    view = LiveView(rig)
    rig.begin(post(CHAT, b"{}"))

    async def both() -> None:
        await asyncio.gather(view.live.in_flight(), view.live.in_flight())

    rig.complete(both())
    assert view.queries == 1


def test_slots_of_short_requests_are_not_read_for_a_settled_view(make_rig: MakeRig) -> None:
    rig = make_rig()
    view = LiveView(rig)
    rig.begin(post(CHAT, b"{}"))
    view.slots = [SlotProgress(3, 100, 40, 0)]
    (short,) = rig.complete(view.live.in_flight(settled_s=3600.0))
    assert (short.percent, view.queries) == (None, 0)
    (settled,) = rig.complete(view.live.in_flight())  # at once: the last answer is not a fresh one
    assert (settled.percent, view.queries) == (40.0, 1)


def test_finished_requests_are_kept_up_to_a_limit(make_rig: MakeRig) -> None:
    rig = make_rig()
    live = LiveView(rig).live
    client, child = rig.begin(post(CHAT, b"{}"))
    child.send(answer())
    client.message()
    record = rig.record()
    for _ in range(MAX_ENDED + 50):
        live.note_ended(record)
    assert live.ended_so_far == MAX_ENDED + 50
    assert len(live.last_ended(MAX_ENDED + 50)) == MAX_ENDED
    (last,) = live.last_ended(1)
    assert (last["model"], last["outcome"], last["status"]) == ("tiny", "ok", 200)
    assert live.last_ended(0) == ()


def test_request_without_a_model_is_not_kept(make_rig: MakeRig) -> None:
    rig = make_rig()
    live = LiveView(rig).live
    rig.ask(get(b"/health"))
    live.note_ended(rig.record())
    assert live.ended_so_far == 0


@pytest.mark.parametrize(
    ("needs_key", "client", "kept"), [(False, "10.0.0.1", 1), (True, "10.0.0.1", 0), (True, "key:a", 1)]
)
def test_refusals_of_strangers_are_not_kept(
    make_rig: MakeRig, needs_key: bool, client: str, kept: int
) -> None:
    """Anybody who reaches the port could push the requests of clients out."""
    rig = make_rig()
    live = LiveView(rig, needs_key=needs_key).live
    rig.ask(get(b"/v1/responses", b"Sec-WebSocket-Version: 13"))
    live.note_ended(replace(rig.record(), client=client))
    assert live.ended_so_far == kept


# --- cancelling


def test_cancelled_stream_ends_with_an_error_event(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, child = streaming(rig, request=post(CHAT, b'{"stream":true}', b"X-Request-Id: mine"))
    (cancelled,) = LiveView(rig).cancel("mine")
    assert cancelled.phase is LivePhase.GENERATING
    event = client.rest()
    assert not event.endswith(b"0\r\n\r\n")
    error = json.loads(event.partition(b"data: ")[2].partition(b"\n\n")[0])["error"]
    assert (error["cause"], error["code"]) == ("cancelled", 499)
    assert child.sees_the_end()
    assert rig.record().outcome == "cancelled"


def test_cancelled_plain_request_gets_an_error_and_its_connection_stays(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, child = rig.begin(post(CHAT, b"{}", b"X-Request-Id: mine"))
    LiveView(rig).cancel("mine")
    assert ended(client)["cause"] == "cancelled"
    assert child.sees_the_end()
    client.send(get(b"/health"))
    assert status(client.message()[0]) == 200
    assert rig.record().outcome == "cancelled"


def test_permit_of_a_cancelled_request_serves_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent=1)
    _, child = rig.begin(post(CHAT, b"{}", b"X-Request-Id: first"))
    rig.send(post(CHAT, b"{}"))
    view = LiveView(rig)
    eventually(lambda: len(view.requests()) == 2)
    view.cancel("first")
    assert child.sees_the_end()
    child.close()  # as llama-server does as soon as it has stopped its work
    rig.accept().message()


def test_cancelled_waiting_request_leaves_the_queue(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.call(lambda: setattr(rig.backend, "unavailable", LOADING))
    client = rig.send(post(CHAT, b"{}", b"X-Request-Id: mine"))
    view = LiveView(rig)
    view.until(LivePhase.LOADING)
    view.cancel("mine")
    assert ended(client)["cause"] == "cancelled"
    assert rig.call(lambda: len(rig.backend.queue)) == 0
    record = rig.record()
    assert (record.outcome, record.status, record.generation) == ("cancelled", 499, 0)


@pytest.mark.parametrize("limits", [Limits(), Limits(stream_above_bytes=100)], ids=["buffered", "forwarded"])
def test_request_is_cancelled_while_its_body_arrives(make_rig: MakeRig, limits: Limits) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False, limits=limits))
    client = rig.send(post(CHAT, b" " * 1000, b"X-Request-Id: mine")[:-50])
    view = LiveView(rig)
    view.until(LivePhase.SENDING)
    view.cancel("mine")
    assert ended(client)["cause"] == "cancelled"
    assert client.sees_the_end()
    eventually(lambda: rig.in_flight() == 0)


def test_unknown_id_cancels_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, child = rig.begin(post(CHAT, b"{}", b"X-Request-Id: mine"))
    with pytest.raises(RequestUnknown, match="No request in flight has the id 'other'"):
        LiveView(rig).cancel("other")
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_all_requests_with_the_same_id_are_cancelled(make_rig: MakeRig) -> None:
    rig = make_rig()
    clients = [rig.begin(post(CHAT, b"{}", b"X-Request-Id: same"))[0] for _ in range(2)]
    assert len(LiveView(rig).cancel("same")) == 2
    for client in clients:
        assert ended(client)["cause"] == "cancelled"
