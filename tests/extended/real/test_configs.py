"""Every config of configs/ works with ``llamasup serve`` and a real llama-server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import Llamasup, adopted, command, run_to_end
from tests.kit.paths import ROOT

pytestmark = pytest.mark.one_runtime

CONFIGS = ROOT / "configs"
KEY = "a-key-of-alice"
NEEDS_GPUS = {"two-gpus"}


@pytest.fixture
def environ(tmp_path: Path, tiny_model: Path, runtime: str) -> dict[str, str]:
    """The variables that the first lines of the examples require; only loopback addresses."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} name=alice rpm=60 concurrent=4\n")
    keys.chmod(0o600)
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "LLAMASUP_MODELS": str(tiny_model.parent),
        "LLAMASUP_KEYS": str(keys),
        "LLAMASUP_PORT": "0",
        "LLAMASUP_ADDRESS": "127.0.0.1:0",
        "LLAMASUP_RUNTIME": runtime,
    }


@contextmanager
def serve(config: Path, environ: dict[str, str], *arguments: str) -> Iterator[Llamasup]:
    """A running ``llamasup serve``, stopped with SIGTERM afterwards."""
    words = command("serve", "--config", str(config), *arguments)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
    process = subprocess.Popen(words, env=environ, text=True, **pipes)
    assert process.stdin is not None
    with process.stdin, adopted(process) as running:
        yield running
        if process.poll() is None:
            assert running.stop() == 0


def ask(client: httpx.Client, model: str) -> httpx.Response:
    messages = [{"role": "user", "content": "Say something."}]
    body = {"model": model, "messages": messages, "max_tokens": 4}
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("name", sorted({path.stem for path in CONFIGS.glob("*.yaml")} - NEEDS_GPUS))
def test_every_config_serves_its_models(name: str, environ: dict[str, str]) -> None:
    with serve(CONFIGS / f"{name}.yaml", environ, "--events", "jsonl") as running:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=running.url, headers=headers, timeout=60) as client:
            models = [item["id"] for item in client.get("/v1/models").raise_for_status().json()["data"]]
            answers = {model: ask(client, model) for model in models}

    assert models
    assert {model: answer.status_code for model, answer in answers.items()} == dict.fromkeys(models, 200)
    assert all(answer.json()["usage"]["completion_tokens"] for answer in answers.values())


def test_single_config_answers_to_its_alias(environ: dict[str, str]) -> None:
    with (
        serve(CONFIGS / "single.yaml", environ, "--events", "jsonl") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        assert ask(client, "gpt-4o-mini").status_code == 200
        assert ask(client, "gpt-4o-mino").status_code == 404


def test_team_config_admits_no_client_without_a_key(environ: dict[str, str]) -> None:
    with (
        serve(CONFIGS / "team.yaml", environ, "--events", "jsonl") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        assert ask(client, "tiny").status_code == 401


def test_sidecar_ends_with_the_program_that_started_it(environ: dict[str, str]) -> None:
    with serve(CONFIGS / "sidecar.yaml", environ, "--sidecar") as running:
        with httpx.Client(base_url=running.url, timeout=60) as client:
            assert ask(client, "chat").status_code == 200
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.end() == 0


def test_config_check_names_missing_devices(environ: dict[str, str]) -> None:
    checked = run_to_end("config", "check", str(CONFIGS / "two-gpus.yaml"), env=environ)

    assert checked.returncode == 78
    assert "models.chat.devices: 'CUDA0' does not exist; the runtime has" in checked.stderr
    assert "Traceback" not in checked.stderr


@pytest.mark.parametrize("name", sorted({path.stem for path in CONFIGS.glob("*.yaml")} - NEEDS_GPUS))
def test_config_check_accepts_the_configs_that_are_served(name: str, environ: dict[str, str]) -> None:
    checked = run_to_end("config", "check", str(CONFIGS / f"{name}.yaml"), env=environ)

    assert (checked.returncode, checked.stdout) == (0, "")
    assert "is valid" in checked.stderr


def test_config_written_by_init_is_served(environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    assert run_to_end("config", "init", "--output", str(path), env=environ).returncode == 0

    with (
        serve(path, environ, "--port", "0", "--events", "jsonl") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        assert ask(client, "demo").status_code == 200
