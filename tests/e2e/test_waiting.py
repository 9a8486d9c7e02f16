"""Requests before the model serves, or whose server is killed before it answered, as clients see them."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.events import ServerExited
from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.e2e.service import serving

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def crowd() -> Iterator[ThreadPoolExecutor]:
    """Clients that ask at the same time."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        yield threads


def url_of(running: Llamasup) -> str:
    """Where it listens, long before it says so: the model has to load first."""
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


def test_requests_wait_until_the_model_is_loaded(
    tiny_model: Path, fake_server: Callable[..., str], crowd: ThreadPoolExecutor, tmp_path: Path
) -> None:
    runtime = fake_server("load_s=600", f"until={tmp_path / 'go'}")
    with llamasup(tiny_model, "--runtime", runtime) as running:
        url = url_of(running)
        answers = [ask(crowd, url) for _ in range(8)]
        wait_for(url, "queued", 8)
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/props").status_code == 503
        assert not any(answer.done() for answer in answers)
        (tmp_path / "go").touch()
        for answer in answers:
            response = answer.result(PATIENCE_S)
            assert response.status_code == 200
            assert re.fullmatch(
                r'queue;dur=[\d.]+;desc="position \d+", load;dur=[\d.]+', response.headers["server-timing"]
            )
        wait_for(url, "queued", 0)
        assert running.stop() == 0


def test_a_client_that_leaves_while_the_model_loads_frees_its_place(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=60")) as running:
        url = url_of(running)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=httpx.Timeout(PATIENCE_S, read=0.2))
        wait_for(url, "queued", 0)
        assert running.stop() == 0
        assert "client gone" in running.said


def test_a_request_waits_no_longer_than_it_may(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=60"), "--wait-timeout", "0.2") as running:
        answer = httpx.post(f"{url_of(running)}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
        error = answer.json()["error"]
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert error["message"] == "Loading model; this request has waited for 0.2 s"
        assert error["type"] == "unavailable_error"
        assert running.stop() == 0


def test_a_stop_while_requests_wait_answers_them_and_is_not_held_up(
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


def test_a_start_that_fails_tells_those_who_wait_why(
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


def test_a_server_killed_before_its_first_byte_loses_no_request(
    tiny_model: Path, fake_server: Callable[..., str], crowd: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Eight clients, four slots: half of them are being worked on, half wait for their turn."""
    runtime = fake_server("prefill_s=60", f"once={tmp_path / 'once'}")
    with llamasup(tiny_model, "--runtime", runtime, "--no-warmup", "--parallel", "4") as running:
        url = running.url
        answers = [ask(crowd, url) for _ in range(8)]
        wait_for(url, "in_flight", 4)
        wait_for(url, "queued", 4)
        (child,) = running.children()
        child.send_signal(signal.SIGKILL)
        for answer in answers:
            response = answer.result(PATIENCE_S)
            assert response.status_code == 200
            assert response.json()["choices"][0]["message"]["content"]
        assert gauge(url, "replays_total") == 4  # the others had not been sent anywhere
        assert running.stop() == 0


def test_a_request_that_kills_its_server_is_tried_twice_and_the_others_are_served(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    runtime = fake_server("signal=stream:SIGSEGV", "die_in_stream=0")
    with llamasup(tiny_model, "--runtime", runtime, "--no-warmup") as running:
        url = running.url
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
        assert answer.status_code in (502, 503)  # whichever is seen first: its connection's end or its own
        assert answer.json()["error"]["cause"] in ("upstream_broke", "generation_ended")
        tokens = httpx.post(f"{url}/tokenize", json={"content": "x"}, timeout=PATIENCE_S)
        assert tokens.status_code == 200
        running.wait_for("state", state="ready", generation=3)
        exits = [event for event in running.events if event["event"] == "exit"]
        assert [event["signal"] for event in exits] == ["SIGSEGV", "SIGSEGV"]
        assert running.stop() == 0


def test_the_log_says_which_requests_were_sent_again(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path, crowd: ThreadPoolExecutor
) -> None:
    runtime = fake_server("prefill_s=60", f"once={tmp_path / 'once'}")
    with llamasup(tiny_model, "--runtime", runtime, "--no-warmup") as running:
        url = running.url
        answer = ask(crowd, url)
        wait_for(url, "in_flight", 1)
        (child,) = running.children()
        child.send_signal(signal.SIGKILL)
        assert answer.result(PATIENCE_S).status_code == 200
        assert running.stop() == 0
        (line,) = [line for line in running.said.splitlines() if line.startswith("POST")]
        assert line.endswith("(sent again)")


@pytest.mark.slow
def test_a_crash_loop_answers_everybody_and_then_gives_up(
    tiny_model: Path, fake_server: Callable[..., str], crowd: ThreadPoolExecutor
) -> None:
    """Requests wait through the whole of it, about 16 s, and learn why nothing comes."""
    with llamasup(tiny_model, "--runtime", fake_server("signal=load:SIGSEGV")) as running:
        url = url_of(running)
        patient = ask(crowd, url)
        assert running.end() == 75
        response = patient.result(PATIENCE_S)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["cause"]


def test_a_start_that_comes_too_late_for_a_request_is_not_waited_for(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """The next start is more than five minutes away, and a request waits for no more than two."""
    policy = RestartPolicy(first_delay_s=400.0, longest_delay_s=400.0)

    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server("signal=load:SIGSEGV"), restart=policy) as it:
            began_s = time.monotonic()
            exited = await it.told(ServerExited, lambda told: bool(told.restart_in_s))
            restart_in_s = exited.restart_in_s or 0.0
            answer = await it.client.post("/v1/chat/completions", json=CHAT)
            passed_s = time.monotonic() - began_s
            assert answer.status_code == 503
            assert restart_in_s - passed_s <= int(answer.headers["retry-after"]) <= restart_in_s + 1
            assert "has waited" not in answer.json()["error"]["message"]

    asyncio.run(test())
