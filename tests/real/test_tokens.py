"""The tokens that a key pays for answers of a real llama-server, reported or estimated (X8)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import Llamasup, llamasup
from tests.kit.patience import PATIENCE_S, eventually

COMPLETION: dict[str, Any] = {"n_predict": 100, "ignore_eos": True}
OPENAI: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
PROMPTS = ["Once", "Once upon a time", "There was"]
CHAT = {"messages": [{"role": "user", "content": "hi"}], **OPENAI}

# The path, the body, its minimum cost, and whether llama-server reports all of it.
CASES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "plain": ("/completion", {"prompt": "Once", **COMPLETION}, 100, True),
    "n_probs": ("/completion", {"prompt": "Once", "n_probs": 10, **COMPLETION}, 100, True),
    "prompts": ("/completion", {"prompt": PROMPTS, **COMPLETION}, 300, True),
    "prompts and n": ("/completion", {"prompt": PROMPTS, "n": 2, **COMPLETION}, 600, True),
    "prompts, streamed": ("/completion", {"prompt": PROMPTS, "stream": True, **COMPLETION}, 300, True),
    "prompts, streamed, by OpenAI": (
        "/v1/completions",
        {"prompt": PROMPTS, "stream": True, **OPENAI},
        300,
        True,
    ),
    "n, streamed": ("/v1/chat/completions", {"n": 2, "stream": True, **CHAT}, 200, True),
    "n, streamed with usage": (
        "/v1/chat/completions",
        {"n": 2, "stream": True, "stream_options": {"include_usage": True}, **CHAT},
        200,
        True,
    ),
    "timings in each event": (
        "/v1/chat/completions",
        {"stream": True, "timings_per_token": True, **CHAT},
        100,
        True,
    ),
    "fields of a stream": (
        "/completion",
        {"prompt": "Once", "stream": True, "response_fields": ["content"], **COMPLETION},
        100,
        False,  # only the last event has the number of cached prompt tokens
    ),
    "a message": ("/v1/messages", {"stream": True, **CHAT}, 100, True),
    "a response": ("/v1/responses", {"input": "hi", "max_output_tokens": 100, "ignore_eos": True}, 100, True),
    "prompts, by OpenAI": ("/v1/completions", {"prompt": PROMPTS, **OPENAI}, 300, False),
    "n": ("/v1/chat/completions", {"n": 2, **CHAT}, 200, False),
    "response_fields": (
        "/completion",
        {"prompt": "Once", "response_fields": ["content"], "n_predict": 4000, "ignore_eos": True},
        61,
        False,
    ),
}


@pytest.fixture(scope="module")
def server(runtime: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llamasup]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    names = [*(f"case-{number}" for number in range(len(CASES))), "left-stream"]
    path.write_text(
        "open\n" + "".join(f"{name} name={name} tpm=60\n" for name in names) + "left-early name=e tpm=1\n"
    )
    path.chmod(0o600)
    with llamasup(
        tiny_model, "--runtime", runtime, "--api-key-file", str(path), "--", "--metrics"
    ) as running:
        running.wait_for("ready")
        yield running
        assert running.stop() == 0


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Connection": "close"}


def generated(running: Llamasup) -> tuple[float, float]:
    """The numbers of generated tokens that llama-server and llamasup report."""
    text = httpx.get(f"{running.url}/metrics", headers=bearer("open"), timeout=60).text
    theirs = re.search(r"^llamacpp:tokens_predicted_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    ours = re.search(r'^llamasup_tokens_total\{.*kind="completion".*\} (\S+)$', text, re.MULTILINE)
    return float(theirs[1]) if theirs else 0.0, float(ours[1]) if ours else 0.0


def overdraft(running: Llamasup, key: str) -> int:
    """The tokens that a key of 60 a minute has used beyond its limit, less those gained since."""
    answer = httpx.post(
        f"{running.url}/completion", json={"prompt": "x", "n_predict": 1}, headers=bearer(key), timeout=60
    )
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["cause"] == "key_tokens"
    return int(answer.headers["retry-after"])


@pytest.mark.check("X8")
@pytest.mark.parametrize("case", CASES)
def test_key_is_charged_for_every_token_of_every_item(server: Llamasup, case: str) -> None:
    path, body, cost, is_reported = CASES[case]
    key = f"case-{list(CASES).index(case)}"
    theirs, ours = generated(server)
    began_s = time.monotonic()
    answer = httpx.post(server.url + path, json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text
    owed = overdraft(server, key)
    print(f"{case}: {owed + 60} tokens")
    assert owed >= cost - 60 - (time.monotonic() - began_s) - 1  # the key gains a token each second
    if is_reported:
        now = generated(server)
        assert now[0] - theirs == now[1] - ours >= cost


@pytest.mark.contract
def test_abandoned_streams_and_answers_are_charged(server: Llamasup) -> None:
    body = {"messages": CHAT["messages"], "max_tokens": 8000, "ignore_eos": True}
    url = f"{server.url}/v1/chat/completions"
    events = 0
    began_s = time.monotonic()
    with httpx.stream(
        "POST", url, json=body | {"stream": True}, headers=bearer("left-stream"), timeout=60
    ) as got:
        for line in got.iter_lines():
            events += line.startswith("data: {")
            if events >= 200:
                break
    owed = overdraft(server, "left-stream")
    assert owed >= 200 - 60 - (time.monotonic() - began_s) - 1

    def is_idle() -> bool:
        slots = httpx.get(f"{server.url}/slots", headers=bearer("open"), timeout=60).json()
        return not any(slot["is_processing"] for slot in slots)

    eventually(is_idle, every_s=1.5)  # polls delay its check of the client
    leaver = HTTPConnection(httpx.URL(server.url).netloc.decode(), timeout=PATIENCE_S)
    with closing(leaver):
        early = json.dumps(body | {"max_tokens": 100_000})
        leaver.request("POST", "/v1/chat/completions", early, bearer("left-early"))
        eventually(lambda: not is_idle(), every_s=0.05)
    # For its prompt of 90 bytes; the key gains a token each minute.
    assert overdraft(server, "left-early") >= 29 * 60
    eventually(is_idle, every_s=1.5)  # other tests of this server count its tokens


@pytest.mark.one_runtime
def test_embeddings_of_any_size_are_charged(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("open\none name=a tpm=60\ntwo name=b tpm=60\n")
    path.chmod(0o600)
    arguments = ("--runtime", runtime, "--api-key-file", str(path), "--", "--embedding", "--pooling", "mean")
    with llamasup(tiny_model, *arguments) as running:
        running.wait_for("ready")
        texts = ["Once upon a time " * 4] * 20

        def ask(path: str, key: str, body: dict[str, Any]) -> httpx.Response:
            return httpx.post(running.url + path, json=body, headers=bearer(key), timeout=60)

        began_s = time.monotonic()
        answer = ask("/v1/embeddings", "one", {"input": texts})
        prompt = answer.json()["usage"]["prompt_tokens"]
        assert len(answer.content) > 20_000
        owed = overdraft_of_embeddings(ask, "one")
        assert prompt - 60 - (time.monotonic() - began_s) - 1 <= owed <= prompt - 60 + 1
        counted = re.search(
            r'llamasup_tokens_total\{.*kind="prompt".*\} (\S+)',
            httpx.get(f"{running.url}/metrics", headers=bearer("open"), timeout=60).text,
        )
        assert counted is not None
        assert float(counted[1]) == prompt
        unreported = {"content": texts}
        began_s = time.monotonic()
        assert b"tokens" not in ask("/embedding", "two", unreported).content
        estimate = len(json.dumps(unreported, separators=(",", ":"))) // 3
        owed = overdraft_of_embeddings(ask, "two")
        assert estimate - 60 - (time.monotonic() - began_s) - 1 <= owed <= estimate - 60 + 1
        assert running.stop() == 0


def overdraft_of_embeddings(ask: Callable[[str, str, dict[str, Any]], httpx.Response], key: str) -> int:
    refused = ask("/v1/embeddings", key, {"input": "x"})
    assert refused.status_code == 429, refused.text
    return int(refused.headers["retry-after"])
