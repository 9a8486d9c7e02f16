"""The facts of a model file, on which planning, memory and admission decide.

:mod:`llamasup.core.gguf.facts_from_header` reads them from the GGUF header. The comments name the keys of the
header; ``{a}`` stands for the architecture's prefix. A chat template is searched for its features, never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct


class ModelClass(StrEnum):
    """The purpose of the file, which decides how llama-server loads it."""

    DECODER = "decoder"
    ENCODER = "encoder"  # embeddings
    RERANKER = "reranker"
    ENCODER_DECODER = "encoder-decoder"
    DECISION = "decision"  # probabilities for the answers to typed questions
    PROJECTOR = "projector"  # loaded with a model, as --mmproj
    LORA = "lora"  # loaded with a model, as --lora
    DRAFT = "draft"  # a draft head (EAGLE-3, DFlash, MTP assistant): loaded with its target model
    VOCAB = "vocab"  # a tokenizer without weights
    OTHER = "other"  # no language model: an image model, a control vector, …


# Types of decision models whose answers are logits of the last token: their prompts take any micro-batches.
# The others read the embeddings of several tokens (tools/server/README.md; b11549).
_ANSWER_BY_LOGITS = frozenset({"openjev", "lev", "nimble", "pplx-decider", "lfm2-d1"})
# Their attention is not causal.
_WITHOUT_TEXT = frozenset({"laya", "clef", "lfm2-d1-omni"})


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
    image_tokens: int = 0  # of a projector: the most that llama.cpp computes in one micro-batch; 0: any
    projection_length: int = 0  # of a projector: the width of the models it is for; 0 if uncertain
    adapted_length: int = 0  # of a LoRA adapter: the width of the models it is for; 0 if uncertain
    base_models: tuple[str, ...] = ()  # the models that an adapter names as its base
    drafts_itself: bool = False  # has the tensors of its MTP layers, and llama.cpp a graph for them
    mtp_layers: int = 0  # {a}.nextn_predict_layers: multi-token prediction, for self-speculation
    vocabulary: Vocabulary = Vocabulary()
    fim: FimTokens = FimTokens()
    split: Split = Split()
    layer_bytes: tuple[int, ...] = ()  # per layer: tensors blk.N.*
    expert_bytes: tuple[int, ...] = ()  # per layer: those of layer_bytes that are routed experts (*_exps)
    input_bytes: int = 0  # everything outside the layers, without the output: token embeddings and more
    output_bytes: int = 0  # output head and its norm
    tied_output: bool = False  # no output.weight: the token embeddings are used and loaded twice
    known: bool = True  # False: llamasup does not know the architecture, and the sizes are upper bounds
    decision: str = ""  # {a}.decision.type of a decision model: openjev, lev, kev, …
    contents: str = ""  # of a file of class OTHER: what it is
    version: int = 3  # of the GGUF container
    big_endian: bool = False

    @property
    def quantized_kv_fits(self) -> bool:
        """Whether the head sizes divide by 32, the block of q8_0, q4_0 and the other KV cache types."""
        return (
            self.known and self.key_length > 0 and self.key_length % 32 == 0 and self.value_length % 32 == 0
        )

    @property
    def embeds_decisions(self) -> bool:
        """Whether decisions need the embeddings of all tokens, and so the whole prompt in one micro-batch."""
        return bool(self.decision) and self.decision not in _ANSWER_BY_LOGITS

    @property
    def only_decides(self) -> bool:
        """Whether it is a decision model that llama-server cannot let generate text."""
        return self.decision in _WITHOUT_TEXT


_TOOLS = re.compile(r"\btools\b")
_ROLE = re.compile(r"\w(?:\['role'\]|\[\"role\"\]|\.role\b)")
_REFUSED = re.compile(r"not (?:supported|allowed)")
_REASONING = re.compile(
    r"<think>|</think>|\[THINK\]|<\|think|<\|channel\|?>|reasoning_content|enable_thinking|reasoning_effort|<reasoning>"
)


def read_chat_template(text: str, *, tool_template: bool = False) -> ChatTemplate:
    """Return the features of ``text``; ``tool_template``: the file has a second template for tools."""
    if not text.strip():
        return ChatTemplate()
    return ChatTemplate(
        present=True,
        tools=tool_template or _TOOLS.search(text) is not None,
        system=not _refuses_system(text) and ("system" in text or _renders_any_role(text)),
        reasoning=_REASONING.search(text) is not None,
    )


# Both take linear time: a template has any size, and a regular expression holds the interpreter's lock.
def _renders_any_role(text: str) -> bool:
    """``{{ message['role'] }}`` renders any role, so the system's too (ChatML)."""
    return any(_ROLE.search(part.partition("}")[0]) for part in text.split("{{")[1:])


def _refuses_system(text: str) -> bool:
    """Gemma's first templates: ``raise_exception('System role not supported')``."""
    reasons = (part.partition(")")[0] for part in text.lower().split("raise_exception(")[1:])
    return any(_REFUSED.search(reason.partition("system")[2]) for reason in reasons)


PURPOSES: Mapping[ModelClass, str] = MappingProxyType(
    {
        ModelClass.DECODER: "chat and text completion",
        ModelClass.ENCODER: "embeddings (/v1/embeddings)",
        ModelClass.RERANKER: "ranking documents by a query (/v1/rerank)",
        ModelClass.ENCODER_DECODER: "text to text (translation, summaries)",
        ModelClass.DECISION: "answers to typed questions (/v1/systemone)",
        ModelClass.PROJECTOR: "images or sound for its model: --mmproj FILE",
        ModelClass.LORA: "changes the model that it was trained on: -- --lora FILE",
        ModelClass.DRAFT: "drafts tokens for its model: --draft-model FILE",
        ModelClass.VOCAB: "a tokenizer without weights: nothing to serve",
        ModelClass.OTHER: "no language model: nothing to serve",
    }
)


_NOT_SERVED = frozenset(
    {ModelClass.PROJECTOR, ModelClass.LORA, ModelClass.DRAFT, ModelClass.VOCAB, ModelClass.OTHER}
)


def is_served(facts: ModelFacts) -> bool:
    """Return whether the file is a model that llama-server serves by itself."""
    return facts.model_class not in _NOT_SERVED
