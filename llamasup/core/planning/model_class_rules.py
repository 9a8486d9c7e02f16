"""Rules for the class of a model file: refuses files that cannot be served, adds flags for the others."""

from __future__ import annotations

from pathlib import PurePath

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import CommandLine
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.inputs import PlanInputs
from llamasup.core.planning.memory.kv_cache import has_kv_cache
from llamasup.errors import ModelInvalid, RuntimeMissing

UNKNOWN = "llamasup does not know its architecture, so it plans for full attention in each layer"

_REMEDIES = {
    ModelClass.PROJECTOR: "pass it as --mmproj together with the model that it belongs to",
    ModelClass.LORA: "pass it after -- as --lora FILE together with the model that it was trained for",
    ModelClass.DRAFT: "it drafts for another model: serve that model with this file as --draft-model",
    ModelClass.VOCAB: "get the file with the weights; this file has only the tokenizer",
    ModelClass.OTHER: "give the .gguf file of a language model",
}
_KINDS = {
    ModelClass.PROJECTOR: "a multimodal projector",
    ModelClass.LORA: "a LoRA adapter",
    ModelClass.DRAFT: "a draft head",
    ModelClass.VOCAB: "a vocabulary without weights",
}


def refuse_unservable(model: ModelFacts, path: str) -> None:
    """Raise ModelInvalid for a file that cannot be served by itself."""
    if model.model_class in _REMEDIES:
        kind = _KINDS.get(model.model_class, model.contents)
        raise ModelInvalid(
            f"{PurePath(path).name} is {kind}, not a model that can be served",
            remedy=_REMEDIES[model.model_class],
        )


def unknown_warning(model: ModelFacts) -> tuple[str, str] | None:
    """Return the warning and its remedy for a model of an unknown architecture."""
    if model.known:
        return None
    return (
        f"llamasup does not know the architecture {model.architecture!r}: llama-server decides whether it "
        "can load the model, and the memory is an estimate for full attention in each layer.",
        "For a longer context, use --ctx-size. A newer llamasup may know the architecture.",
    )


def give_purpose(line: CommandLine, inputs: PlanInputs) -> None:
    """Enable embedding or reranking; without the flag their endpoints answer 501.

    Raises RuntimeMissing if the build cannot rerank.
    """
    if inputs.serves is ModelClass.ENCODER:
        line.give("--embedding", None, "this model computes embeddings", essential=True)
        if inputs.model.pooling in (None, "none"):
            # /v1/embeddings refuses pooling "none", llama-server's default for a file without a pooling type.
            pooling = "last" if has_kv_cache(inputs.model) else "mean"
            why = f"the file has no pooling type; {pooling} is usual for such a model"
            line.give("--pooling", pooling, why, essential=True)
    elif inputs.serves is ModelClass.RERANKER:
        _give_reranking(line, inputs.capabilities)


def _give_reranking(line: CommandLine, capabilities: Capabilities) -> None:
    why = "this model scores documents against a query"
    pooling = capabilities.find("--pooling")
    if capabilities.knows("--rerank"):
        # Without --embedding, because builds from October 2024 to mid-2025 rerank only then.
        line.give("--rerank", None, why, essential=True)
    elif pooling is not None and "rank" in pooling.allowed:
        line.give("--embedding", None, why, essential=True)
        line.give("--pooling", "rank", "one score for each pair of query and document", essential=True)
    else:
        raise RuntimeMissing(
            f"the model is a reranker, and this llama-server ({capabilities.version}) cannot rerank",
            remedy="use a build with --rerank (October 2024 or later), selected with --runtime",
        )
