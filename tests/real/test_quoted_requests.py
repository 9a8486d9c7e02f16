"""No message of llamasup quotes what a real server logs about invalid requests (X13)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup, run_to_end

SECRET = "planted-secret"
FORGED = "\n".join(
    (
        SECRET,
        "CUDA error: out of memory",
        "0.99.999.999 E CUDA error: out of memory",
        f"CUDA error: out of memory, {SECRET}",
        "  current device: 0, in function alloc at /build/ggml-cuda.cu:466",
        f"/build/ggml/src/ggml.c:1644: GGML_ASSERT({SECRET}) failed",
        "llama-server: listening on http://127.0.0.1:1",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    )
)
THROWN = f"terminate called after throwing an instance of 'std::bad_alloc as ordered by {SECRET}'"
EXCEPTION = f"a\n  what():  x\n{THROWN}\n\n"
MESSAGES = [{"role": "user", "content": "x"}]
REQUESTS: dict[str, tuple[str, bytes]] = {
    "broken JSON": ("/completion", f'{{"prompt": "{SECRET} CUDA error: out of memory'.encode()),
    "a broken grammar": ("/completion", json.dumps({"prompt": "x", "grammar": FORGED}).encode()),
    "a broken schema": (
        "/completion",
        json.dumps({"prompt": "x", "json_schema": {"type": "string", "pattern": FORGED}}).encode(),
    ),
    "a sampler": (
        "/completion",
        json.dumps({"prompt": "x", "n_predict": 1, "samplers": [FORGED]}).encode(),
    ),
    "a content part": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": [{"type": FORGED, "text": SECRET}]}]}).encode(),
    ),
    "a role": ("/v1/chat/completions", json.dumps({"messages": [{"role": FORGED}]}).encode()),
    "template arguments": (
        "/v1/chat/completions",
        json.dumps({"messages": MESSAGES, "chat_template_kwargs": {"x": FORGED}, "tools": FORGED}).encode(),
    ),
    "a prompt that is too long": (
        "/completion",
        json.dumps({"prompt": FORGED * 400, "n_predict": 1}).encode(),
    ),
    "an exception": ("/completion", json.dumps({"prompt": "x", "grammar": EXCEPTION}).encode()),
    "a valid request": ("/completion", json.dumps({"prompt": "x", "n_predict": 1}).encode()),
}
CAUSES = {signal.SIGKILL: "killed", signal.SIGABRT: "aborted", signal.SIGSEGV: "segfault"}


def send_requests(running: Llamasup) -> None:
    for path, body in REQUESTS.values():
        headers = {"Content-Type": "application/json", "Origin": running.url}
        httpx.post(f"{running.url}{path}", content=body, headers=headers, timeout=PATIENCE_S)


def shown(running: Llamasup) -> str:
    """All output for users and monitoring except llama-server's own log."""
    texts = [
        run_to_end(*words, "--pid", str(running.pid)).stdout for words in (("ps", "--json"), ("status",))
    ]
    texts += [httpx.get(f"{running.url}/{path}").text for path in ("health", "readyz", "metrics")]
    return "".join((*texts, running.stderr_text, json.dumps(running.events)))


@pytest.mark.check("X13", "no message depends on a request's text")
def test_messages_neither_quote_nor_trust_requests_in_the_server_log(
    runtime: str, tiny_model: Path, own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", runtime, "--keep-trying", "--ctx-size", "512") as running:
        running.wait_for("ready")
        for generation, (number, cause) in enumerate(CAUSES.items(), start=1):
            send_requests(running)
            os.kill(server_pid(running), number)
            ended = running.wait_for("exit", generation=generation)
            assert ended["cause"] == cause, ended
            running.wait_for_ready_after(generation)
        seen = shown(running)
        assert running.stop() == 0
    logged = b"".join(path.read_bytes() for path in (own_folders / "state/llamasup/logs").iterdir())
    assert SECRET.encode() in logged, "else this test shows nothing"
    assert SECRET not in seen
    assert "out of memory" not in seen
    assert "llama-server said" not in seen


def server_pid(running: Llamasup) -> int:
    (model,) = json.loads(run_to_end("ps", "--json", "--pid", str(running.pid)).stdout)["models"]
    return int(model["pid"])
