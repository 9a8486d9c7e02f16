"""What a model is for: refused where it is no model at all, and told to llama-server where that has to be."""

from __future__ import annotations

from pathlib import PurePath

from llamasup.errors import ModelInvalid, RuntimeMissing
from llamasup.gguf.facts import ModelClass, ModelFacts
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import CommandLine, ExtraArgs
from llamasup.planning.memory.context import has_kv_cache

__all__ = ["give_purpose", "refuse_what_is_no_model", "served_as"]

_NO_MODEL = {
    ModelClass.PROJECTOR: "give it as --mmproj beside the model that it belongs to",
    ModelClass.LORA: "give it after -- as --lora FILE beside the model that it was trained for",
    ModelClass.DRAFT: "it drafts for another model: serve that one, with this as --draft-model",
    ModelClass.VOCAB: "get the file with the weights: this one has only the tokenizer",
}
_WHAT_IT_IS = {
    ModelClass.PROJECTOR: "a multimodal projector",
    ModelClass.LORA: "a LoRA adapter",
    ModelClass.DRAFT: "a draft head",
    ModelClass.VOCAB: "a vocabulary without weights",
}


def refuse_what_is_no_model(model: ModelFacts, path: str) -> None:
    """Raise ModelInvalid for a file that is not to be served by itself."""
    if model.model_class in _NO_MODEL:
        raise ModelInvalid(
            f"{PurePath(path).name} is {_WHAT_IT_IS[model.model_class]}, not a model that can be served",
            remedy=_NO_MODEL[model.model_class],
        )


def served_as(model: ModelFacts, extra_args: ExtraArgs) -> ModelClass:
    """The class of the model, unless the user gave it another purpose after ``--``."""
    if extra_args.switch("--rerank"):
        return ModelClass.RERANKER
    if extra_args.switch("--embedding"):
        return ModelClass.RERANKER if extra_args.value("--pooling") == "rank" else ModelClass.ENCODER
    return model.model_class


def give_purpose(
    line: CommandLine, capabilities: Capabilities, model: ModelFacts, serves: ModelClass
) -> None:
    """Embedding and reranking have to be switched on; their endpoints answer 501 otherwise.

    Raises RuntimeMissing where the build cannot rerank.
    """
    if serves is ModelClass.ENCODER:
        line.give("--embedding", None, "this model gives embeddings", essential=True)
        if model.pooling in (None, "none"):
            # /v1/embeddings refuses pooling "none", which is llama-server's choice where the file has none.
            pooling = "last" if has_kv_cache(model) else "mean"
            why = f"the file names no pooling; {pooling} is usual for its kind"
            line.give("--pooling", pooling, why, essential=True)
    elif serves is ModelClass.RERANKER:
        _give_reranking(line, capabilities)


def _give_reranking(line: CommandLine, capabilities: Capabilities) -> None:
    why = "this model scores documents against a query"
    pooling = capabilities.find("--pooling")
    if capabilities.knows("--rerank"):
        # Alone: builds from October 2024 to mid-2025 rerank only "without --embedding".
        line.give("--rerank", None, why, essential=True)
    elif pooling is not None and "rank" in pooling.allowed:
        line.give("--embedding", None, why, essential=True)
        line.give("--pooling", "rank", "a score for each pair", essential=True)
    else:
        raise RuntimeMissing(
            f"this llama-server ({capabilities.version}) cannot rerank, and the model is a reranker",
            remedy="use a build that has --rerank (October 2024 or later) with --runtime",
        )
