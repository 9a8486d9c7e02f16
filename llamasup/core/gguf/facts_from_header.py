"""Turns the keys and tensors of a GGUF header into :class:`ModelFacts`, as llama.cpp b11434 reads them.

:mod:`llamasup.core.gguf.header` reads the format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from llamasup.core.gguf import architectures
from llamasup.core.gguf.architectures import (
    attention_layers,
    recurrent_layers,
    recurrent_state,
    sliding_layers,
    sliding_window,
)
from llamasup.core.gguf.facts import (
    Experts,
    FimTokens,
    Indexer,
    ModelClass,
    ModelFacts,
    Split,
    Vocabulary,
    read_chat_template,
)
from llamasup.core.gguf.header import Container, Keys, NeedMore, Tensor, read_container
from llamasup.core.gguf.tensor_types import FILE_TYPES
from llamasup.errors import ModelInvalid

# LLAMA_MAX_LAYERS is 512; later builds may allow more. The bound protects against damaged headers.
_MAX_LAYERS = 4_096
_MAX_PARTS = 65_535  # split.count is a u16
_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # enum llama_pooling_type
_GUESSED = 1024  # LLAMA_FTYPE_GUESSED, a flag
_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,4})\.")
_ROUTED_EXPERTS = re.compile(r"_(?:ch)?exps\.")
# Tensors whose input has the width of the model: queries, keys and values, the first of the MLP.
_READS_WIDTH = re.compile(r"blk\.\d+\.(?:attn_(?:q|k|v|qkv)|ffn_(?:gate|up))\.weight\.lora_a$")
_MAX_BASES = 16  # a merge has a few
_OUTPUT = ("output.", "output_norm.", "dec.output_norm.", "cls.", "dense_")
# By general.type, or by general.architecture in older files.
_NOT_MODELS = {
    "imatrix": "an importance matrix, which llama-quantize reads",
    "controlvector": "a control vector, which llama-server loads with a model (--control-vector)",
}
_WITHOUT_LAYERS = (ModelClass.LORA, ModelClass.PROJECTOR, ModelClass.VOCAB)


def read_header(header: bytes | bytearray | memoryview, file_bytes: int) -> ModelFacts | NeedMore:
    """Read the facts from the first bytes of a model file of ``file_bytes``.

    Raises ModelInvalid, naming the field and its offset, for what llama.cpp would not load.
    """
    container = read_container(header, file_bytes)
    return container if isinstance(container, NeedMore) else facts_of([container])


def split_of(container: Container) -> Split:
    """Return the number of this part, and of all parts (``split.no`` and ``split.count``, from
    llama-gguf-split).
    """
    keys = Keys(container)
    count = keys.integer("split.count", 1, most=_MAX_PARTS) or 1
    index = keys.integer("split.no", most=_MAX_PARTS)
    if index >= count:
        keys.refuse("split.no", f"is {index}, but there are only {count} parts")
    return Split(index=index, count=count)


def facts_of(parts: Sequence[Container]) -> ModelFacts:
    """Return the facts of a model from the header of its file, or from the headers of all its files in order.

    Only the first part of a split set has the model's keys; each part has its own tensors. The first part
    alone gives facts whose sizes are that part's. Raises ModelInvalid.
    """
    first = parts[0]
    split = split_of(first)
    if split.index:
        raise ModelInvalid(
            f"this is part {split.index + 1} of a model in {split.count} files",
            remedy="Give the first part (…-00001-of-…): llama-server finds the others by its name.",
        )
    architecture = Keys(first).text("general.architecture") or ""
    tensors = [tensor for part in parts for tensor in part.tensors]
    if contents := _contents(first, architecture, tensors):
        keys = Keys(first, architecture)
        return replace(_outline(parts, tensors, keys, ModelClass.OTHER, split), contents=contents)
    model_class = _model_class(first, architecture, tensors, split)
    if architecture not in architectures.KNOWN and model_class not in _WITHOUT_LAYERS:
        return _outline(parts, tensors, Keys(first, architecture), model_class, split)
    keys = Keys(first, _prefix(first, architecture))

    number = keys.integer if model_class in _WITHOUT_LAYERS else keys.required
    layers = number("{a}.block_count")
    if layers > _MAX_LAYERS:
        keys.refuse("{a}.block_count", f"is {layers}, more than any model has ({_MAX_LAYERS})")
    mtp_layers = keys.integer("{a}.nextn_predict_layers", most=layers)
    embedding_length = number("{a}.embedding_length")
    nothing = (0,) * layers
    head_counts = keys.per_layer("{a}.attention.head_count", layers, trailing=mtp_layers) or nothing
    head_counts_kv = keys.per_layer("{a}.attention.head_count_kv", layers, trailing=mtp_layers) or head_counts
    feed_forward = keys.per_layer("{a}.feed_forward_length", layers, trailing=mtp_layers) or nothing
    key_length, value_length = _head_lengths(keys, embedding_length, head_counts, head_counts_kv)
    recurrent = recurrent_layers(keys, architecture, head_counts_kv, feed_forward, layers - mtp_layers)
    pooling = _pooling(keys)
    causal = keys.flag("{a}.attention.causal")
    outline = _outline(parts, tensors, keys, model_class, split)
    if mtp_layers and len(parts) == split.count and not any(outline.layer_bytes[: layers - mtp_layers]):
        model_class = ModelClass.DRAFT  # served alone, it ends b11434 with SIGSEGV

    return replace(
        outline,
        known=True,
        architecture=architecture,
        model_class=model_class,
        context_length=number("{a}.context_length"),
        embedding_length=embedding_length,
        feed_forward_lengths=feed_forward,
        head_counts=head_counts,
        head_counts_kv=head_counts_kv,
        key_length=key_length,
        value_length=value_length,
        sliding_window=sliding_window(keys, architecture, layers),
        vocab_size=keys.integer("{a}.vocab_size") or keys.tokens.count,
        pooling=pooling,
        sliding_layers=sliding_layers(keys, architecture, layers),
        key_length_swa=keys.integer("{a}.attention.key_length_swa", key_length),
        value_length_swa=keys.integer("{a}.attention.value_length_swa", value_length),
        mla="{a}.attention.key_length_mla" in keys and "{a}.attention.value_length_mla" in keys,
        indexer=Indexer(
            key_length=keys.integer("{a}.attention.indexer.key_length"),
            top_k=keys.integer("{a}.attention.indexer.top_k"),
        )
        if architecture in architectures.INDEXED
        else Indexer(),
        side_length=keys.integer(
            "{a}.embedding_length_per_layer_input", architectures.SIDE_LENGTHS.get(architecture, 0)
        ),
        recurrent=recurrent_state(keys, architecture, embedding_length, max(head_counts, default=0))
        if any(recurrent)
        else None,
        recurrent_layers=recurrent,
        kv_layers=attention_layers(keys, architecture, head_counts_kv, recurrent, mtp_layers),
        causal=causal is not False and architecture not in architectures.ENCODERS,
        experts=Experts(
            count=keys.integer("{a}.expert_count"),
            used=keys.integer("{a}.expert_used_count"),
            shared=keys.integer("{a}.expert_shared_count"),
            feed_forward_length=keys.integer("{a}.expert_feed_forward_length", max(feed_forward, default=0)),
        ),
        projection_length=_projection_length(keys, tensors) if model_class is ModelClass.PROJECTOR else 0,
        image_tokens=_image_tokens(keys) if model_class is ModelClass.PROJECTOR else 0,
        adapted_length=_adapted_length(tensors) if model_class is ModelClass.LORA else 0,
        base_models=_base_models(keys) if model_class is ModelClass.LORA else (),
        mtp_layers=mtp_layers,
        drafts_itself=mtp_layers > 0
        and architecture not in architectures.WITHOUT_MTP_GRAPH
        and any(".nextn." in tensor.name for tensor in tensors),
    )


# --- what it is ----------------------------------------------------------------------------------


def _contents(container: Container, architecture: str, tensors: Sequence[Tensor]) -> str:
    """Name the contents of a file that is no language model; empty for a language model or a part of one."""
    keys = Keys(container, architecture)
    general_type = keys.text("general.type") or ""
    for kind in (general_type, architecture):
        if kind in _NOT_MODELS:
            return _NOT_MODELS[kind]
    if not architecture:
        if not tensors:
            keys.refuse("general.architecture", "is missing or empty; keys begin at offset 24")
        return "a file without an architecture"
    if architecture in architectures.KNOWN or general_type in ("adapter", "mmproj") or "adapter.type" in keys:
        return ""
    if architecture in architectures.IMAGE_MODELS:
        return f"an image or video model ({architecture})"
    # Each language model of llama.cpp has both.
    has_tokens = any(f"tokenizer.ggml.{key}" in keys for key in ("model", "tokens"))
    if has_tokens and "{a}.block_count" in keys:
        return ""
    lacks = "layers" if has_tokens else "a tokenizer"
    return f"a file of the architecture {architecture[:64]!r} without {lacks}"


def _outline(
    parts: Sequence[Container], tensors: Sequence[Tensor], keys: Keys, model_class: ModelClass, split: Split
) -> ModelFacts:
    """The facts that do not depend on the architecture; all facts of a file whose architecture llamasup does
    not know. Its sizes are upper bounds: full attention in each layer, with as many keys as the header says,
    or as the model is wide.
    """
    first = parts[0]

    def number(key: str, most: int = 1 << 31) -> int:
        with suppress(ModelInvalid):
            return keys.integer(key, most=most)
        return 0

    layers, width = number("{a}.block_count", _MAX_LAYERS), number("{a}.embedding_length")
    heads: dict[str, tuple[int, ...]] = {}
    for name in ("head_count", "head_count_kv"):
        with suppress(ModelInvalid):
            heads[name] = keys.per_layer(f"{{a}}.attention.{name}", layers) or ()
    # A model without attention has no heads.
    counts, counts_kv = heads.get("head_count", ()), heads.get("head_count_kv", ())
    counts = counts if any(counts) else (1,) * layers
    counts_kv = counts_kv if any(counts_kv) else counts
    shared = width // max(counts, default=1)
    by_layer, by_experts, input_bytes, output_bytes = _tensor_bytes(tensors, layers)
    return ModelFacts(
        architecture=keys.prefix[:64],
        model_class=model_class,
        name=keys.text("general.name") or None,
        parameters=sum(tensor.elements for tensor in tensors),
        quantization=_quantization(keys, tensors),
        layers=layers,
        context_length=number("{a}.context_length"),
        embedding_length=width,
        feed_forward_lengths=(number("{a}.feed_forward_length") or 4 * width,) * layers,
        head_counts=counts,
        head_counts_kv=counts_kv,
        key_length=number("{a}.attention.key_length") or shared,
        value_length=number("{a}.attention.value_length") or shared,
        sliding_window=None,
        vocab_size=number("{a}.vocab_size") or keys.tokens.count,
        chat_template=read_chat_template(
            keys.text("tokenizer.chat_template") or "",
            tool_template="tokenizer.chat_template.tool_use" in keys,
        ),
        pooling=_pooling(keys, lenient=True),
        file_bytes=sum(part.file_bytes for part in parts),
        expected_bytes=sum(part.expected_bytes for part in parts),
        weights_bytes=sum(tensor.size_bytes for tensor in tensors),
        vocabulary=_vocabulary(keys),
        fim=_fim(keys),
        split=split,
        layer_bytes=by_layer,
        expert_bytes=by_experts,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        tied_output=bool(tensors) and all(tensor.name != "output.weight" for tensor in tensors),
        known=False,
        decision=_decision(keys),
        version=first.version,
        big_endian=first.big_endian,
    )


def _prefix(container: Container, architecture: str) -> str:
    """The architecture's name, but a projector's keys are those of its vision or audio tower."""
    if architecture != "clip":
        return architecture
    return "clip.vision" if "clip.vision.block_count" in container.values else "clip.audio"


def _model_class(
    container: Container, architecture: str, tensors: Sequence[Tensor], split: Split
) -> ModelClass:
    keys = Keys(container, architecture)
    general_type = keys.text("general.type")
    if general_type == "adapter" or "adapter.type" in keys:
        return ModelClass.LORA
    if general_type == "mmproj" or architecture == "clip":
        return ModelClass.PROJECTOR
    if not tensors and split.count == 1:
        if not keys.tokens.count:
            raise ModelInvalid(
                "the file has neither tensors (the tensor count at offset 8 is 0) nor a vocabulary",
                remedy="Download another file of this model.",
            )
        return ModelClass.VOCAB
    if architecture in architectures.DRAFT_HEADS:
        return ModelClass.DRAFT
    if _decision(keys):
        return ModelClass.DECISION
    if architecture in architectures.ENCODER_DECODERS:
        return ModelClass.ENCODER_DECODER
    pooling = _pooling(keys, lenient=architecture not in architectures.KNOWN)
    if pooling == "rank":
        return ModelClass.RERANKER
    if architecture in architectures.ENCODERS or pooling in ("mean", "cls", "last"):
        return ModelClass.ENCODER
    return ModelClass.DECODER


def _decision(keys: Keys) -> str:
    """The type of a decision model, even one that llama-server would refuse; empty for other models."""
    with suppress(ModelInvalid):
        return keys.text("{a}.decision.type") or ("unknown" if "{a}.decision.type" in keys else "")
    return "unknown"


def _pooling(keys: Keys, *, lenient: bool = False) -> str | None:
    """Read the pooling.

    ``lenient``: an unknown value counts as none.
    """
    try:
        number = keys.optional("{a}.pooling_type")
    except ModelInvalid:
        if not lenient:
            raise
        number = None
    if number is None or (lenient and number not in _POOLING):
        return None
    if number not in _POOLING:
        keys.refuse("{a}.pooling_type", f"is {number}, known are 0 to {max(_POOLING)}")
    return _POOLING[number]


def _quantization(keys: Keys, tensors: Sequence[Tensor]) -> str:
    """The file's own word for it, else the type that most of its bytes have."""
    if not tensors:
        return ""
    stated = keys.optional("general.file_type")
    if stated is not None and stated & ~_GUESSED in FILE_TYPES:
        return FILE_TYPES[stated & ~_GUESSED]
    by_type: Counter[str] = Counter()
    for tensor in tensors:
        by_type[tensor.type_name] += tensor.size_bytes
    return by_type.most_common(1)[0][0]


