"""Images that make a real llama-server abort, beside requests of other clients."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup
from tests.kit import architectures, vision

POISONS = 6  # each ends two servers: more than the crashes that a model may have


def ask(running: Llamasup, number: int) -> tuple[int, str]:
    """The status and the cause of a request. Each fourth one has an image."""
    text: dict[str, Any] = {"type": "text", "text": f"{number}"}
    image = {"type": "image_url", "image_url": {"url": vision.picture_url()}}
    parts = [text, image] if number % 4 == 0 else [text]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8}
    path = "/v1/chat/completions"
    if len(parts) == 1:  # the random weights need a grammar to write text
        path, body = "/completion", {"prompt": f"{number}", "n_predict": 8, "grammar": "root ::= [a-z ]+"}
    answer = httpx.post(f"{running.url}{path}", json=body, timeout=4 * PATIENCE_S)
    return answer.status_code, answer.json()["error"]["cause"] if answer.status_code != 200 else ""


@pytest.mark.extended
@pytest.mark.one_runtime
def test_images_that_abort_the_server_cost_no_other_request_and_not_the_model(
    runtime: str, tmp_path: Path
) -> None:
    model, projector = tmp_path / "gemma-3-tiny-F32.gguf", tmp_path / "mmproj-gemma-3-tiny-F32.gguf"
    model.write_bytes(architectures.tiny_model("gemma3"))
    projector.write_bytes(vision.gemma_projector())
    # llamasup itself refuses a micro-batch that is smaller than an image.
    server = tmp_path / "llama-server"
    command = runtime if runtime != "embedded" else f"{sys.executable} -m llamasup.embedded"
    server.write_text(f'#!/bin/sh\nexec {command} "$@" -ub 128\n')
    server.chmod(0o755)
    words = ["--mmproj", str(projector), "--runtime", str(server), "--ctx-size", "2048", "--parallel", "4"]
    quick = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # without gdb, which takes seconds
    with llamasup(model, *words, env=quick) as running, ThreadPoolExecutor(6) as crowd:
        running.wait_for("ready")
        answers = list(crowd.map(lambda number: ask(running, number), range(4 * POISONS)))
        assert running.stop() == 0
        exits = [event for event in running.all_events() if event["event"] == "exit"]

    expected = [(200, "") if number % 4 else (503, "poison_request") for number in range(4 * POISONS)]
    assert answers == expected
    assert len(exits) > POISONS  # one or two for each
    assert {event["restart_in_s"] for event in exits} == {0.0}
