"""What each layer remembers of a sequence: a KV cache, only a window of it, a recurrent state, or nothing.

As llama.cpp b11434 decides it (src/models/*.cpp, src/llama-hparams.cpp) from the keys of the header.
"""

from __future__ import annotations

from llamasup.core import architectures
from llamasup.core.gguf_keys import Keys
from llamasup.core.model_facts import RecurrentState

__all__ = ["attention_layers", "recurrent_layers", "recurrent_state", "sliding_layers"]

_PATTERN = "{a}.attention.sliding_window_pattern"


def sliding_layers(keys: Keys, architecture: str, layers: int) -> tuple[bool, ...]:
    """Per layer, whether it attends only to the sliding window."""
    nowhere = (False,) * layers
    if not keys.integer("{a}.attention.sliding_window"):
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
    """Per layer, whether it keeps a recurrent state; layers from ``main_layers`` on (MTP) never do."""
    layers = len(head_counts_kv)
    stated = keys.per_layer("{a}.attention.recurrent_layers", layers, trailing=layers - main_layers)
    if stated is not None:
        return tuple(bool(recurs) and layer < main_layers for layer, recurs in enumerate(stated))
    if architecture in architectures.RECURRENT | architectures.ATTENTION_BESIDE_RECURRENCE:
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
    """Per layer, whether it has a KV cache of its own in the main context."""
    layers = len(head_counts_kv)
    if architecture in architectures.ENCODERS | architectures.DIFFUSION | architectures.RECURRENT:
        return (False,) * layers
    own = layers - mtp_layers - keys.integer("{a}.attention.shared_kv_layers", most=layers - mtp_layers)
    beside = architecture in architectures.ATTENTION_BESIDE_RECURRENCE
    return tuple(
        layer < own and heads > 0 and (beside or not recurs)
        for layer, (heads, recurs) in enumerate(zip(head_counts_kv, recurrent, strict=True))
    )


def recurrent_state(keys: Keys, embedding_length: int, heads: int) -> RecurrentState:
    """Elements of one recurrent layer's state (n_embd_r and n_embd_s of llama-hparams.cpp)."""
    wkv_head = keys.integer("{a}.wkv.head_size")
    if wkv_head:  # RWKV
        shifts = keys.integer("{a}.token_shift_count", 2)
        return RecurrentState(shifts * embedding_length, embedding_length * wkv_head)
    short_conv = keys.integer("{a}.shortconv.l_cache")
    if short_conv:  # LFM2
        return RecurrentState(embedding_length * (short_conv - 1), 0)
    kernel = max(keys.integer("{a}.ssm.conv_kernel") - 1, 0)
    kda_head = keys.integer("{a}.kda.head_dim")
    if kda_head:  # Kimi delta attention
        return RecurrentState(3 * kernel * heads * kda_head, heads * kda_head * kda_head)
    inner = keys.integer("{a}.ssm.inner_size")
    state = keys.integer("{a}.ssm.state_size")
    groups = keys.integer("{a}.ssm.group_count")
    return RecurrentState(kernel * (inner + 2 * groups * state), state * inner)
