"""A config of llama-swap, translated by ``llamasup config import``, serves its models under their names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx

from tests.e2e.driver import run_to_end, started
from tests.kit.models import tiny_decoder
from tests.kit.patience import PATIENCE_S

CONFIG = """
macros:
  server: llama-server --port ${PORT} -ngl 99 -t 4 -fa on
models:
  tiny:
    cmd: ${server} -m ${env.HOME}/tiny.gguf -c 1024 -np 2 --temp 0
    aliases: [gpt-4o-mini]
    filters: {setParams: {max_tokens: 3}, setParamsByID: {"${MODEL_ID}:long": {max_tokens: 5}}}
  "Tiny (again)": {cmd: "${server} -m ${env.HOME}/tiny.gguf -c 512", ttl: 60}
"""


def test_translated_config_serves_each_name_with_its_parameters(llama_server: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_decoder())
    (tmp_path / "swap.yaml").write_text(CONFIG)
    env = {**os.environ, "HOME": str(tmp_path), "LLAMASUP_RUNTIME": llama_server}
    done = run_to_end("config", "import", "swap.yaml", "--output", "config.yaml", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "config.yaml"
    config.write_text(f"listen: 127.0.0.1:0\n{config.read_text()}")
    checked = run_to_end("config", "check", "config.yaml", "--json", env=env, cwd=tmp_path)
    assert json.loads(checked.stdout)["ok"], checked.stdout
    with started("serve", "--config", str(config), env=env, cwd=tmp_path) as running:
        for name, tokens in (("tiny", 3), ("gpt-4o-mini", 3), ("tiny:long", 5), ("Tiny (again)", 7)):
            body = {"model": name, "prompt": "Once", "max_tokens": 7, "ignore_eos": True}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["usage"]["completion_tokens"] == tokens, (name, answer)
        models = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert running.stop() == 0
    assert {model["id"] for model in models} >= {"tiny", "tiny:long", "gpt-4o-mini", "Tiny-again"}
