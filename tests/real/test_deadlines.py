"""A request that times out: its client gets an error, and the slot of a real llama-server is free again."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from tests.e2e.driver import PATIENCE_S, llamasup
from tests.kit.patience import eventually

ENDLESS = {"prompt": "Once", "ignore_eos": True, "n_predict": 10_000_000}


def cut_stream(http: httpx.Client) -> bytes:
    """What a stream without an end sends until it is cut. On a busy machine nothing may come in time: then
    the answer is a 504.
    """
    while True:
        received = b""
        with http.stream("POST", "/completion", json=ENDLESS | {"stream": True}) as streamed:
            try:
                for piece in streamed.iter_raw():
                    received += piece
            except httpx.RemoteProtocolError:  # no last chunk: no client takes it for complete
                return received
        assert streamed.status_code == 504, received[-500:]


def test_endless_answer_ends_at_the_request_timeout_and_frees_its_slot(
    runtime: str, tiny_model: Path
) -> None:
    # A context that is not full before the time is up.
    options = ("--runtime", runtime, "--request-timeout", "1", "--parallel", "1", "--ctx-size", "65536")
    with llamasup(tiny_model, *options) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        received = cut_stream(http)
        assert b'data: {"error":{' in received[-500:]
        assert b'"cause":"request_timeout"' in received[-500:]

        deadline = time.monotonic() + PATIENCE_S
        while any(slot["is_processing"] for slot in http.get("/slots").json()):
            assert time.monotonic() < deadline, "the slot is still busy"
        # On a busy machine even a short answer may take longer than the second.
        short = {"prompt": "Once", "n_predict": 3}
        eventually(lambda: http.post("/completion", json=short).status_code == 200)

        # Last: an answer in one piece goes on in the slot until its context is full (b11434).
        plain = http.post("/completion", json=ENDLESS)
        assert plain.status_code == 504
        assert plain.json()["error"]["cause"] == "request_timeout"
        assert running.stop() == 0
