"""Speculative decoding with a draft model: its flags in each build's spelling, and its context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from llamasup.core.capabilities import Capabilities
from llamasup.core.context_memory import CACHE_TYPES, ContextShape
from llamasup.core.errors import UsageInvalid
from llamasup.core.flags import CommandLine
from llamasup.core.model_facts import ModelClass, ModelFacts

__all__ = ["draft_shape", "give_draft"]

# How many tokens the draft model may run ahead. llama.cpp's default was 16 and is 3 since #22397.
_DRAFT_TOKENS = 8

_DRAFT = "--draft-model"
_DRAFT_K = ("--spec-draft-type-k", "--cache-type-k-draft")
_DRAFT_V = ("--spec-draft-type-v", "--cache-type-v-draft")


def give_draft(
    line: CommandLine,
    capabilities: Capabilities,
    draft: ModelFacts,
    path: str,
    shape: ContextShape,
    *,
    on_device: bool,
) -> None:
    """Pass the draft model at ``path``, whose context has this ``shape``. Raises UsageInvalid."""
    if draft.model_class is not ModelClass.DECODER:
        raise UsageInvalid(
            f"{PurePath(path).name} is of class {draft.model_class}, and a draft model has to be a decoder",
            remedy="give a small model of the same family as --draft-model",
        )
    types = capabilities.find("--spec-type")
    if types is not None and "draft-simple" in types.allowed:
        # Without the type the draft model is loaded and never used (#25345).
        line.give(("--spec-draft-model", "--model-draft"), path, "asked for with --draft-model", asked=_DRAFT)
        line.give("--spec-type", "draft-simple", "without it the draft model would be loaded and not used")
        line.give("--spec-draft-n-max", _DRAFT_TOKENS, "tokens that the draft model runs ahead, at most")
    elif capabilities.knows("--draft-max"):
        line.give("--model-draft", path, "asked for with --draft-model", asked=_DRAFT)
        line.give("--draft-max", _DRAFT_TOKENS, "tokens that the draft model runs ahead, at most")
        line.give("--ctx-size-draft", shape.ctx_total, "the draft model sees what the model sees")
        if on_device:
            line.give("--gpu-layers-draft", 999, "a draft model is worth it only where it is fast")
    else:
        # llama-server of August 2024 lists --model-draft, which only the examples beside it use.
        raise UsageInvalid(
            f"--draft-model cannot be honoured: this llama-server ({capabilities.version}) does not draft",
            remedy="use a build that has --spec-type or --draft-max with --runtime",
        )
    for flags, cache_type in ((_DRAFT_K, shape.k_type), (_DRAFT_V, shape.v_type)):
        if cache_type != "f16":
            line.give(flags, cache_type, "as the model's own cache", otherwise="f16 in this build")


def draft_shape(draft: ModelFacts, shape: ContextShape) -> ContextShape:
    """The draft model's context: as its target's, with cache types that its own heads allow."""
    return replace(
        shape,
        k_type=_suits(shape.k_type, draft.key_length),
        v_type=_suits(shape.v_type, draft.value_length),
    )


def _suits(cache_type: str, head_length: int) -> str:
    block = CACHE_TYPES[cache_type].block if cache_type in CACHE_TYPES else 32
    return "f16" if head_length % block else cache_type
