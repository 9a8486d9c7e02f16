"""What a debugger and a log show of the central objects: enough to recognize them, and no prompt or key."""

from __future__ import annotations

from llamasup.core.proxy import ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import LOADING, await_queued, make_unavailable, send_chat
from tests.core.proxy.rig import CHAT, post, streaming

SECRET = "open-sesame-123"


def test_connection_shows_its_exchange_lease_and_endpoint(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(api_keys=(SECRET,)), api_key=SECRET)
    body = b'{"stream":true,"prompt":"tell nobody"}'
    request = post(CHAT, body, b"Authorization: Bearer " + SECRET.encode(), b"X-Request-Id: mine")
    streaming(rig, request=request)
    shown = rig.call(lambda: repr(list(rig.proxy.clients)))
    assert "<Exchange of <Request mine POST /v1/chat/completions, model None>: 200, " in shown
    assert "<Lease of <Endpoint 'tiny' generation 1: 1 in flight, 1 permits taken>, 1 permits>" in shown
    pools = rig.call(lambda: repr(rig.proxy.pool_of(rig.endpoint)))
    assert "0 idle, 1 open" in pools
    assert SECRET not in shown + pools
    assert "nobody" not in shown + pools


def test_connection_shows_that_its_request_waits(make_rig: MakeRig) -> None:
    rig = make_rig()
    make_unavailable(rig, LOADING)
    send_chat(rig, b"{}")
    await_queued(rig, 1)
    shown = rig.call(lambda: repr(list(rig.proxy.clients)))
    assert "<Waiting for 'tiny': <QueueEntry of '127.0.0.1': normal, 1 jobs>>" in shown
    assert rig.call(lambda: repr(rig.backend.waiting)) == "<RequestQueue: 1 waiting>"
