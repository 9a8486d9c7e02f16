"""If a real llama-server is killed or not yet ready, no request without a byte is lost (S9, S10, S12)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.patience import eventually
from tests.kit.ports import free_port

pytestmark = pytest.mark.one_runtime

LONG = 20_000
"""Tokens that take seconds; whoever asks for them plain gets no byte until the last one is there."""


@pytest.fixture
def crowd() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=16) as threads:
        yield threads


def server_of(running: Llamasup) -> psutil.Process:
    """The child that serves: the one with an address in its command line."""
    (child,) = [process for process in running.children() if "--host" in process.cmdline()]
    return child


def requests(running: Llamasup) -> tuple[int, int]:
    """The numbers of requests in flight and in the queue. llama-server is not asked."""
    socket = select_running(discover(), running.pid).socket
    with ControlClient(ControlAddress(socket=socket)) as client:
        (model,) = client.status()["models"]
    return model["in_flight"], model["queued"]


@pytest.mark.extended
def test_server_killed_before_the_first_byte_loses_none_of_eight_requests(
    runtime: str, tiny_model: Path, crowd: ThreadPoolExecutor
) -> None:
    """At the kill, the server works on four requests, and four wait for a permit."""
    with llamasup(tiny_model, "--runtime", runtime, "--ctx-size", "4096", "--parallel", "4") as running:
        url = running.url
        body: dict[str, Any] = {"prompt": "Once", "ignore_eos": True, "temperature": 0}

        def ask(n: int) -> httpx.Response:
            return httpx.post(f"{url}/completion", json={**body, "n_predict": 700 + n}, timeout=PATIENCE_S)

        # The first request loads the control application; later ones are fast.
        assert requests(running) == (0, 0)
        server = server_of(running)
        server.suspend()  # so that no answer comes before all requests are there
        answers = [crowd.submit(ask, n) for n in range(8)]
        eventually(lambda: requests(running) == (4, 4), "four requests in flight, and four that wait")
        server.send_signal(signal.SIGKILL)
        for n, answer in enumerate(answers):
            response = answer.result(PATIENCE_S)
            assert response.status_code == 200, response.text
            assert response.json()["tokens_predicted"] == 700 + n
        running.wait_for("exit", signal="SIGKILL", restart_in_s=0.0)
        assert 'llamasup_replays_total{model="tiny"} 4.0' in httpx.get(f"{url}/metrics").text
        assert running.stop() == 0


STREAMS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": LONG}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": LONG}),
    ("/completion", {"prompt": "Once", "n_predict": LONG}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": LONG}),
    ("/v1/responses", {"input": "Tell me.", "max_output_tokens": LONG}),
]


def test_cut_stream_ends_with_the_error_event_of_its_api(runtime: str, tiny_model: Path) -> None:
    with llamasup(tiny_model, "--runtime", runtime, "--ctx-size", str(2 * LONG)) as running:
        url = running.url
        for generation, (path, body) in enumerate(STREAMS, start=1):
            running.wait_for("state", state="ready", generation=generation)
            received = b""
            with (
                pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
                httpx.stream(
                    "POST",
                    url + path,
                    json={**body, "stream": True, "ignore_eos": True},
                    timeout=PATIENCE_S,
                ) as response,
            ):
                assert response.status_code == 200
                for piece in response.iter_raw():
                    if not received:
                        server_of(running).send_signal(signal.SIGKILL)
                    received += piece
            assert received.endswith(b"\n\n"), path
            last = received[:-2].rpartition(b"\n\n")[2]
            named = path in ("/v1/messages", "/v1/responses")
            assert last.startswith(b"event: error\ndata: " if named else b"data: "), path
            error = json.loads(last.rpartition(b"data: ")[2])["error"]
            assert error["message"], path
            assert b"[DONE]" not in received
        assert running.stop() == 0


def test_requests_sent_before_the_server_is_ready_are_queued(
    runtime: str, tiny_model: Path, crowd: ThreadPoolExecutor
) -> None:
    port = free_port()

    def ask() -> openai.types.Completion:
        deadline = time.monotonic() + PATIENCE_S
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            while True:
                try:
                    return client.completions.create(model="tiny", prompt="Once", max_tokens=5)
                except openai.APIConnectionError:  # llamasup does not listen yet
                    assert time.monotonic() < deadline

    with llamasup(tiny_model, "--runtime", runtime, "--port", str(port)) as running:
        answers: list[Future[openai.types.Completion]] = [crowd.submit(ask) for _ in range(4)]
        for answer in answers:
            usage = answer.result(PATIENCE_S).usage
            assert usage is not None
            assert usage.completion_tokens == 5
        assert running.stop() == 0
