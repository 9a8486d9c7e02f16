"""The profile plain leaves all choices to llama-server, and the plan shows the same values as the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import llamasup, run_to_end
from tests.kit.models import tiny_encoder
from tests.kit.tiny import tiny_decoder


def planned(*arguments: str) -> dict[str, Any]:
    done = run_to_end("plan", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.one_runtime
@pytest.mark.parametrize(
    "asked",
    [
        (),
        ("--parallel", "2"),
        ("--ctx-size", "2048"),
        ("--ctx-size", "2048", "--parallel", "2"),
        ("--", "--ctx-size", "0", "-np", "2"),
        ("--", "--no-kv-unified"),
        ("--", "-c", "4096", "-np", "2", "-kvu"),
        ("--", "-c", "65536", "-np", "1"),  # the model's own context is 32768
    ],
    ids=" ".join,
)
def test_plan_shows_the_slots_and_context_that_the_server_reports(
    asked: tuple[str, ...], runtime: str, tiny_model: Path
) -> None:
    options = ("--runtime", runtime, "--profile", "plain", *asked)
    shown = planned(str(tiny_model), *options)
    with llamasup(tiny_model, *options) as running:
        props = httpx.get(f"{running.url}/props").json()
        assert running.stop() == 0
    assert (shown["slots"], shown["ctx_size"]) == (
        props["total_slots"],
        props["default_generation_settings"]["n_ctx"],
    )


def test_plain_profile_passes_only_model_alias_and_address(runtime: str, tiny_model: Path) -> None:
    shown = planned(str(tiny_model), "--runtime", runtime, "--profile", "plain")
    command = shown["argv"][shown["argv"].index("--model") :]
    assert set(command[::2]) == {"--model", "--alias", "--host", "--port"}
    assert len(command) == 8
    assert "GOMP_SPINCOUNT" not in shown["env"]


@pytest.mark.contract
def test_embedding_model_is_recognised_and_embeds(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "embeds.gguf"
    path.write_bytes(tiny_encoder())
    with llamasup(path, "--runtime", runtime, "--profile", "plain") as running:
        answer = httpx.post(f"{running.url}/v1/embeddings", json={"input": "hello"})
        assert running.stop() == 0
    assert answer.status_code == 200
    assert answer.json()["data"][0]["embedding"]


def test_requested_draft_model_is_used(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(tiny_decoder())
    options = ("--runtime", runtime, "--profile", "plain", "--draft-model", str(draft))
    with llamasup(tiny_model, *options) as running:
        asked = {"prompt": "Once", "n_predict": 40, "temperature": 0}
        answer = httpx.post(f"{running.url}/completion", json=asked).json()
        assert running.stop() == 0
    assert answer["timings"]["draft_n"] > 0
