"""Clients of a real llama-server that disconnect: their permit and quota are free once the slot is idle."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.real.test_queueing import Occupant

pytestmark = pytest.mark.real

STREAMS = "Bearer streams"
LIMITED = {"Authorization": "Bearer one"}
LONG = 3_000  # tokens; some seconds, so that the test sees the request at work on a busy machine too


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
    headers = {"Authorization": STREAMS}
    text = httpx.get(f"{running.url}/metrics", headers=headers, timeout=PATIENCE_S).text
    found = re.search(rf"^{name}\{{[^}}]*\}} ([\d.e+-]+)$", text, re.M)
    return float(found[1]) if found else 0.0


def send_and_disconnect(running: Llamasup, busy: int, **changes: object) -> None:
    """``busy``: slots at work, this request included, when it leaves."""
    body = json.dumps({"prompt": "b", "n_predict": LONG, "ignore_eos": True} | changes).encode()
    url = httpx.URL(running.url)
    with socket.create_connection((url.host, url.port or 80), PATIENCE_S) as client:
        client.sendall(
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        deadline = time.monotonic() + PATIENCE_S
        while busy_slots(running) < busy:
            assert time.monotonic() < deadline, "the request did not begin"


def send_short_request(running: Llamasup) -> httpx.Response:
    body = {"prompt": "c", "n_predict": 1}
    return httpx.post(f"{running.url}/completion", json=body, headers=LIMITED, timeout=PATIENCE_S)


@pytest.mark.check("X8", "a key of `concurrent=1` gets one slot, although its clients disconnect")
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_abandoned_request_keeps_permit_and_quota_until_its_slot_is_free(
    running: Llamasup, stream: bool
) -> None:
    with Occupant(running.url, Authorization=STREAMS) as occupant:
        send_and_disconnect(running, 2, stream=stream)
        refusals = 0
        deadline = time.monotonic() + PATIENCE_S
        while (answer := send_short_request(running)).status_code == 429:
            assert answer.json()["error"]["cause"] == "key_concurrent"
            assert time.monotonic() < deadline, "its quota was not given back"
            refusals += 1
        assert answer.status_code == 200, answer.text
        assert busy_slots(running) == 1  # the stream alone
        assert occupant.is_streaming
        if not stream:
            assert refusals


def test_next_queued_request_gets_the_permit_when_the_slot_is_idle(
    running: Llamasup,
) -> None:
    with Occupant(running.url, Authorization=STREAMS) as occupant:
        send_and_disconnect(running, 2)
        body = {"prompt": "c", "n_predict": 1}
        headers = {"Authorization": STREAMS}
        answer = httpx.post(f"{running.url}/completion", json=body, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200
        assert (
            'desc="position 1"' in answer.headers["server-timing"]
        )  # it waited in llamasup, not in the server
        assert busy_slots(running) == 1
        assert occupant.is_streaming


def test_slot_of_abandoned_plain_request_is_freed_before_the_last_token(running: Llamasup) -> None:
    send_and_disconnect(running, 1, n_predict=60_000)
    before = gauge(running, "llamacpp:tokens_predicted_total")
    deadline = time.monotonic() + PATIENCE_S
    while send_short_request(running).status_code == 429:
        # Each request for slots or metrics wakes llama-server, which checks its client a second later.
        time.sleep(1.5)
        assert time.monotonic() < deadline, "its quota was not given back"
    assert busy_slots(running) == 0
    assert gauge(running, "llamacpp:tokens_predicted_total") - before < 60_000
