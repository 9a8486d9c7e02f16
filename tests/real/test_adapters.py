"""LoRA adapters in a models folder, on a real llama-server: they take effect only on request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.extended.real.test_configs import serve
from tests.kit import models
from tests.kit.tiny import tiny_decoder

PROMPT: Mapping[str, Any] = {"prompt": "hello", "n_predict": 12, "temperature": 0, "seed": 1}


@pytest.mark.contract
def test_adapter_beside_its_model_serves_requests_that_name_it(tmp_path: Path, runtime: str) -> None:
    for folder, adapters in (
        ("plain", {}),
        ("adapted", {"lora": models.tiny_lora(), "stranger": models.tiny_lora(width=32)}),
        ("by-config", {"lora [v1, overfit]": models.tiny_lora()}),
    ):
        (tmp_path / "models" / folder).mkdir(parents=True)
        (tmp_path / "models" / folder / f"{folder}.gguf").write_bytes(tiny_decoder())
        for name, content in adapters.items():
            (tmp_path / "models" / folder / f"{folder}-{name}.gguf").write_bytes(content)
    config = tmp_path / "llamasup.yaml"
    config.write_text(
        f"""
        listen: 127.0.0.1:0
        runtime: {runtime}
        models_dir: models
        defaults: {{ctx_size: 512, parallel: 1}}
        models:
          adapted: {{loras: [auto]}}
          by-config: {{loras: ["models/by-config/by-config-lora [v1, overfit].gguf"]}}
        """
    )
    with (
        serve(config, dict(os.environ), "--events", "jsonl") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):

        def text_of(model: str, **more: Any) -> str:
            answer = client.post("/v1/completions", json={**PROMPT, "model": model, **more})
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        listed = {item["id"] for item in client.get("/v1/models").json()["data"]}
        plain = text_of("plain")
        without_adapter = text_of("adapted")
        with_adapter = text_of("adapted", lora=[{"id": 0, "scale": 1.0}])
        without_adapter_again = text_of("adapted")
        adapter_from_config = text_of("by-config")
    print(f"plain {plain!r}, adapted {with_adapter!r}")
    assert listed == {"plain", "adapted", "by-config"}
    assert plain == without_adapter == without_adapter_again
    assert with_adapter == adapter_from_config != plain
