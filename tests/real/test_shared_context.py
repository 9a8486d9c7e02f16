"""Requests that together fill the context which all slots share: llama-server ends all of them at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import llamasup
from tests.kit.patience import PATIENCE_S

CLIENTS = 4


@pytest.mark.contract
def test_all_requests_are_answered_although_together_they_are_too_long(
    tiny_model: Path, runtime: str
) -> None:
    """Each has about 800 tokens, and the context 1,024."""

    def ask(number: int) -> tuple[int, int]:
        prompt = f"{number} " + "the time people " * 40
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 150, "temperature": 0}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        return answer.status_code, answer.json().get("usage", {}).get("completion_tokens", 0)

    with llamasup(tiny_model, "--runtime", runtime, "--", "-c", "1024") as running:
        running.wait_for("ready")
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(ask, range(CLIENTS)))
        assert running.stop() == 0
    assert answers == [(200, 150)] * CLIENTS


def test_prompt_of_the_whole_trained_context_is_served_by_the_default_plan(
    tiny_model: Path, runtime: str
) -> None:
    """32,768 tokens, of which a slot of the earlier plan had 8,192."""
    with llamasup(tiny_model, "--runtime", runtime) as running:
        running.wait_for("ready")
        body = {"prompt": [100] * 30_000, "n_predict": 4, "temperature": 0}
        answer = httpx.post(f"{running.url}/completion", json=body, timeout=PATIENCE_S)
        assert running.stop() == 0
    assert (answer.status_code, answer.json()["tokens_evaluated"]) == (200, 30_000)
    assert "up to 32,768 tokens a request, 4 at a time" in running.stderr_text