# --- attention and vocabulary --------------------------------------------------------------------


def _head_lengths(
    keys: Keys, embedding_length: int, head_counts: tuple[int, ...], head_counts_kv: tuple[int, ...]
) -> tuple[int, int]:
    """Elements of one head's key and value; where they are not stated the heads share the width."""
    for layer, (heads, heads_kv) in enumerate(zip(head_counts, head_counts_kv, strict=True)):
        if heads and heads_kv and heads % heads_kv:
            keys.refuse("{a}.attention.head_count_kv", f"is {heads_kv} for {heads} heads in layer {layer}")
    heads = next(filter(None, head_counts), 0)
    stated = "{a}.attention.key_length" in keys and "{a}.attention.value_length" in keys
    if heads and embedding_length % heads and not stated:
        keys.refuse(
            "{a}.attention.head_count", f"is {heads}, which does not divide the width {embedding_length}"
        )
    shared = embedding_length // heads if heads else 0
    return (
        keys.integer("{a}.attention.key_length", shared),
        keys.integer("{a}.attention.value_length", shared),
    )


def _vocabulary(keys: Keys) -> Vocabulary:
    return Vocabulary(
        model=keys.text("tokenizer.ggml.model"),
        pre=keys.text("tokenizer.ggml.pre"),
        size=keys.tokens.count,
        bos=keys.optional("tokenizer.ggml.bos_token_id"),
        eos=keys.optional("tokenizer.ggml.eos_token_id"),
        add_bos=keys.flag("tokenizer.ggml.add_bos_token"),
        add_eos=keys.flag("tokenizer.ggml.add_eos_token"),
        digests=keys.tokens.digests,
    )


