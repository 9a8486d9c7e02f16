"""The facts of a model file, on which planning, memory and admission decide.

:mod:`llamasup.gguf.facts_from_header` reads them from the GGUF header. Key names in the comments are those of
the header; ``{a}`` stands for the architecture's prefix. A chat template is searched for its features, never
run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

__all__ = [
    "PURPOSES",
    "ChatTemplate",
    "Experts",
    "FimTokens",
    "Indexer",
    "ModelClass",
    "ModelFacts",
    "RecurrentState",
    "Split",
    "Vocabulary",
    "is_served",
    "read_chat_template",
]


class ModelClass(StrEnum):
    """The purpose of the file, which decides how llama-server loads it."""

    DECODER = "decoder"
    ENCODER = "encoder"  # embeddings
    RERANKER = "reranker"
    ENCODER_DECODER = "encoder-decoder"
    PROJECTOR = "projector"  # loaded with a model, as --mmproj
    LORA = "lora"  # loaded with a model, as --lora
    DRAFT = "draft"  # a draft head (EAGLE-3, DFlash, MTP assistant): loaded with its target model
    VOCAB = "vocab"  # a tokenizer without weights


class ChatTemplate(Struct, frozen=True):
    """Whether the model has a chat template, and the features that its text shows."""

    present: bool = False
    tools: bool = False
    system: bool = False
    reasoning: bool = False


class Experts(Struct, frozen=True):
    """Mixture of experts; ``count`` 0 means a dense model."""

    count: int = 0
    used: int = 0
    shared: int = 0
    feed_forward_length: int = 0  # of one expert


class Indexer(Struct, frozen=True):
    """The indexer that chooses the cells a layer attends to (DeepSeek V3.2, GLM 5); zeros without one."""

    key_length: int = 0  # elements of its own cached key
    top_k: int = 0  # chosen cells


class FimTokens(Struct, frozen=True):
    """Token ids for filling in the middle of code (``/infill``); ``None`` if the model has none."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None

    @property
    def usable(self) -> bool:
        return self.prefix is not None and self.suffix is not None and self.middle is not None


class Vocabulary(Struct, frozen=True):
    """The facts that must agree between a model and its draft model."""

    model: str | None = None  # tokenizer.ggml.model: llama (SPM), gpt2 (BPE), bert (WPM), t5 (UGM), rwkv, …
    pre: str | None = None  # tokenizer.ggml.pre: the pre-tokenizer
    size: int = 0
    bos: int | None = None
    eos: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    digests: tuple[tuple[int, int], ...] = ()  # of the first so many tokens (gguf_container.Array)


class RecurrentState(Struct, frozen=True):
    """The state of one sequence in each recurrent layer, in f32 elements, for any length of context.

    ``conv_elements`` is llama.cpp's n_embd_r, ``state_elements`` its n_embd_s (llama-hparams.cpp).
    """

    conv_elements: int
    state_elements: int
    work_elements: int = 0  # of a layer for each token of a batch, about (measured, b11434)

    @property
    def bytes_per_layer(self) -> int:
        return 4 * (self.conv_elements + self.state_elements)


class Split(Struct, frozen=True):
    """One part of a model in several files; a whole model is part 0 of 1."""

    index: int = 0
    count: int = 1


