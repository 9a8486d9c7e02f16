"""A real llama-server behind llamasup's TLS, and answers by a schema."""

from __future__ import annotations

import json
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.core.proxy.listeners.test_tls import Certificate
from tests.e2e.driver import PATIENCE_S, llamasup, run_to_end

pytestmark = pytest.mark.one_runtime

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
ENDLESS = {"prompt": "Once", "ignore_eos": True, "n_predict": 10_000_000, "stream": True}
MOOD: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
}


def test_tls_serves_chats_and_streams_and_a_disconnect_frees_the_slot(
    runtime: str, tiny_model: Path, certificate: tuple[str, str]
) -> None:
    chain, key = certificate
    tls = ("--tls-cert", chain, "--tls-key", key)
    options = ("--runtime", runtime, *tls, "--parallel", "1", "--", "--context-shift")
    with llamasup(tiny_model, *options) as running:
        assert running.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=chain)
        with httpx.Client(base_url=running.url, verify=trusted, timeout=PATIENCE_S) as http:
            answer = http.post("/v1/chat/completions", json=CHAT).json()
            text = answer["choices"][0]["message"]["content"]
            assert answer["usage"]["completion_tokens"] == CHAT["max_tokens"]

            with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
                lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
            assert lines.pop() == "[DONE]"
            deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == text

            with http.stream("POST", "/completion", json=ENDLESS) as stream:
                pieces = stream.iter_raw()  # a deleted generator closes its stream
                next(pieces)
                assert slot(http)["is_processing"]
            deadline = time.monotonic() + PATIENCE_S
            while slot(http)["is_processing"]:
                assert time.monotonic() < deadline, "the slot is still busy"
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert running.stop() == 0


def test_expired_certificate_is_reported_at_start_and_by_doctor(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    certificate = Certificate(tmp_path)
    certificate.expire()
    options = ("--runtime", runtime, "--tls-cert", str(certificate.chain), "--tls-key", str(certificate.key))
    with llamasup(tiny_model, *options) as running:
        warning = running.wait_for("warning", model="")
        assert f"{str(certificate.chain)!r} expired on " in warning["message"]
        assert "Renew it" in warning["remedy"]
        assert running.url.startswith("https://")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/livez", verify=certificate.trusting())
        certificate.roll_out("second")
        assert httpx.get(f"{running.url}/livez", verify=certificate.trusting()).status_code == 200
        assert running.stop() == 0
    assert running.stderr_text.count("expired on") == 1
    assert "Traceback" not in running.stderr_text
    certificate.expire()
    done = run_to_end("doctor", "--json", "--port", "0", "--tls-cert", str(certificate.chain))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert "expired on" in checks["certificate"]["found"]


def slot(http: httpx.Client) -> dict[str, Any]:
    (only,) = http.get("/slots").json()
    return dict(only)


def test_demo_model_answers_by_a_schema(runtime: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "mood", "strict": True, "schema": MOOD}}
    with llamasup("demo", "--runtime", runtime) as running:
        request = CHAT | {"response_format": schema, "max_tokens": 200}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=request, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        answered = json.loads(choice["message"]["content"])
        assert answered["mood"] in MOOD["properties"]["mood"]["enum"]
        assert isinstance(answered["sure"], bool)
        assert running.stop() == 0
