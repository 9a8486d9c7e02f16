"""``curl``, as people use it in a shell."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import KEY, LONG, PATIENCE_S, Served, frees_slot
from tests.clients.prompts import QUESTION

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 20,
}


def run(curl: str, *words: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [curl, "-sS", "-H", f"Authorization: Bearer {key}", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_chat_is_answered_and_streamed_over_http_1_1_and_1_0(curl: str, chat: Served, version: str) -> None:
    url = f"{chat.v1}/chat/completions"
    plain = run(curl, version, url, "-d", json.dumps(CHAT))
    streamed = run(curl, version, "-N", url, "-d", json.dumps({**CHAT, "stream": True}))
    assert (plain.returncode, streamed.returncode) == (0, 0), plain.stderr + streamed.stderr
    text = json.loads(plain.stdout)["choices"][0]["message"]["content"]
    *events, done = [line[6:] for line in streamed.stdout.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    assert "".join(piece or "" for piece in pieces) == text != ""
    assert len(pieces) > 20


def test_large_body_is_sent_after_100_continue(curl: str, chat: Served, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"content": "x" * 2_000_000}))
    # What -d calls it by itself, a form, llama-server (b11434) refuses with 413 if it is so large.
    headers = ("-H", "Expect: 100-continue", "-H", "Content-Type: application/json")
    result = run(curl, "-v", *headers, f"{chat.url}/tokenize", "-d", f"@{body}")
    assert "100 Continue" in result.stderr
    assert len(json.loads(result.stdout)["tokens"]) == 2_000_000


def test_wrong_key_fails_with_an_error_message(curl: str, chat: Served) -> None:
    refused = run(curl, "--fail-with-body", f"{chat.v1}/models", key="another")
    assert refused.returncode == 22
    assert json.loads(refused.stdout)["error"]["message"]


def test_head_request_is_answered(curl: str, chat: Served) -> None:
    head = run(curl, "-I", f"{chat.url}/health")
    assert head.stdout.startswith("HTTP/1.1 200")


def test_ctrl_c_in_mid_stream_frees_the_slot(curl: str, chat: Served) -> None:
    with frees_slot(chat), subprocess.Popen(
        [curl, "-sSN", f"{chat.v1}/chat/completions", "-H", f"Authorization: Bearer {KEY}",
         "-d", json.dumps({**CHAT, "stream": True, "max_tokens": LONG})],
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: ")
        process.terminate()
