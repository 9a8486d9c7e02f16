"""A model with a command beside models of llama-server: they evict each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import llamasup
from tests.kit import fake_engine
from tests.kit.configs import load
from tests.kit.patience import PATIENCE_S


def states(server: llamasup.Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.status()["models"]}


def config_of(folder: Path, model: Path, ram_bytes: int, **more: Any) -> Path:
    voice = {
        "command": fake_engine.command("--has-child"),
        "health": "/health",
        "routes": ["/v1/audio/speech", "/v1/audio/transcriptions"],
        "memory": {"ram": "700MiB"},
    }
    tiny = {"path": str(model), "ctx_size": 512, "parallel": 1}
    path = folder / "llamasup.yaml"
    models = {"voice": voice, "tiny": tiny}
    path.write_text(json.dumps({"models": models, "memory": {"ram": f"{ram_bytes >> 20}MiB"}, **more}))
    return path


def test_command_and_llama_server_evict_each_other(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    """The memory holds one of them. Each gets its own paths, also those without a name of a model."""
    config = load(config_of(tmp_path, tiny_model, 700 << 20, swap_after=0, default_model="tiny"), os.environ)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with llamasup.serve(config=config, runtime=runtime) as server:
        for _ in range(2):
            spoken = server.client.post("/v1/audio/speech", json={"input": "hi"})
            assert (spoken.status_code, spoken.content) == (200, fake_engine.PNG), spoken.text
            assert states(server) == {"voice": "ready", "tiny": "stopped"}
            said = server.client.post("/v1/chat/completions", json=chat)
            assert said.json()["model"] == "tiny"
            assert states(server) == {"voice": "stopped", "tiny": "ready"}
        wrong = server.client.post("/v1/chat/completions", json={"model": "voice", **chat})
        assert wrong.json()["error"]["cause"] == "unserved_path"
        assert states(server)["tiny"] == "ready"
        assert "voice was evicted" in " ".join(server.why("voice")["sentences"])


def test_command_that_needs_more_than_the_budget_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = load(config_of(tmp_path, tiny_model, 600 << 20), os.environ)
    with llamasup.serve(config=config) as server:
        refused = server.client.post("/v1/audio/speech", json={}, timeout=PATIENCE_S)
        error = refused.json()["error"]
        assert (refused.status_code, error["cause"]) == (503, "does_not_fit"), refused.text
        assert error["message"].startswith("'voice' needs 700 MiB of ram")