def _fim(keys: Keys) -> FimTokens:
    """The newer spelling first; converters wrote prefix, suffix and middle until October 2024."""

    def token(newer: str, older: str) -> int | None:
        found = keys.optional(f"tokenizer.ggml.{newer}_token_id")
        return keys.optional(f"tokenizer.ggml.{older}_token_id") if found is None else found

    return FimTokens(
        prefix=token("fim_pre", "prefix"),
        suffix=token("fim_suf", "suffix"),
        middle=token("fim_mid", "middle"),
    )


def _projection_length(keys: Keys, tensors: Sequence[Tensor]) -> int:
    """The length of the embeddings that a projector computes. 0 if uncertain.

    Converters of 2023 and 2024 wrote the length of CLIP's own projection (768) instead, which is not used. So
    the stated length counts only if a tensor of the projector has it.
    """
    stated = keys.integer("{a}.projection_dim")
    used = any(tensor.name.startswith("mm.") and stated in tensor.lengths for tensor in tensors)
    return stated if used else 0


def _image_tokens(keys: Keys) -> int:
    """The tokens of the largest image of a projector whose images also attend to their own later tokens."""
    kind = keys.text("clip.projector_type") or ""
    if kind in architectures.MOST_IMAGE_TOKENS:
        return architectures.MOST_IMAGE_TOKENS[kind]
    if kind not in architectures.POOLED_IMAGES:
        return 0
    size, patch = keys.integer("{a}.image_size"), keys.integer("{a}.patch_size")
    pooled = keys.integer("{a}.projector.scale_factor", 4)
    return (size // (patch * pooled)) ** 2 if patch * pooled else 0


def _adapted_length(tensors: Sequence[Tensor]) -> int:
    """The width of the layers that a LoRA adapter adapts: the input of its A matrices. 0 if they differ."""
    widths = {tensor.lengths[0] for tensor in tensors if _READS_WIDTH.search(tensor.name) and tensor.lengths}
    return widths.pop() if len(widths) == 1 else 0


def _base_models(keys: Keys) -> tuple[str, ...]:
    """The base models of an adapter, which convert_lora_to_gguf.py copies from its configuration."""
    count = min(keys.integer("general.base_model.count"), _MAX_BASES)
    names = (keys.text(f"general.base_model.{number}.name") for number in range(count))
    return tuple(filter(None, names))


# --- bytes ---------------------------------------------------------------------------------------


def _tensor_bytes(
    tensors: Sequence[Tensor], layers: int
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return the bytes per layer, of which routed experts, before the layers, and after them."""
    by_layer, by_experts = [0] * layers, [0] * layers
    input_bytes = output_bytes = 0
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if block and int(block[1]) < layers:
            by_layer[int(block[1])] += tensor.size_bytes
            if _ROUTED_EXPERTS.search(tensor.name):
                by_experts[int(block[1])] += tensor.size_bytes
        elif tensor.name.startswith(_OUTPUT):
            output_bytes += tensor.size_bytes
        else:
            input_bytes += tensor.size_bytes
    return tuple(by_layer), tuple(by_experts), input_bytes, output_bytes
