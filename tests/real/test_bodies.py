"""Half-sent bodies before a real llama-server: they count for their key, and other clients are served."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.e2e.driver import PATIENCE_S, llamasup


def test_key_with_one_concurrent_request_holds_only_one_half_sent_body(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one name=one concurrent=1\nother name=other\n")
    keys.chmod(0o600)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
        b"Content-Length: 33554432\r\n\r\n"
    )
    with llamasup(tiny_model, "--runtime", runtime, "--api-key-file", str(keys)) as running:
        url = httpx.URL(running.url)
        with ExitStack() as clients:
            refused = 0
            for number in range(12):
                client = clients.enter_context(
                    socket.create_connection((url.host, url.port or 80), PATIENCE_S)
                )
                client.sendall(head + b"x" * 1000)  # llamasup has not forwarded it yet
                if number:
                    refused += client.recv(12) == b"HTTP/1.1 429"
            assert refused == 11
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            headers = {"Authorization": "Bearer other"}
            answer = httpx.post(
                f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
            )
            assert answer.status_code == 200, answer.text
        assert running.stop() == 0
