"""A stream of Ollama's API that ends with an error, with a real llama-server behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamasup
from llamasup.core.config.config_keys import Config
from llamasup.core.http.address import TcpAddress
from llamasup.core.settings.model import ModelEntry
from llamasup.features.ollama.answer_format import BrokenAnswer, Lines
from llamasup.features.ollama.settings import Ollama
from llamasup.features.virtual.settings import VirtualEntry
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port

LONG = 30_000
"""Tokens of the answer: they take seconds."""


def test_llama_server_stops_once_the_stream_has_ended_with_an_error(
    runtime: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, seen = Lines.add, list[bytes]()

    def break_third(self: Lines, event: bytes, created_at: bytes) -> bytes:
        seen.append(event)
        if len(seen) == 3:
            raise BrokenAnswer("made broken")
        return add(self, event, created_at)

    monkeypatch.setattr(Lines, "add", break_third)
    port = free_port()
    config = Config(
        models={"tiny": ModelEntry(path=str(tiny_model), ctx_size=32_768, parallel=1)},
        features={
            "ollama": Ollama(listen=TcpAddress("127.0.0.1", port)),
            "virtual_models": {"endless": VirtualEntry(model="tiny", set={"ignore_eos": True})},
        },
    )
    with llamasup.serve(config=config, runtime=runtime) as server:
        body = {"model": "endless", "prompt": "Once", "options": {"num_predict": LONG}}
        with (
            httpx.stream(
                "POST", f"http://127.0.0.1:{port}/api/generate", json=body, timeout=PATIENCE_S
            ) as answer,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            for line in answer.iter_lines():
                last: Any = json.loads(line)
        assert last == {"error": "made broken"}

        def metrics() -> dict[str, float]:
            lines = server.client.get("/metrics").text.splitlines()
            return {
                name.partition("{")[0]: float(value)
                for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
            }

        eventually(lambda: metrics()["llamacpp:requests_processing"] == 0)
        assert metrics()["llamacpp:tokens_predicted_total"] < LONG
