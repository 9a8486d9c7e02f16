"""Models from a hub are downloaded, served by a real llama-server with their projector, and removed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, llamasup, run_to_end
from tests.kit import models, vision
from tests.kit.hub import running_hub
from tests.kit.tiny import tiny_decoder

pytestmark = pytest.mark.one_runtime


def test_model_and_projector_from_a_hub_answer_requests(
    runtime: str, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_folders / "data" / "llamasup" / "models" / "org" / "tiny-GGUF"
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["org/tiny-GGUF"] = {
            "tiny-Q4_K_M.gguf": tiny_decoder(),
            "mmproj-F16.gguf": vision.vision_projector(),
        }
        with llamasup("org/tiny-GGUF", "--runtime", runtime) as running:
            assert running.wait_for("ready")["models"] == ["tiny-Q4_K_M"]
            asked = {"prompt": "Once", "n_predict": 4}
            answer = httpx.post(f"{running.url}/completion", json=asked, timeout=PATIENCE_S)
            assert answer.json()["tokens_predicted"] == 4
            props = httpx.get(f"{running.url}/props", timeout=PATIENCE_S).json()
            assert props["modalities"]["vision"] is True
            loaded = run_to_end("rm", "--yes", "org/tiny-GGUF")
            assert loaded.returncode == 2
            assert "is loaded by process" in loaded.stderr
            assert running.stop() == 0
    assert run_to_end("rm", "--yes", "org/tiny-GGUF").returncode == 0
    assert not folder.exists()


def test_split_model_from_a_hub_is_loaded(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = models.write_split_decoder(tmp_path, "m-Q4_K_M")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["org/m"] = {f"Q4_K_M/{part.name}": part.read_bytes() for part in parts}
        with llamasup("org/m:q4_k_m", "--runtime", runtime) as running:
            assert running.wait_for("ready")["models"] == ["m-Q4_K_M"]
            assert running.stop() == 0
