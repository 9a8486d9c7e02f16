"""Facts about architectures that are in llama.cpp's source and not in the GGUF header, and their layers.

Read from src/llama-arch.cpp, src/models/*.cpp and src/llama-hparams.cpp, llama.cpp b11434. With the keys of
the header, they decide the memory of each layer: a KV cache, a window of it, a recurrent state, or nothing.
"""

from __future__ import annotations

from llamasup.core.gguf.facts import RecurrentState
from llamasup.core.gguf.header import Keys


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Without a KV cache, because they read the whole input at once.
ENCODERS = _names(
    "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
    "t5encoder wavtokenizer-dec"
)

# Text diffusion: no KV cache either (llama_model::create_memory).
DIFFUSION = _names("dream llada llada-moe rnd1")

ENCODER_DECODERS = frozenset({"t5"})

# Models of images and videos, as ComfyUI-GGUF and stable-diffusion.cpp name them.
IMAGE_MODELS = _names(
    "aura chroma cosmos flux flux2 hidream hyvid kandinsky5 ltxv lumina2 omnigen2 pig qwen_image sd1 sd3 "
    "sdxl wan z_image"
)

# Heads that draft for one target model and cannot run alone.
DRAFT_HEADS = frozenset({"eagle3", "dflash", "gemma4-assistant"})

# Their files may have MTP layers (nextn_predict_layers), which llama.cpp keeps and does not compute. In
# granite-switch, the key counts layers of its router.
WITHOUT_MTP_GRAPH = _names("bailingmoe2 dots3note exaone-moe exaone4 glm4 granite-switch")

# Projectors whose images llama.cpp computes without a causal mask, in one micro-batch (mtmd-helper.cpp).
# Those of the first kind pool a fixed number of patches; the others limit the tokens of an image (clip.cpp).
POOLED_IMAGES = frozenset({"gemma3"})
MOST_IMAGE_TOKENS = {"gemma3nv": 256, "gemma4v": 1120, "gemma4uv": 1120, "gemma4a": 750, "gemma4ua": 750}

# Every layer is recurrent, none has a KV cache.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

# Hybrids whose recurrent layers are those with head_count_kv 0.
RECURRENT_WITHOUT_KV_HEADS = _names(
    "jamba granitehybrid plamo2 lfm2 lfm2moe nemotron_h nemotron_h_moe kimi-linear"
)

# Hybrids where every N-th layer attends to all and the others are recurrent: the default N.
FULL_ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "bailingmoe3": 8}

# Hybrids whose layers are recurrent and have a KV cache, both.
ATTENTION_AND_RECURRENCE = frozenset({"falcon-h1"})

# Of every N layers all but one attend to the sliding window only; True: the full one comes first.
# Architectures that carry a window in the header and are not named here ignore it (llama, phi3, qwen2, …).
SLIDING_PERIODS: dict[str, tuple[int, bool]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, False),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma-embedding": (6, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),  # chunked attention
    "modern-bert": (3, True),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "smallthinker": (4, True),
}

# Tokens, if the header has no window.
DEFAULT_WINDOWS = {"exaone4": 4096, "gemma2": 4096, "llama4": 8192}

# The header's value is ignored, except 0.
FIXED_WINDOWS = frozenset({"llama4"})

# Only one size of the model has a window, recognised by its number of layers: EXAONE 4 32B.
SLIDING_ONLY_WITH_LAYERS = {"exaone4": 64}

# The number of layers with their own KV cache, which later layers share. Others have it in the header.
LAYERS_WITH_OWN_KV = {"gemma3n": 20}

# Elements of the extra input of each layer. Others have it in the header.
SIDE_LENGTHS = {"gemma3n": 256}

# An indexer chooses the attended cells (DSA); its own key is cached with the latent one.
INDEXED = frozenset({"deepseek32", "glm-dsa"})

KNOWN = (
    ENCODERS
    | DIFFUSION
    | ENCODER_DECODERS
    | DRAFT_HEADS
    | RECURRENT
    | RECURRENT_WITHOUT_KV_HEADS
    | FULL_ATTENTION_INTERVAL.keys()
    | ATTENTION_AND_RECURRENCE
    | SLIDING_PERIODS.keys()
    | _names(
        "clip llama deci falcon baichuan grok gpt2 gptj gptneox mpt starcoder starcoder2 refact bloom "
        "stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe qwen3tts clef phi2 phi3 "
        "phimoe plamo plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma4 maple xverse command-r "
        "dbrx olmo olmoe openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 "
        "glm4moe glm-dsa glm5-next bitnet jais jais2 nemotron exaone granite granitemoe graniteswitch "
        "granite_swa chameleon plm bailingmoe bailingmoe2 dots1 dots3note arcee ernie4_5 ernie4_5-moe "
        "hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 seed_oss grovemoe apertus minimax-01 "
        "minimax-m2 minimax-m3 hrm_text cogvlm pangu-embedded mistral3 mistral4 paddleocr mimo2 "
        " step35 spark2_5 llama-embed maincoder kimi-k3 talkie mellum nanbeige pockettts"
    )
)


# --- the memory of each layer ---------------------------------------------------------------------


