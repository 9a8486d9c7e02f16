"""The routes that llamasup answers itself, and those that go to the control app."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from llamasup.core.http.heads import HeadRules, HttpError
from llamasup.core.proxy import ProxyConfig, bind, bind_unix
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import Rig, answer, field, get, status

LOADING = HttpError(503, "Loading model", retry_after_s=1.0)
LOADING_BODY = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'


@pytest.mark.parametrize("path", [b"/health", b"/v1/health", b"/livez", b"/readyz"])
def test_health_routes_of_ready_server_say_ok(rig: Rig, path: bytes) -> None:
    head, body = rig.ask(get(path))
    assert status(head) == 200
    assert body == b'{"status":"ok"}'
    assert field(head, b"content-type") == b"application/json; charset=utf-8"


@pytest.mark.parametrize("path", [b"/health", b"/v1/health", b"/readyz"])
def test_health_route_of_loading_server_answers_like_llama_server(rig: Rig, path: bytes) -> None:
    rig.backend.unavailable = LOADING
    head, body = rig.ask(get(path))
    assert status(head) == 503
    assert field(head, b"retry-after") == b"1"
    assert body == LOADING_BODY


@pytest.mark.parametrize("path", [b"/", b"/props", b"/v1/models", b"/v1/chat/completions"])
def test_other_paths_are_a_503_while_server_loads(make_rig: MakeRig, path: bytes) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False))
    rig.backend.unavailable = LOADING
    head, body = rig.ask(get(path))
    assert (status(head), body) == (503, LOADING_BODY)


def test_loading_server_is_alive(rig: Rig) -> None:
    rig.backend.unavailable = LOADING
    assert status(rig.ask(get(b"/livez"))[0]) == 200


def test_readyz_reports_cause_and_remedy(rig: Rig) -> None:
    rig.backend.unavailable = HttpError(503, "it crashed", cause="crash_loop", remedy="look at the log")
    error = json.loads(rig.ask(get(b"/readyz"))[1])["error"]
    assert (error["cause"], error["remedy"]) == ("crash_loop", "Look at the log.")


CRASHED = HttpError(
    503, "GGML_ASSERT(x) failed", cause="crash_loop", remedy="look at /srv/log", retry_after_s=2.0
)


@pytest.mark.check("X4", "503 without cause, remedy or log line")
@pytest.mark.parametrize("path", [b"/health", b"/v1/health", b"/readyz"])
@pytest.mark.parametrize(
    "config",
    [ProxyConfig(api_keys=("k",)), ProxyConfig(rules=HeadRules(transparent=True))],
    ids=["keys", "wrap"],
)
def test_client_without_a_key_sees_the_state_and_no_diagnosis(
    make_rig: MakeRig, config: ProxyConfig, path: bytes
) -> None:
    rig = make_rig(config)
    rig.backend.unavailable = CRASHED
    head, body = rig.ask(get(path if config.api_keys else b"/health"))
    assert (status(head), field(head, b"retry-after")) == (503, b"2")
    state = {"message": "The server is not ready", "type": "unavailable_error", "code": 503}
    assert json.loads(body) == {"error": state}
    rig.backend.unavailable = LOADING
    assert rig.ask(get(b"/health"))[1] == LOADING_BODY


def test_readyz_reports_cause_on_trusted_socket(make_rig: MakeRig, tmp_path: Path) -> None:
    sockets = [bind_unix(str(tmp_path / "front.sock"))]
    rig = make_rig(ProxyConfig(api_keys=("k",)), sockets=sockets, trusted=True)
    rig.backend.unavailable = CRASHED
    assert json.loads(rig.ask(get(b"/readyz"))[1])["error"]["cause"] == "crash_loop"


def test_head_request_to_health_route_has_length_and_no_body(rig: Rig) -> None:
    client = rig.send(get(b"/health", method=b"HEAD") + get(b"/health"))
    assert field(client.head(), b"content-length") == b"15"
    assert client.message()[1] == b'{"status":"ok"}'


def test_health_route_accepts_only_get_and_head(rig: Rig) -> None:
    head, _ = rig.ask(get(b"/health", b"Content-Length: 0", method=b"POST"))
    assert status(head) == 405
    assert field(head, b"allow") == b"GET, HEAD, OPTIONS"


def test_metrics_are_forwarded_to_the_control_app(make_rig: MakeRig) -> None:
    rig = make_rig(control=True)
    client = rig.send(get(b"/metrics"))
    control = rig.accept_control()
    assert control.head().startswith(b"GET /metrics HTTP/1.1\r\n")
    control.send(answer(b"a 1\n", b"Content-Type: text/plain"))
    assert client.message()[1] == b"a 1\n"


def test_without_a_control_app_there_are_no_metrics(rig: Rig) -> None:
    assert status(rig.ask(get(b"/metrics"))[0]) == 404


def test_control_api_is_open_on_trusted_socket(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(control=True, sockets=[bind_unix(str(tmp_path / "front.sock"))], trusted=True)
    client = rig.send(get(b"/llamasup/v1/status"))
    control = rig.accept_control()
    control.head()
    control.send(answer(b"{}"))
    assert status(client.message()[0]) == 200


def test_ipv6_is_served(make_rig: MakeRig) -> None:
    try:
        sockets = bind("::1", 0)
    except Exception as error:
        pytest.skip(f"no IPv6 here: {error}")
    rig = make_rig(sockets=sockets)
    assert sockets[0].family == socket.AF_INET6
    port = rig.address[1]
    head, _ = rig.ask(get(b"/livez").replace(b"localhost", b"[0:0::1]:%d" % port))
    assert status(head) == 200


def test_every_local_answer_has_a_record(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig())
    rig.ask(get(b"/livez"))
    record = rig.record()
    assert (record.path, record.status, record.outcome, record.model) == ("/livez", 200, "local", "")
    assert record.bytes_out == 0  # only bytes from llama-server count
    assert rig.proxy.metrics.requests == {("", "/livez", 200): 1}