class ModelFacts(Struct, frozen=True):
    """The facts of one model file, or of a whole split set if the reader has joined the parts.

    Sizes are bytes, lengths are tokens or elements. Tuples "per layer" have ``layers`` entries.
    """

    architecture: str
    model_class: ModelClass
    name: str | None
    parameters: int  # elements over all tensors
    quantization: str  # as in file names: "Q4_K_M", "F16"; "" for a file without weights
    layers: int  # {a}.block_count, MTP layers included
    context_length: int  # the longest context of the training; 0 if there is none
    embedding_length: int
    feed_forward_lengths: tuple[int, ...]  # per layer
    head_counts: tuple[int, ...]  # per layer
    head_counts_kv: tuple[int, ...]  # per layer
    key_length: int  # of one head
    value_length: int  # of one head
    sliding_window: int | None  # tokens
    vocab_size: int
    chat_template: ChatTemplate
    pooling: str | None  # none, mean, cls, last, rank; None if missing
    file_bytes: int
    expected_bytes: int  # of header, padding and tensors, computed from the header
    weights_bytes: int  # tensors only
    sliding_layers: tuple[bool, ...] = ()  # per layer: attends only to the sliding window
    key_length_swa: int = 0  # of one head in a sliding layer
    value_length_swa: int = 0
    mla: bool = False  # multi-head latent attention: K alone is cached, V is a view of it
    indexer: Indexer = Indexer()
    side_length: int = 0  # of the extra input of each layer (Gemma 3n, Gemma 4)
    recurrent: RecurrentState | None = None
    recurrent_layers: tuple[bool, ...] = ()  # per layer: keeps a recurrent state
    kv_layers: tuple[
        bool, ...
    ] = ()  # per layer: has a KV cache (not recurrent, sharing, MTP or encoder layers)
    causal: bool = True
    experts: Experts = Experts()
    projection_length: int = 0  # of a projector: the width of the models it is for; 0 if uncertain
    adapted_length: int = 0  # of a LoRA adapter: the width of the models it is for; 0 if uncertain
    base_models: tuple[str, ...] = ()  # the models that an adapter names as its base
    mtp_layers: int = 0  # {a}.nextn_predict_layers: multi-token prediction, for self-speculation
    vocabulary: Vocabulary = Vocabulary()
    fim: FimTokens = FimTokens()
    split: Split = Split()
    layer_bytes: tuple[int, ...] = ()  # per layer: tensors blk.N.*
    expert_bytes: tuple[int, ...] = ()  # per layer: those of layer_bytes that are routed experts (*_exps)
    input_bytes: int = 0  # everything outside the layers, without the output: token embeddings and more
    output_bytes: int = 0  # output head and its norm
    tied_output: bool = False  # no output.weight: the token embeddings are used and loaded twice
    version: int = 3  # of the GGUF container
    big_endian: bool = False

    @property
    def quantized_kv_fits(self) -> bool:
        """Head sizes divide by 32, the block of q8_0, q4_0 and the other KV cache types."""
        return self.key_length > 0 and self.key_length % 32 == 0 and self.value_length % 32 == 0


_TOOLS = re.compile(r"\btools\b")
# "{{ message['role'] }}" renders any role, so the system's too (ChatML).
_ANY_ROLE = re.compile(r"\{\{[^}]*\b\w+(?:\['role'\]|\[\"role\"\]|\.role\b)")
# Gemma's first templates: raise_exception('System role not supported').
_NO_SYSTEM = re.compile(r"raise_exception\([^)]*system[^)]*not (?:supported|allowed)", re.IGNORECASE)
_REASONING = re.compile(
    r"<think>|</think>|\[THINK\]|<\|think|<\|channel\|?>|reasoning_content|enable_thinking|reasoning_effort|<reasoning>"
)


def read_chat_template(text: str, *, tool_template: bool = False) -> ChatTemplate:
    """The features of ``text``; ``tool_template``: the file has a second template for tools."""
    if not text.strip():
        return ChatTemplate()
    return ChatTemplate(
        present=True,
        tools=tool_template or _TOOLS.search(text) is not None,
        system=_NO_SYSTEM.search(text) is None and ("system" in text or _ANY_ROLE.search(text) is not None),
        reasoning=_REASONING.search(text) is not None,
    )


PURPOSES: Mapping[ModelClass, str] = MappingProxyType(
    {
        ModelClass.DECODER: "chat and text completion",
        ModelClass.ENCODER: "embeddings (/v1/embeddings)",
        ModelClass.RERANKER: "ranking documents by a query (/v1/rerank)",
        ModelClass.ENCODER_DECODER: "text to text (translation, summaries)",
        ModelClass.PROJECTOR: "images or sound for its model: --mmproj FILE",
        ModelClass.LORA: "changes the model that it was trained on: -- --lora FILE",
        ModelClass.DRAFT: "drafts tokens for its model: --draft-model FILE",
        ModelClass.VOCAB: "a tokenizer without weights: nothing to serve",
    }
)


_ATTACHMENTS = frozenset({ModelClass.PROJECTOR, ModelClass.LORA, ModelClass.DRAFT, ModelClass.VOCAB})


def is_served(facts: ModelFacts) -> bool:
    """Whether the file is a model that llama-server serves by itself."""
    return facts.model_class not in _ATTACHMENTS
