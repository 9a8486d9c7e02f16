"""The micro-batch holds the largest image of a projector whose images are computed as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.gguf.files import read_model
from llamasup.errors import UsageInvalid
from tests.core.planning.plans import BUILDS, NEW, model, planned, value
from tests.kit import vision


def projector(image_tokens: int) -> ModelFacts:
    return model(
        architecture="clip",
        model_class=ModelClass.PROJECTOR,
        projection_length=4096,
        image_tokens=image_tokens,
        weights_bytes=1 << 29,
    )


def with_images(image_tokens: int, build: str = NEW, **rest: Any) -> Any:
    return planned(build, projector=projector(image_tokens), mmproj="/models/mmproj.gguf", **rest)


@dataclass(frozen=True)
class Case:
    image_tokens: int
    rest: dict[str, Any]
    ubatch: str | None


@pytest.mark.parametrize(
    "case",
    [
        Case(0, {"profile": "memory"}, "128"),
        Case(256, {"profile": "memory"}, "256"),  # Gemma 3
        Case(256, {}, "512"),
        Case(1120, {}, "1120"),  # Gemma 4
        Case(1120, {"profile": "plain"}, "1120"),  # its default would abort
        Case(256, {"profile": "plain"}, "512"),
        Case(256, {"extra": ("-ub", "256")}, None),
        Case(256, {"extra": ("-b", "128", "-ub", "128")}, None),  # pieces of a batch
        Case(256, {"profile": "memory", "extra": ("--image-max-tokens", "700")}, "700"),
    ],
)
def test_micro_batch_holds_an_image(case: Case) -> None:
    made = with_images(case.image_tokens, **case.rest)
    assert value(made, "--ubatch-size") == case.ubatch
    assert made.shape.ubatch >= min(made.image_tokens, 2048) or "-b" in made.argv


@pytest.mark.parametrize("build", BUILDS)
def test_reason_is_the_image(build: str) -> None:
    made = with_images(256, build, profile="memory")
    (why,) = [reason.reason for reason in made.reasons if reason.flag == "--ubatch-size"]
    assert why == "an image of 256 tokens must fit in one micro-batch"


def test_smaller_one_that_the_user_sets_is_refused_with_the_number() -> None:
    with pytest.raises(UsageInvalid, match=r"--ubatch-size 128 .* 256 tokens") as refused:
        with_images(256, extra=("-ub", "128"))
    assert refused.value.remedy == "Give 256 or more, or leave it out."


def test_header_of_gemma_3_says_how_many_tokens_an_image_has(tmp_path: Path) -> None:
    gemma = vision.gemma_projector()
    fourth = gemma.replace(b"\6\0\0\0\0\0\0\0gemma3", b"\7\0\0\0\0\0\0\0gemma4v")
    for name, content, tokens in (
        ("gemma", gemma, 256),
        ("llava", vision.vision_projector(), 0),
        ("gemma4", fourth, 1120),
        ("odd", gemma.replace(b"clip.vision.patch_size", b"clip.vision.patch_siz_"), 0),
    ):
        path = tmp_path / f"mmproj-{name}.gguf"
        path.write_bytes(content)
        assert read_model(path).image_tokens == tokens, name
