"""Files whose header promises more than the file or the build holds: llama-server alone serves them, too."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from llamasup.core.gguf.files import read_model
from tests.e2e.driver import llamasup
from tests.kit import vision
from tests.kit.architectures import tiny_model
from tests.kit.odd_models import ODD_MODELS, odd_model
from tests.kit.patience import PATIENCE_S

# b10068 reads the missing layers of this one, too, and refuses the file with and without llamasup.
NOT_OF_BINARY = {"glm4moe-trunk"}


@pytest.mark.parametrize("name", ODD_MODELS)
def test_model_with_the_key_for_mtp_alone_is_served_without_drafts(
    name: str, runtime: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(odd_model(name))
    facts = read_model(path)
    assert (facts.mtp_layers, facts.drafts_itself) == (1, False)
    if name in NOT_OF_BINARY and runtime != "embedded":
        pytest.skip("this build needs the layers")
    with llamasup(path, "--runtime", runtime) as running:
        running.wait_for("ready")
        assert running.stop() == 0
    assert not any("adjustment" in event for event in running.events)


@pytest.mark.contract
def test_start_that_fails_with_a_flag_of_llamasup_is_tried_without_it_and_remembered(
    runtime: str, tmp_path: Path
) -> None:
    """b10068 aborts in the warm-up of this model with drafts of its own layers, newer builds do not."""
    path = tmp_path / "glm4moe.gguf"
    path.write_bytes(tiny_model("glm4moe"))
    assert read_model(path).drafts_itself
    with llamasup(path, "--runtime", runtime) as running:
        running.wait_for("ready")
        assert running.stop() == 0
    steps = [event["adjustment"] for event in running.events if "adjustment" in event]
    if not steps:
        pytest.skip("this build drafts with the layers of this model")
    assert [change for step in steps for change in step["changes"]] == [
        {"setting": "--spec-type", "before": "draft-mtp", "after": "none"}
    ]
    with llamasup(path, "--runtime", runtime) as again:
        again.wait_for("ready")
        assert again.stop() == 0
    assert not any("adjustment" in event for event in again.events)
    assert "a plan with more flags ended with" in again.stderr_text


def test_image_is_answered_with_the_smallest_micro_batch(runtime: str, tmp_path: Path) -> None:
    """The profile has a micro-batch of 128, and an image 256 tokens (ggml-org/llama.cpp#18757)."""
    model, projector = tmp_path / "gemma-3-tiny-F32.gguf", tmp_path / "mmproj-gemma-3-tiny-F32.gguf"
    model.write_bytes(tiny_model("gemma3"))
    projector.write_bytes(vision.gemma_projector())
    image = {"type": "image_url", "image_url": {"url": vision.picture_url()}}
    # Some bytes of the random weights fit no chat format (500); the grammar leaves one letter.
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1, "grammar": 'root ::= "a"'}
    with llamasup(model, "--runtime", runtime, "--profile", "memory") as running:
        running.wait_for("ready")
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert running.stop() == 0
    assert answer.status_code == 200, answer.text
    assert not any(event["event"] == "exit" for event in running.events)
