"""The memory of each layer: a KV cache, a window of it, a recurrent state, or nothing.

As llama.cpp b11434 decides it (src/models/*.cpp, src/llama-hparams.cpp) from the keys of the header.
"""

from __future__ import annotations

from llamasup.core.gguf import architectures
from llamasup.core.gguf.facts import RecurrentState
from llamasup.core.gguf.keys import Keys

_WINDOW = "{a}.attention.sliding_window"
_PATTERN = "{a}.attention.sliding_window_pattern"


def sliding_window(keys: Keys, architecture: str, layers: int) -> int | None:
    """Return the tokens that a sliding layer attends to: the header's number, or llama.cpp's default."""
    usual = architectures.SLIDING_ONLY_WITH_LAYERS.get(architecture, layers)
    default = architectures.DEFAULT_WINDOWS.get(architecture, 0) if layers == usual else 0
    window = keys.integer(_WINDOW, default)
    if window and architecture in architectures.FIXED_WINDOWS:
        return default
    return window or None


def sliding_layers(keys: Keys, architecture: str, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it attends only to the sliding window."""
    nowhere = (False,) * layers
    if layers != architectures.SLIDING_ONLY_WITH_LAYERS.get(architecture, layers):
        return nowhere
    if sliding_window(keys, architecture, layers) is None:
        return nowhere
    if keys.is_array(_PATTERN):
        pattern = keys.per_layer(_PATTERN, layers, trailing=keys.integer("{a}.nextn_predict_layers"))
        return tuple(bool(slides) for slides in pattern or ())
    if architecture not in architectures.SLIDING_PERIODS:
        return nowhere
    period, full_first = architectures.SLIDING_PERIODS[architecture]
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
    if architecture in architectures.RECURRENT | architectures.ATTENTION_AND_RECURRENCE:
        return (True,) * layers
    if architecture in architectures.RECURRENT_WITHOUT_KV_HEADS:
        # Nemotron-H also has layers that are a feed-forward network alone.
        only_ffn = architecture.startswith("nemotron_h")
        return tuple(
            heads == 0 and not (only_ffn and width)
            for heads, width in zip(head_counts_kv, feed_forward, strict=True)
        )
    default = architectures.FULL_ATTENTION_INTERVAL.get(architecture)
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
    if architecture in architectures.ENCODERS | architectures.DIFFUSION | architectures.RECURRENT:
        return (False,) * layers
    main = layers - mtp_layers
    shared = max(main - architectures.LAYERS_WITH_OWN_KV.get(architecture, main), 0)
    own = main - keys.integer("{a}.attention.shared_kv_layers", shared, most=main)
    is_hybrid_layer = architecture in architectures.ATTENTION_AND_RECURRENCE
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
    passes = 5 if architecture in architectures.FULL_ATTENTION_INTERVAL else 7  # gated delta net; Mamba
    return RecurrentState(kernel * convolved, state_size * inner, passes * convolved)
