"""Batches and Ollama's API, under Wine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai

from llamasup.features.batch.api.objects import ENDED
from tests.extended.windows.wine import PATIENCE_S, Windows, eventually, windows_path

EVENTS = ("--port", "0", "--events", "jsonl")


def write(path: Path, count: int, **more: Any) -> Path:
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": f"Once {number}", "max_tokens": 8, **more},
        }
        for number in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ids(output: Path) -> list[str]:
    assert b"\r" not in output.read_bytes()
    return sorted(json.loads(line)["custom_id"] for line in output.read_text().splitlines())


def test_batch_continues_after_it_was_terminated(windows: Windows, tiny_model: Path) -> None:
    source, output = write(windows.folder / "in.jsonl", 300, ignore_eos=True), windows.folder / "out.jsonl"
    run = windows.start("run", tiny_model, *EVENTS)
    run.event("ready")
    words = ("batch", "run", source, "-o", output)
    first = windows.start(*words)
    eventually(lambda: output.exists() and output.stat().st_size)
    first.terminate()
    first.wait()
    code, _, said = windows.run(*words)
    assert code == 0, said
    assert ids(output) == sorted(f"line-{number}" for number in range(300))
    (batch,) = json.loads(windows.run("batch", "list", "--json")[1])["batches"]
    assert (batch["state"], batch["done"]) == ("completed", 300)
    windows.control("stop")
    assert run.wait() == 0


def test_batch_api_and_ollama(windows: Windows, tiny_model: Path) -> None:
    keys, config = windows.folder / "keys", windows.folder / "config.yaml"
    keys.write_text("sk-of-anna name=anna\n")
    config.write_text(
        f"auth: {{api_key_file: '{windows_path(keys)}'}}\n"
        f"models: {{tiny: {{path: '{windows_path(tiny_model)}'}}}}\n"
        "batches: {enabled: true}\nollama: {listen: 127.0.0.1:0}\n"
    )
    serve = windows.start("serve", "--config", config, *EVENTS)
    ready = serve.event("ready")
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE_S) as http,
        openai.OpenAI(
            base_url=f"{ready['url']}/v1", api_key="sk-of-anna", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        with write(windows.folder / "in.jsonl", 20).open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h"
        )
        over = eventually(lambda: now if (now := client.batches.retrieve(batch.id)).status in ENDED else None)
        assert over.status == "completed", over
        assert over.request_counts.completed == 20
        assert len(client.files.content(over.output_file_id).text.splitlines()) == 20
        assert client.files.delete(uploaded.id).deleted

        headers = {"authorization": "Bearer sk-of-anna"}
        answer = http.post(
            f"{ready['ollama']}/api/generate",
            json={"model": "tiny", "prompt": "Once", "stream": False, "options": {"num_predict": 4}},
            headers=headers,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["eval_count"] == 4
        (tag,) = http.get(f"{ready['ollama']}/api/tags", headers=headers).json()["models"]
        assert tag["name"].startswith("tiny")
    windows.control("stop")
    assert serve.wait() == 0
    assert windows.left() == []
