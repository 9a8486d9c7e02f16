"""Models with recurrent layers: all of them, some of them, or beside attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.kit.layers import Model, Tensors, Widths, layer_of

__all__ = ["RECURRENT"]


def _mamba1_model(w: Widths) -> Model:
    keys = w.basics(2) | w.mamba_keys | {"attention.head_count": 0, "feed_forward_length": 0}
    del keys["attention.head_count_kv"]
    return w.model("mamba", keys, *[w.norms("attn_norm") | w.mamba()] * 2)


def _mamba2_model(w: Widths) -> Model:
    keys = w.basics(2) | w.mamba2_keys | {"attention.head_count": 0, "feed_forward_length": 0}
    del keys["attention.head_count_kv"]
    return w.model("mamba2", keys, *[w.norms("attn_norm") | w.mamba2()] * 2)


def _jamba(w: Widths) -> Model:
    ends = w.norms("attn_norm", "ffn_norm") | w.feed_forward()
    recurrent = ends | w.mamba("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm")
    keys = w.basics(4) | w.mamba_keys | {"attention.head_count_kv": [0, w.kv_heads, 0, w.kv_heads]}
    return w.model("jamba", keys, *[recurrent, ends | w.attention()] * 2)


def _falcon_h1(w: Widths) -> Model:
    layer = w.norms("attn_norm") | {"ffn_norm": (w.width,)} | w.attention() | w.mamba2() | w.feed_forward()
    return w.model("falcon-h1", w.basics(2) | w.mamba2_keys, *[layer] * 2)


def _granite_hybrid(w: Widths) -> Model:
    ends = w.norms("attn_norm", "ffn_norm") | w.feed_forward()
    keys = w.basics(3) | w.mamba2_keys | {"attention.head_count_kv": [0, w.kv_heads, 0]}
    recurrent = ends | w.mamba2()
    return w.model("granitehybrid", keys, recurrent, ends | w.attention(), recurrent)


def _nemotron_h(w: Widths) -> Model:
    """A layer is recurrence, attention, or a feed-forward network alone."""
    norm = w.norms("attn_norm")
    forward = {"ffn_up.weight": (w.width, w.forward_width), "ffn_down.weight": (w.forward_width, w.width)}
    keys = (
        w.basics(4)
        | w.mamba2_keys
        | {
            "attention.head_count_kv": [0, 0, w.kv_heads, 0],
            "feed_forward_length": [0, w.forward_width, 0, 0],
        }
        | {"attention.layer_norm_epsilon": 1e-5}
    )
    return w.model(
        "nemotron_h", keys, norm | w.mamba2(), norm | forward, norm | w.attention(), norm | w.mamba2()
    )


def _lfm2(w: Widths) -> Model:
    cached = 3
    ends = w.norms("attn_norm", "ffn_norm") | w.feed_forward()
    convolution: Tensors = {
        "shortconv.conv.weight": (cached, w.width),
        "shortconv.in_proj.weight": (w.width, 3 * w.width),
        "shortconv.out_proj.weight": (w.width, w.width),
    }
    keys = w.basics(3, shortconv__l_cache=cached) | {"attention.head_count_kv": [0, w.kv_heads, 0]}
    attention = ends | w.attention() | w.qk_norms
    architecture, keys, tensors = w.model("lfm2", keys, ends | convolution, attention, ends | convolution)
    tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")
    return architecture, keys, tensors


def _qwen35(w: Widths) -> Model:
    """Attention in every fourth layer, the others recurrent; the last one predicts further tokens."""
    ends = w.norms("attn_norm", "post_attention_norm") | w.feed_forward()
    recurrent, attention = ends | w.delta_net(), ends | w.attention(query=2) | w.qk_norms
    keys = (
        w.basics(5, nextn_predict_layers=1, full_attention_interval=4)
        | w.mamba2_keys
        | {"rope.dimension_sections": [4, 4, 4, 4]}
    )
    return w.model("qwen35", keys, *[recurrent] * 3, attention, attention | w.prediction)


def _kimi_linear(w: Widths) -> Model:
    """Latent attention in one layer, delta attention of Kimi's own in the others."""
    rank, rope, inner = w.latent_rank, w.latent_rope, w.heads * w.head
    latent: Tensors = {
        "attn_q.weight": (w.width, w.heads * (w.head + rope)),
        "attn_kv_a_mqa.weight": (w.width, rank + rope),
        "attn_kv_a_norm.weight": (rank,),
        "attn_k_b.weight": (w.head, rank, w.heads),
        "attn_v_b.weight": (rank, w.head, w.heads),
        "attn_output.weight": (w.heads * w.head, w.width),
    }
    delta: Tensors = {
        **{f"attn_{part}.weight": (w.width, inner) for part in "qkv"},
        **{f"ssm_conv1d_{part}.weight": (w.conv_kernel, 1, inner, 1) for part in "qkv"},
        **{f"ssm_{part}_a.weight": (w.width, w.head) for part in "fg"},
        **{f"ssm_{part}_b.weight": (w.head, inner) for part in "fg"},
        "ssm_beta.weight": (w.width, w.heads),
        "ssm_a": (1, w.heads),
        "ssm_dt.bias": (inner,),
        "ssm_norm.weight": (w.head,),
        "attn_output.weight": (inner, w.width),
    }
    ends = w.norms("attn_norm", "ffn_norm")
    experts = w.experts() | {"exp_probs_b.bias": (w.expert_count,)} | w.feed_forward(w.expert_width, "_shexp")
    keys = (
        w.basics(
            3,
            ssm__conv_kernel=w.conv_kernel,
            kda__head_dim=w.head,
            attention__kv_lora_rank=rank,
            attention__key_length_mla=w.head + rope,
            attention__value_length_mla=w.head,
            leading_dense_block_count=1,
            expert_shared_count=1,
            expert_weights_scale=1.0,
            expert_gating_func=2,
        )
        | w.expert_keys
        | {
            "attention.head_count_kv": [0, 1, 0],
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "rope.dimension_count": rope,
        }
    )
    layers = (ends | delta | w.feed_forward(), ends | latent | experts, ends | delta | experts)
    return w.model("kimi-linear", keys, *layers)


