"""A model of an architecture that llamasup does not know gets a careful plan, and llama-server decides."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.system.process.child import Exit
from tests.core.planning.plans import (
    BUILDS,
    GPU,
    NEW,
    SMALL_GPU,
    bert,
    capabilities,
    model,
    planned,
    reason,
    value,
)

NEWER = model(architecture="llama5", known=False, context_length=131_072)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "settings", [{}, {"profile": "memory"}, {"profile": "plain"}, {"ctx_size": 512}], ids=str
)
def test_every_build_gets_a_plan_that_says_so(build: str, settings: dict[str, Any]) -> None:
    made = planned(build, NEWER, **settings)
    assert "llamasup does not know its architecture" in reason(made, "--model")
    ((message, remedy),) = made.warnings
    assert "'llama5': llama-server decides whether it can load the model" in message
    assert "--ctx-size" in remedy


def test_nothing_is_tried_that_a_new_architecture_may_not_have() -> None:
    made = planned(NEW, NEWER)
    assert made.ctx_size == 8192  # the longest would be as large as the estimate is uncertain
    assert not made.drafts_itself
    assert made.kv.smaller is None
    for device in (GPU, SMALL_GPU):
        on_device = planned(capabilities(NEW, device), NEWER)
        assert on_device.kv_type == "f16"
        assert value(on_device, "--gpu-layers") is None  # --fit chooses
    assert planned(NEW, NEWER, profile="memory").kv_type == "f16"


def test_its_class_comes_from_its_header() -> None:
    made = planned(NEW, bert(architecture="bert2", known=False))
    assert made.model_class is ModelClass.ENCODER
    assert "--embedding" in made.argv


def test_a_refusal_of_the_build_names_the_architecture_and_the_build() -> None:
    line = "llama_model_load: error loading model architecture: unknown model architecture: 'x'"
    found = diagnose(Exit(1, None), [line], phase="starting", build=planned(NEW, NEWER).build)
    assert (found.exit_code, found.cause) == (65, "model_unsupported")
    assert found.message.startswith("This llama-server (b11434) does not know the architecture 'x' of ")
    unnamed = diagnose(Exit(1, None), [line], phase="starting")
    assert unnamed.message.startswith("This llama-server does not know")
