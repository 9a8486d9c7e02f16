"""Requests that make llama-server abort, beside requests of other clients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit.extent import examples

POISONS = examples(20)
CLIENTS = 6
DIES = "die_on=poison", "signal=stream:SIGABRT", "prefill_s=0.02"


def post(running: Llamasup, prompt: str, **body: Any) -> httpx.Response:
    """A completion of a text, because the fake server continues no message that has begun."""
    asked = {"prompt": prompt, "max_tokens": 4, **body}
    return httpx.post(f"{running.url}/v1/completions", json=asked, timeout=PATIENCE_S * 4)


def cut_stream(running: Llamasup, prompt: str) -> str:
    """What arrives of a stream that ends with an error event."""
    url, asked = f"{running.url}/completion", {"prompt": prompt, "stream": True}
    received = ""
    with (
        httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
    ):
        for text in answer.iter_text():
            received += text
    return received


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 503, response.text
    return dict(response.json()["error"])


@pytest.mark.parametrize("arguments", [(), ("--continue-streams",)], ids=["plain", "continued"])
def test_poison_requests_cost_no_other_request_and_never_the_model(
    tiny_model: Path, fake_server: Callable[..., str], arguments: tuple[str, ...]
) -> None:
    def client(number: int) -> list[tuple[str, int, str]]:
        seen = []
        for turn in range(POISONS):
            is_poison = turn % CLIENTS == number
            prompt = f"{'poison' if is_poison else 'honest'} {number} {turn}"
            answer = post(running, prompt, stream=bool(arguments))
            cause = answer.json()["error"]["cause"] if answer.status_code != 200 else ""
            is_whole = answer.status_code != 200 or not arguments or "[DONE]" in answer.text
            seen.append((prompt, answer.status_code if is_whole else 0, cause))
        return seen

    server = fake_server(*DIES)
    with (
        llamasup(tiny_model, "--runtime", server, "--parallel", "4", *arguments) as running,
        ThreadPoolExecutor(CLIENTS) as crowd,
    ):
        running.wait_for("ready")
        seen = [each for answers in crowd.map(client, range(CLIENTS)) for each in answers]
        wrong = [
            (prompt, *found)
            for prompt, *found in seen
            if tuple(found) != ((503, "poison_request") if prompt.startswith("poison") else (200, ""))
        ]
        assert wrong == []
        assert post(running, "honest again").status_code == 200
        assert running.stop() == 0


def test_body_of_a_poison_request_is_refused_at_once_and_another_is_not(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(*DIES)) as running:
        running.wait_for("ready")
        error = error_of(post(running, "poison"))
        assert (error["cause"], "SIGABRT" in error["message"]) == ("poison_request", True)
        assert error["remedy"]
        running.wait_for("state", state="ready", generation=3)
        assert error_of(post(running, "poison")) == error
        assert post(running, "honest").status_code == 200
        assert running.stop() == 0
        assert len([each for each in running.all_events() if each["event"] == "exit"]) == 2


def test_poison_stream_that_has_begun_is_refused_when_it_is_sent_again(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """Its client gets an error event, and its body becomes a suspect."""
    server = fake_server("die_in_stream=2", "signal=stream:SIGABRT", "tokens=4")
    with llamasup(tiny_model, "--runtime", server, "--no-warmup") as running:
        running.wait_for("ready")
        for turn in range(4):
            assert '"cause":"aborted"' in cut_stream(running, f"begins {turn}")
            assert '"cause":"poison_request"' in cut_stream(running, f"begins {turn}")
        asked = {"prompt": "begins 0", "stream": True}
        begins = httpx.post(f"{running.url}/completion", json=asked, timeout=PATIENCE_S)
        assert begins.json()["error"]["cause"] == "poison_request"
        assert running.stop() == 0