_WINDOW = "{a}.attention.sliding_window"
_PATTERN = "{a}.attention.sliding_window_pattern"


def sliding_window(keys: Keys, architecture: str, layers: int) -> int | None:
    """Return the tokens that a sliding layer attends to: the header's number, or llama.cpp's default."""
    usual = SLIDING_ONLY_WITH_LAYERS.get(architecture, layers)
    default = DEFAULT_WINDOWS.get(architecture, 0) if layers == usual else 0
    window = keys.integer(_WINDOW, default)
    if window and architecture in FIXED_WINDOWS:
        return default
    return window or None


def sliding_layers(keys: Keys, architecture: str, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it attends only to the sliding window."""
    nowhere = (False,) * layers
    if layers != SLIDING_ONLY_WITH_LAYERS.get(architecture, layers):
        return nowhere
    if sliding_window(keys, architecture, layers) is None:
        return nowhere
    if keys.is_array(_PATTERN):
        pattern = keys.per_layer(_PATTERN, layers, trailing=keys.integer("{a}.nextn_predict_layers"))
        return tuple(bool(slides) for slides in pattern or ())
    if architecture not in SLIDING_PERIODS:
        return nowhere
    period, full_first = SLIDING_PERIODS[architecture]
    period = keys.integer(_PATTERN, period)
    if period == 0:
        return (True,) * layers
    full = 0 if full_first else period - 1
    return tuple(layer % period != full for layer in range(layers))


def recurrent_layers(
    keys: Keys,
    architecture: str,
    head_counts_kv: tuple[int, ...],
    feed_forward: tuple[int, ...],
    main_layers: int,
) -> tuple[bool, ...]:
    """Return for each layer whether it keeps a recurrent state.

    Layers from ``main_layers`` on (MTP) never do.
    """
    layers = len(head_counts_kv)
    stated = keys.per_layer("{a}.attention.recurrent_layers", layers, trailing=layers - main_layers)
    if stated is not None:
        return tuple(bool(recurs) and layer < main_layers for layer, recurs in enumerate(stated))
    if architecture in RECURRENT | ATTENTION_AND_RECURRENCE:
        return (True,) * layers
    if architecture in RECURRENT_WITHOUT_KV_HEADS:
        # Nemotron-H also has layers that are a feed-forward network alone.
        only_ffn = architecture.startswith("nemotron_h")
        return tuple(
            heads == 0 and not (only_ffn and width)
            for heads, width in zip(head_counts_kv, feed_forward, strict=True)
        )
    default = FULL_ATTENTION_INTERVAL.get(architecture)
    if default is None:
        return (False,) * layers
    interval = keys.integer("{a}.full_attention_interval", default, least=1)
    return tuple(layer < main_layers and (layer + 1) % interval != 0 for layer in range(layers))


def attention_layers(
    keys: Keys,
    architecture: str,
    head_counts_kv: tuple[int, ...],
    recurrent: tuple[bool, ...],
    mtp_layers: int,
) -> tuple[bool, ...]:
    """Return for each layer whether it has a KV cache of its own in the main context."""
    layers = len(head_counts_kv)
    if architecture in ENCODERS | DIFFUSION | RECURRENT:
        return (False,) * layers
    main = layers - mtp_layers
    shared = max(main - LAYERS_WITH_OWN_KV.get(architecture, main), 0)
    own = main - keys.integer("{a}.attention.shared_kv_layers", shared, most=main)
    is_hybrid_layer = architecture in ATTENTION_AND_RECURRENCE
    return tuple(
        layer < own and heads > 0 and (is_hybrid_layer or not recurs)
        for layer, (heads, recurs) in enumerate(zip(head_counts_kv, recurrent, strict=True))
    )


def recurrent_state(keys: Keys, architecture: str, embedding_length: int, heads: int) -> RecurrentState:
    """Return the elements of one recurrent layer's state (n_embd_r and n_embd_s of llama-hparams.cpp)."""
    wkv_head = keys.integer("{a}.wkv.head_size")
    if wkv_head:  # RWKV
        shifts = keys.integer("{a}.token_shift_count", 2)
        return RecurrentState(shifts * embedding_length, embedding_length * wkv_head, 16 * embedding_length)
    short_conv = keys.integer("{a}.shortconv.l_cache")
    if short_conv:  # LFM2
        return RecurrentState(embedding_length * (short_conv - 1), 0, 6 * embedding_length)
    kernel = max(keys.integer("{a}.ssm.conv_kernel") - 1, 0)
    kda_head = keys.integer("{a}.kda.head_dim")
    if kda_head:  # Kimi delta attention
        convolved = 3 * heads * kda_head
        return RecurrentState(kernel * convolved, heads * kda_head * kda_head, 4 * convolved)
    inner, state_size = keys.integer("{a}.ssm.inner_size"), keys.integer("{a}.ssm.state_size")
    convolved = inner + 2 * keys.integer("{a}.ssm.group_count") * state_size
    passes = 5 if architecture in FULL_ATTENTION_INTERVAL else 7  # gated delta net; Mamba
    return RecurrentState(kernel * convolved, state_size * inner, passes * convolved)