def _rwkv7(w: Widths) -> Model:
    rank = 32
    names: Tensors = {}
    for index in range(2):
        lora: Tensors = {}
        for part in ("w", "a", "v", "g"):
            lora |= {f"time_mix_{part}1.weight": (w.width, rank), f"time_mix_{part}2.weight": (rank, w.width)}
            if part != "g":
                lora[f"time_mix_{part}0.weight"] = (w.width,)
        names |= layer_of(
            index,
            {
                f"{norm}.{kind}": (w.width,)
                for norm in ("attn_norm", "attn_norm_2")
                for kind in ("weight", "bias")
            },
            lora,
            {"time_mix_lerp_fused.weight": (w.width, 1, 1, 6)},
            {f"time_mix_{part}.weight": (w.width,) for part in ("k_k", "k_a")},
            {"time_mix_r_k.weight": (w.width,)},
            {
                f"time_mix_{part}.weight": (w.width, w.width)
                for part in ("key", "value", "receptance", "output")
            },
            {"time_mix_ln.weight": (w.width,), "time_mix_ln.bias": (w.width,)},
            {"channel_mix_lerp_k.weight": (w.width, 1, 1)},
            {
                "channel_mix_key.weight": (w.width, w.forward_width),
                "channel_mix_value.weight": (w.forward_width, w.width),
            },
        )
    ends = w.ends("token_embd_norm", "output_norm")
    ends |= {"token_embd_norm.bias": (w.width,), "output_norm.bias": (w.width,)}
    keys = w.basics(
        2,
        wkv__head_size=32,
        attention__layer_norm_epsilon=1e-5,
        attention__decay_lora_rank=rank,
        attention__iclr_lora_rank=rank,
        attention__value_residual_mix_lora_rank=rank,
        attention__gate_lora_rank=rank,
        token_shift_count=2,
    ) | {"attention.head_count": 0}
    del keys["attention.head_count_kv"]
    return "rwkv7", keys, ends | names


RECURRENT: Mapping[str, Callable[[Widths], Model]] = MappingProxyType(
    {
        "mamba": _mamba1_model,
        "mamba2": _mamba2_model,
        "rwkv7": _rwkv7,
        "jamba": _jamba,
        "falcon-h1": _falcon_h1,
        "granitehybrid": _granite_hybrid,
        "nemotron_h": _nemotron_h,
        "lfm2": _lfm2,
        "qwen35": _qwen35,
        "kimi-linear": _kimi_linear,
    }
)
