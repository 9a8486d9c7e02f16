"""Clients of a real llama-server that disconnect: their permit and quota are free once the slot is idle."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.patience import eventually
from tests.real.test_queueing import Occupant

STREAMS = "Bearer streams"
LIMITED = {"Authorization": "Bearer one"}
LONG = 3_000  # tokens; while another stream runs, a plain request is at work until the last one


@pytest.fixture
def running(runtime: str, tiny_model: Path, tmp_path: Path) -> Iterator[Llamasup]:
    keys = tmp_path / "keys"
    keys.write_text("streams name=streams rights=inference,control\none name=one concurrent=1\n")
    keys.chmod(0o600)
    options = ("--runtime", runtime, "--parallel", "2", "--ctx-size", "65536", "--api-key-file", str(keys))
    with llamasup(tiny_model, *options, "--", "--context-shift") as llamasup_process:
        yield llamasup_process
        assert llamasup_process.stop() == 0


def busy_slots(running: Llamasup) -> int:
    headers = {"Authorization": STREAMS}
    slots = httpx.get(f"{running.url}/slots", headers=headers, timeout=PATIENCE_S).json()
    return sum(slot["is_processing"] for slot in slots)


def gauge(running: Llamasup, name: str) -> float:
    """Of llama-server. Its lines are missing while it does not answer."""
    headers = {"Authorization": STREAMS}
    found: list[str] = []

    def is_there() -> bool:
        text = httpx.get(f"{running.url}/metrics", headers=headers, timeout=PATIENCE_S).text
        found[:] = re.findall(rf"^{name}\{{[^}}]*\}} ([\d.e+-]+)$", text, re.M)
        return bool(found)

    eventually(is_there, name)
    return float(found[0])


def shown(running: Llamasup, count: str) -> int:
    """A number of llamasup's status, for which it does not ask llama-server."""
    headers = {"Authorization": STREAMS}
    status = httpx.get(f"{running.url}/llamasup/v1/status", headers=headers, timeout=PATIENCE_S).json()
    (model,) = status["models"]
    return int(model[count])


@contextmanager
def disconnected(running: Llamasup, busy: int, **changes: object) -> Iterator[None]:
    """A request whose client has left. llama-server is stopped meanwhile, so it has not noticed it.

    ``busy``: slots at work, this request included, when it leaves.
    """
    url = httpx.URL(running.url)
    (server,) = running.children()
    body = json.dumps({"prompt": "b", "n_predict": LONG, "ignore_eos": True} | changes).encode()
    is_at_work = False
    while not is_at_work:  # again if it had ended before the test saw it
        with socket.create_connection((url.host, url.port or 80), PATIENCE_S) as client:
            client.sendall(
                b"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            eventually(lambda: busy_slots(running) >= busy or is_answered(client))
            server.suspend()
            eventually(lambda: server.status() == psutil.STATUS_STOPPED)
            is_at_work = shown(running, "in_flight") == busy
            if not is_at_work:
                server.resume()
    try:
        yield
    finally:
        server.resume()


def is_answered(client: socket.socket) -> bool:
    return bool(select.select([client], [], [], 0)[0])


def send_short_request(running: Llamasup) -> httpx.Response:
    body = {"prompt": "c", "n_predict": 1}
    return httpx.post(f"{running.url}/completion", json=body, headers=LIMITED, timeout=PATIENCE_S)


@pytest.mark.check("X8", "`concurrent=1` gets one slot")
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_abandoned_request_keeps_permit_and_quota_until_its_slot_is_free(
    running: Llamasup, stream: bool
) -> None:
    with Occupant(running.url, Authorization=STREAMS) as occupant:
        with disconnected(running, 2, stream=stream):
            answer = send_short_request(running)
        assert answer.status_code == 429
        deadline = time.monotonic() + PATIENCE_S
        while answer.status_code == 429:
            assert answer.json()["error"]["cause"] == "key_concurrent"
            assert time.monotonic() < deadline, "its quota was not given back"
            answer = send_short_request(running)
        assert answer.status_code == 200, answer.text
        assert busy_slots(running) == 1  # the stream alone
        assert occupant.is_streaming


def test_next_queued_request_gets_the_permit_when_the_slot_is_idle(
    running: Llamasup,
) -> None:
    body = {"prompt": "c", "n_predict": 1}
    headers = {"Authorization": STREAMS}
    url = f"{running.url}/completion"
    with Occupant(running.url, Authorization=STREAMS) as occupant, ThreadPoolExecutor() as clients:
        with disconnected(running, 2):
            sent = clients.submit(httpx.post, url, json=body, headers=headers, timeout=PATIENCE_S)
            eventually(lambda: shown(running, "queued") == 1, "the request in the queue")
        answer = sent.result(PATIENCE_S)
        assert answer.status_code == 200
        assert (
            'desc="position 1"' in answer.headers["server-timing"]
        )  # it waited in llamasup, not in the server
        assert busy_slots(running) == 1
        assert occupant.is_streaming


def test_slot_of_abandoned_plain_request_is_freed_before_the_last_token(running: Llamasup) -> None:
    with disconnected(running, 1, n_predict=60_000):
        pass
    before = gauge(running, "llamacpp:tokens_predicted_total")
    deadline = time.monotonic() + PATIENCE_S
    while send_short_request(running).status_code == 429:
        # Each request for slots or metrics wakes llama-server, which checks its client a second later.
        time.sleep(1.5)
        assert time.monotonic() < deadline, "its quota was not given back"
    assert busy_slots(running) == 0
    assert gauge(running, "llamacpp:tokens_predicted_total") - before < 60_000
