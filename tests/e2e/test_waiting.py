"""Requests before the model serves, or whose server is killed before it answered, as clients see them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import ServerExited
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.e2e.service import serving

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def crowd() -> Iterator[ThreadPoolExecutor]:
    """Clients that ask at the same time."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        yield threads


def url_of(running: Llamasup) -> str:
    """The address where llamasup listens, before the model is loaded."""
    running.wait_for("state", state="starting")  # a load that crashes at once may not be seen
    deadline = time.monotonic() + PATIENCE_S
    while True:
        listening = [
            connection.laddr.port
            for connection in psutil.Process(running.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        if listening:
            return f"http://127.0.0.1:{listening[0]}"
        assert time.monotonic() < deadline


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    found = re.search(rf'^llamasup_{name}\{{model="tiny"\}} ([\d.]+)$', text, re.M)
    return float(found[1]) if found else 0.0


def wait_for(url: str, name: str, value: float) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while gauge(url, name) != value:
        assert time.monotonic() < deadline, f"{name} is {gauge(url, name)}, not {value}"


def ask(crowd: ThreadPoolExecutor, url: str, path: str = "/v1/chat/completions") -> Future[httpx.Response]:
    return crowd.submit(httpx.post, f"{url}{path}", json=CHAT, timeout=PATIENCE_S)


def test_stop_answers_queued_requests_without_delay(
    tiny_model: Path, fake_server: Callable[..., str], crowd: ThreadPoolExecutor
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=60")) as running:
        url = url_of(running)
        answers = [ask(crowd, url) for _ in range(4)]
        wait_for(url, "queued", 4)
        assert running.stop() == 0
        for answer in answers:
            response = answer.result(PATIENCE_S)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "The server is stopping"


def test_failed_start_answers_queued_requests_with_its_cause(
    tiny_model: Path, fake_server: Callable[..., str], crowd: ThreadPoolExecutor, tmp_path: Path
) -> None:
    runtime = fake_server("out_of_memory=host", "load_s=600", f"until={tmp_path / 'go'}")
    with llamasup(tiny_model, "--runtime", runtime, "--ctx-size", "256") as running:
        url = url_of(running)
        answers = [ask(crowd, url) for _ in range(4)]
        wait_for(url, "queued", 4)
        (tmp_path / "go").touch()
        assert running.end() == 71
        for answer in answers:
            response = answer.result(PATIENCE_S)
            error = response.json()["error"]
            assert response.status_code == 503
            assert "out_of_memory" in error["cause"]
            assert error["remedy"]


@pytest.mark.extended
def test_crash_loop_answers_all_requests_and_then_gives_up(
    tiny_model: Path, fake_server: Callable[..., str], crowd: ThreadPoolExecutor
) -> None:
    """Requests wait during the whole crash loop, about 16 s, and get its cause."""
    with llamasup(tiny_model, "--runtime", fake_server("signal=load:SIGSEGV")) as running:
        url = url_of(running)
        patient = ask(crowd, url)
        assert running.end() == 75
        response = patient.result(PATIENCE_S)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["cause"]


def test_request_does_not_wait_for_a_start_after_its_timeout(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """The next start is more than five minutes away, and a request waits for no more than two."""
    policy = RestartPolicy(first_delay_s=400.0, longest_delay_s=400.0)

    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server("signal=load:SIGSEGV"), restart=policy) as server:
            began_s = time.monotonic()
            exited = await server.wait_for_event(ServerExited, lambda event: bool(event.restart_in_s))
            restart_in_s = exited.restart_in_s or 0.0
            answer = await server.client.post("/v1/chat/completions", json=CHAT)
            passed_s = time.monotonic() - began_s
            assert answer.status_code == 503
            assert restart_in_s - passed_s <= int(answer.headers["retry-after"]) <= restart_in_s + 1
            assert "has waited" not in answer.json()["error"]["message"]

    asyncio.run(test())
