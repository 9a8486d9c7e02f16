"""A real llama-server behind the queue: concurrent requests, their order, and comments while they wait."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.generations import FAILED, make_unavailable
from tests.core.proxy.rig import Rig
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.real.clients import bare_server, environment

pytestmark = pytest.mark.one_runtime

CONTEXT = "20500"
ENDLESS = 10_000_000  # tokens of an occupant, which is disconnected before


class Occupant:
    """A client that reads a stream and so keeps its permit, until the test disconnects it."""

    def __init__(self, url: str, **headers: str) -> None:
        self._url = url
        self._headers = headers
        self._disconnects = threading.Event()
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Occupant:
        self._thread.start()
        assert self._began.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        self._disconnects.set()
        self._thread.join(PATIENCE_S)

    @property
    def is_streaming(self) -> bool:
        return self._thread.is_alive()

    def _read(self) -> None:
        body = {"prompt": "Once", "n_predict": ENDLESS, "ignore_eos": True, "stream": True}
        url = f"{self._url}/completion"
        with httpx.stream("POST", url, json=body, headers=self._headers, timeout=PATIENCE_S) as stream:
            for _ in stream.iter_raw():
                self._began.set()
                if self._disconnects.is_set():
                    return


class Crowd:
    """Clients at several addresses, each with one request."""

    def __init__(self, url: str, threads: ThreadPoolExecutor) -> None:
        self._url = url
        self._threads = threads
        self.answers: dict[str, Future[httpx.Response]] = {}

    def send(self, name: str, tokens: int, address: str = "127.0.0.1", **headers: str) -> None:
        self.answers[name] = self._threads.submit(self._ask, name, tokens, address, headers)

    def _ask(self, name: str, tokens: int, address: str, headers: dict[str, str]) -> httpx.Response:
        body: dict[str, Any] = {"prompt": name, "n_predict": tokens, "ignore_eos": True}
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=PATIENCE_S) as client:
            return client.post(f"{self._url}/completion", json=body, headers=headers)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=16) as executor:
        yield executor


def gauge(running: Llamasup, name: str) -> float:
    text = httpx.get(f"{running.url}/metrics", timeout=PATIENCE_S).text
    found = re.search(rf"^{name}\{{[^}}]*\}} ([\d.e+-]+)$", text, re.M)
    return float(found[1]) if found else 0.0


def until_queued(running: Llamasup, count: int, occupants: Sequence[Occupant]) -> None:
    while gauge(running, "llamasup_queued") != count:
        assert all(occupant.is_streaming for occupant in occupants)
        time.sleep(0.005)


def busy_slots(running: Llamasup) -> int:
    slots = httpx.get(f"{running.url}/slots", timeout=PATIENCE_S).json()
    return sum(slot["is_processing"] for slot in slots)


def test_clients_take_turns_at_one_permit_and_a_full_queue_gives_retry_after(
    runtime: str, tiny_model: Path, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    limits = ("--parallel", "2", "--max-concurrent", "1", "--max-queued", "7", "--ctx-size", CONTEXT)
    options = (*limits, "--access-log", str(log), "--", "--context-shift")
    with llamasup(tiny_model, "--runtime", runtime, *options) as running, Occupant(running.url) as occupant:
        crowd = Crowd(running.url, threads)
        queue = [
            *((f"many {n}", "127.0.0.1", {}) for n in range(4)),
            ("few 0", "127.0.0.2", {}),
            ("few 1", "127.0.0.2", {}),
            ("low", "127.0.0.3", {"X-Llamasup-Priority": "low"}),
        ]
        for position, (name, address, headers) in enumerate(queue, start=1):
            crowd.send(name, 20, address, **headers)
            until_queued(running, position, [occupant])
        refused = httpx.post(f"{running.url}/completion", json={"prompt": "ninth"}, timeout=PATIENCE_S)
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["message"] == "The model is busy with 1 request, and 7 more wait"
        assert 1 <= int(refused.headers["retry-after"]) <= 600
        # One of the server's two slots works, and no request waits inside the server.
        assert (busy_slots(running), gauge(running, "llamacpp:requests_deferred")) == (1, 0)
        assert occupant.is_streaming
        occupant.disconnect()
        for name, answer in crowd.answers.items():
            response = answer.result(PATIENCE_S)
            assert response.status_code == 200, (name, response.text)
        waited = crowd.answers["few 1"].result().headers["server-timing"]
        assert re.fullmatch(r'queue;dur=[\d.]+;desc="position 4", load;dur=0\.0', waited)
        assert gauge(running, "llamasup_queued") == 0
        assert running.stop() == 0
    # The access log has the order of their ends. The order in the clients' threads can differ.
    names = {answer.result().headers["x-request-id"]: name for name, answer in crowd.answers.items()}
    logged_ids = (json.loads(line)["request_id"] for line in log.read_text().splitlines())
    ended = [names[event] for event in logged_ids if event in names]
    assert ended == ["many 0", "few 0", "many 1", "few 1", "many 2", "many 3", "low"]


def test_model_gets_as_many_concurrent_requests_as_slots_by_default(
    runtime: str, tiny_model: Path, threads: ThreadPoolExecutor
) -> None:
    options = ("--parallel", "2", "--ctx-size", CONTEXT, "--", "--context-shift")
    with (
        llamasup(tiny_model, "--runtime", runtime, *options) as running,
        Occupant(running.url) as first,
        Occupant(running.url) as second,
    ):
        crowd = Crowd(running.url, threads)
        crowd.send("a", 20)
        crowd.send("b", 20)
        until_queued(running, 2, [first, second])
        assert (busy_slots(running), gauge(running, "llamacpp:requests_deferred")) == (2, 0)
        assert gauge(running, "llamasup_in_flight") == 2
        first.disconnect()
        for answer in crowd.answers.values():  # one after the other, with the permit that became free
            assert answer.result(PATIENCE_S).status_code == 200
        second.disconnect()
        assert running.stop() == 0


# --- comments while a stream waits


@pytest.fixture
def keepalive_proxy(runtime: str, tiny_model: Path, tmp_path: Path) -> Iterator[Rig]:
    """A proxy with one permit for a real server. A stream that waits gets a comment after 20 ms."""
    path = str(tmp_path / "s.sock")
    program = [sys.executable, "-m", "llamasup.embedded"] if runtime == "embedded" else [runtime]
    command = [*program, "--model", str(tiny_model), "--host", path, "--ctx-size", CONTEXT, "--context-shift"]
    env = environment(None if runtime == "embedded" else runtime, tmp_path)
    with bare_server([*command, "--parallel", "1"], env=env):
        config = ProxyConfig(stream_keepalive_s=0.02, limits=Limits(sweep_s=0.01))
        rig = Rig(tmp_path, "uvloop", config, child_path=path, max_concurrent=1)
        try:
            yield rig
        finally:
            rig.close()


def address_of(keepalive_proxy: Rig) -> str:
    host, port = keepalive_proxy.address
    return f"http://{host}:{port}"


def client_of(keepalive_proxy: Rig) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address_of(keepalive_proxy)}/v1", api_key="none", max_retries=0)


def test_openai_client_skips_the_comments_of_a_queued_stream(keepalive_proxy: Rig) -> None:
    with Occupant(address_of(keepalive_proxy)) as occupant, client_of(keepalive_proxy) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Tell me."}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert occupant.is_streaming  # the client has a head from llamasup, not from llama-server
        assert stream.response.headers["x-request-id"]
        occupant.disconnect()
        usage = [piece.usage for piece in stream if piece.usage is not None]
    assert usage[-1].completion_tokens == 8
    records = [keepalive_proxy.record() for _ in range(2)]
    assert records[0].outcome == "client_gone"
    assert records[1].outcome in {"ok", "client_gone"}  # the client leaves at [DONE], before the last chunk
    assert records[1].tokens_completion == 8


def test_openai_client_raises_errors_of_llama_server_after_comments(keepalive_proxy: Rig) -> None:
    with Occupant(address_of(keepalive_proxy)) as occupant, client_of(keepalive_proxy) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "too long " * 20_000}],
            max_tokens=8,
            stream=True,
        )
        occupant.disconnect()
        with pytest.raises(openai.APIError, match="exceeds the available context size"):
            list(stream)
    records = [keepalive_proxy.record() for _ in range(2)]
    assert (records[1].outcome, records[1].status) == ("error_event", 200)


def test_openai_client_raises_the_failure_that_ended_its_wait(keepalive_proxy: Rig) -> None:
    with Occupant(address_of(keepalive_proxy)), client_of(keepalive_proxy) as client:
        stream = client.completions.create(model="tiny", prompt="Once", max_tokens=8, stream=True)
        make_unavailable(keepalive_proxy, FAILED)
        with pytest.raises(openai.APIError, match="it ran out of memory"):
            list(stream)
