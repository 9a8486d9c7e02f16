"""A web page with ``fetch`` and a stream (Node has the same API), and the preflight of its browser."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import KEY, LONG, PAGE, PATIENCE_S, Served, frees_slot
from tests.clients.prompts import QUESTION

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 40,
}
SCRIPT = Path(__file__).with_name("stream.mjs")


def fetch(node: str, served: Served, body: Any, *words: str, key: str = KEY) -> Any:
    done = subprocess.run(
        [node, str(SCRIPT), f"{served.v1}/chat/completions", key, json.dumps(body), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return json.loads(done.stdout)


def test_page_reads_a_stream_piece_by_piece(node: str, chat: Served) -> None:
    text = chat.direct("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    result = fetch(node, chat, {**CHAT, "stream": True})
    assert result == {"text": text, "pieces": 40, "ended": "done"}


def test_aborted_fetch_of_a_page_frees_the_slot(node: str, chat: Served) -> None:
    with frees_slot(chat):
        result = fetch(node, chat, {**CHAT, "stream": True, "max_tokens": LONG}, "3")
    assert result["ended"] == "AbortError"


def test_page_with_a_wrong_key_can_read_the_error(node: str, chat: Served) -> None:
    result = fetch(node, chat, CHAT, key="another")
    assert result["status"] == 401
    assert result["error"]


def test_cors_headers_let_an_allowed_page_call(chat: Served) -> None:
    """The preflight that the headers of a chat call for, and the stream after it."""
    url = f"{chat.v1}/chat/completions"
    options = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = httpx.options(url, headers=options)
    allowed = {word.strip().lower() for word in preflight.headers["access-control-allow-headers"].split(",")}
    assert preflight.is_success
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= allowed

    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
    for key, status in ((KEY, 200), ("another", 401)):  # a page may read why it is refused
        with httpx.stream(
            "POST", url, json={**CHAT, "stream": True}, headers={**headers, "Authorization": f"Bearer {key}"}
        ) as answer:
            assert answer.status_code == status
            assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
            assert "origin" in answer.headers["vary"].lower()
            assert answer.read()


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "null", f"{PAGE}.elsewhere.example"])
def test_other_origins_are_refused_without_cors_headers(chat: Served, origin: str) -> None:
    url = f"{chat.v1}/chat/completions"
    options = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for answer in (
        httpx.options(url, headers=options),
        httpx.post(url, json=CHAT, headers={"Origin": origin, "Authorization": f"Bearer {KEY}"}),
    ):
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
