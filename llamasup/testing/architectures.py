"""Tiny models of many architectures, with random weights: one for each way that layers keep memory.

Two heads of 32 elements, so that quantised KV caches work; one KV head; width 64. Keys and tensors as
llama.cpp b11434 wants them (src/models/*.cpp); it loads all of them, as tests/real/test_memory.py shows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from llamasup.core.demo_model import demo_keys, random_weights
from llamasup.core.gguf_writer import KeyValue, TensorPlan, write_gguf

__all__ = ["ARCHITECTURES", "tiny_model"]

Tensors = dict[str, tuple[int, ...]]  # shapes in ggml's order: the length of a row comes first
Keys = dict[str, KeyValue]

_WIDTH, _HEADS, _KV_HEADS, _HEAD, _FEED_FORWARD = 64, 2, 1, 32, 96
_EXPERTS, _EXPERTS_USED, _EXPERT_WIDTH = 4, 2, 32
_CONV, _INNER, _STATE, _SSM_HEADS, _GROUPS = 4, 128, 32, 4, 1
_WORDS = ("the", "of", "and", "to", "in", "is", "you", "that")
_TOKENIZER = {key: value for key, value in demo_keys(_WORDS).items() if key.startswith("tokenizer.")}
_VOCAB = 5 + 256 + 96 + len(_WORDS)
_WINDOW = 64


def tiny_model(name: str) -> bytes:
    """The file of one of ARCHITECTURES, byte for byte the same each time."""
    architecture, keys, tensors = ARCHITECTURES[name]()
    named: Keys = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"llamasup {name}",
        "general.file_type": 0,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **_TOKENIZER,
    }
    plans = [TensorPlan(tensor, shape) for tensor, shape in tensors.items()]
    return write_gguf(named, [(plan, _weights(plan, name)) for plan in plans])


def _weights(plan: TensorPlan, seed: str) -> bytes:
    count = math.prod(plan.shape)
    if plan.name.endswith(("norm.weight", "norm")):
        return struct.pack("<f", 1.0) * count
    if plan.name.endswith((".bias", ".ssm_a")):
        return struct.pack("<f", -0.5 if plan.name.endswith(".ssm_a") else 0.0) * count
    return random_weights(count, 0.1, f"{seed} {plan.name}")


# --- what layers are made of ----------------------------------------------------------------------


def _basics(layers: int, **more: KeyValue) -> Keys:
    """Keys that all have; ``__`` in a keyword stands for the point."""
    return {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": _WIDTH,
        "feed_forward_length": _FEED_FORWARD,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": _HEAD,
        "vocab_size": _VOCAB,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def _ends(*norms: str) -> Tensors:
    return {
        "token_embd.weight": (_WIDTH, _VOCAB),
        **{f"{norm}.weight": (_WIDTH,) for norm in norms or ("output_norm",)},
        "output.weight": (_WIDTH, _VOCAB),
    }


def _layer(index: int, *parts: Tensors) -> Tensors:
    return {f"blk.{index}.{name}": shape for part in parts for name, shape in part.items()}


def _norms(*names: str, width: int = _WIDTH) -> Tensors:
    return {f"{name}.weight": (width,) for name in names}


def _attention(
    *, query: int = 1, heads: int = _HEADS, kv_heads: int = _KV_HEADS, head: int = _HEAD
) -> Tensors:
    return {
        "attn_q.weight": (_WIDTH, query * heads * head),
        "attn_k.weight": (_WIDTH, kv_heads * head),
        "attn_v.weight": (_WIDTH, kv_heads * head),
        "attn_output.weight": (heads * head, _WIDTH),
    }


def _feed_forward(width: int = _FEED_FORWARD, suffix: str = "") -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": (_WIDTH, width),
        f"ffn_up{suffix}.weight": (_WIDTH, width),
        f"ffn_down{suffix}.weight": (width, _WIDTH),
    }


def _experts(width: int = _EXPERT_WIDTH) -> Tensors:
    return {
        "ffn_gate_inp.weight": (_WIDTH, _EXPERTS),
        "ffn_gate_exps.weight": (_WIDTH, width, _EXPERTS),
        "ffn_up_exps.weight": (_WIDTH, width, _EXPERTS),
        "ffn_down_exps.weight": (width, _WIDTH, _EXPERTS),
    }


_EXPERT_KEYS: Keys = {
    "expert_count": _EXPERTS,
    "expert_used_count": _EXPERTS_USED,
    "expert_feed_forward_length": _EXPERT_WIDTH,
}
_QK_NORMS = _norms("attn_q_norm", "attn_k_norm", width=_HEAD)
_MAMBA_KEYS: Keys = {
    "ssm.conv_kernel": _CONV,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _SSM_HEADS,
}
_MAMBA2_KEYS: Keys = _MAMBA_KEYS | {"ssm.group_count": _GROUPS}


def _mamba(*norms: str) -> Tensors:
    widths = {"ssm_dt_norm": _SSM_HEADS, "ssm_b_norm": _STATE, "ssm_c_norm": _STATE}
    return {
        "ssm_in.weight": (_WIDTH, 2 * _INNER),
        "ssm_conv1d.weight": (_CONV, _INNER),
        "ssm_conv1d.bias": (_INNER,),
        "ssm_x.weight": (_INNER, _SSM_HEADS + 2 * _STATE),
        "ssm_dt.weight": (_SSM_HEADS, _INNER),
        "ssm_dt.bias": (_INNER,),
        "ssm_a": (_STATE, _INNER),
        "ssm_d": (_INNER,),
        "ssm_out.weight": (_INNER, _WIDTH),
        **{f"{norm}.weight": (widths[norm],) for norm in norms},
    }


def _mamba2() -> Tensors:
    convolved = _INNER + 2 * _GROUPS * _STATE
    return {
        "ssm_in.weight": (_WIDTH, _INNER + convolved + _SSM_HEADS),
        "ssm_conv1d.weight": (_CONV, convolved),
        "ssm_conv1d.bias": (convolved,),
        "ssm_dt.bias": (_SSM_HEADS,),
        "ssm_a": (1, _SSM_HEADS),
        "ssm_d": (1, _SSM_HEADS),
        "ssm_norm.weight": (_INNER // _GROUPS, _GROUPS),
        "ssm_out.weight": (_INNER, _WIDTH),
    }


def _delta_net() -> Tensors:
    """Gated delta net, as Qwen3.5 has it."""
    convolved = _INNER + 2 * _GROUPS * _STATE
    return {
        "attn_qkv.weight": (_WIDTH, convolved),
        "attn_gate.weight": (_WIDTH, _INNER),
        "ssm_conv1d.weight": (_CONV, convolved),
        "ssm_dt.bias": (_SSM_HEADS,),
        "ssm_a": (_SSM_HEADS,),
        "ssm_beta.weight": (_WIDTH, _SSM_HEADS),
        "ssm_alpha.weight": (_WIDTH, _SSM_HEADS),
        "ssm_norm.weight": (_STATE,),
        "ssm_out.weight": (_INNER, _WIDTH),
    }


_PREDICTION: Tensors = {
    "nextn.eh_proj.weight": (2 * _WIDTH, _WIDTH),
    "nextn.enorm.weight": (_WIDTH,),
    "nextn.hnorm.weight": (_WIDTH,),
    "nextn.shared_head_norm.weight": (_WIDTH,),
}

Model = tuple[str, Keys, Tensors]


def _of_layers(architecture: str, keys: Keys, *layers: Tensors, tied: bool = False) -> Model:
    tensors = _ends()
    if tied:  # the token embeddings are the output head too
        del tensors["output.weight"]
    for index, layer in enumerate(layers):
        tensors |= _layer(index, layer)
    return architecture, keys, tensors


# --- attention ------------------------------------------------------------------------------------


def _llama() -> Model:
    layer = _norms("attn_norm", "ffn_norm") | _attention() | _feed_forward()
    return _of_layers("llama", _basics(3), *[layer] * 3)


def _llama_experts() -> Model:
    layer = _norms("attn_norm", "ffn_norm") | _attention() | _experts(_FEED_FORWARD)
    keys = _basics(2, expert_count=_EXPERTS, expert_used_count=_EXPERTS_USED)
    return _of_layers("llama", keys, *[layer] * 2)


def _qwen2moe() -> Model:
    layer = (
        _norms("attn_norm", "ffn_norm")
        | _attention()
        | {
            "attn_q.bias": (_HEADS * _HEAD,),
            "attn_k.bias": (_KV_HEADS * _HEAD,),
            "attn_v.bias": (_KV_HEADS * _HEAD,),
        }
        | _experts()
        | _feed_forward(_EXPERT_WIDTH, "_shexp")
        | {"ffn_gate_inp_shexp.weight": (_WIDTH,)}
    )
    keys = _basics(2) | _EXPERT_KEYS | {"expert_shared_feed_forward_length": _EXPERT_WIDTH}
    return _of_layers("qwen2moe", keys, *[layer] * 2)


def _qwen3moe() -> Model:
    layer = _norms("attn_norm", "ffn_norm") | _attention() | _QK_NORMS | _experts()
    return _of_layers("qwen3moe", _basics(2) | _EXPERT_KEYS, *[layer] * 2)


def _gemma2() -> Model:
    norms = _norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    keys = _basics(
        4,
        attention__sliding_window=_WINDOW,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    return _of_layers("gemma2", keys, *[norms | _attention() | _feed_forward()] * 4, tied=True)


def _gemma3() -> Model:
    norms = _norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    layer = norms | _attention() | _QK_NORMS | _feed_forward()
    return _of_layers("gemma3", _basics(7, attention__sliding_window=_WINDOW), *[layer] * 7, tied=True)


def _gemma4() -> Model:
    """Wider heads in the full layer, and a last layer that uses the KV cache of an earlier one."""
    slides = [True, True, False, True, False]
    norms = _norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    layers = []
    for sliding in slides:
        head = _HEAD if sliding else 2 * _HEAD
        qk_norms = _norms("attn_q_norm", "attn_k_norm", width=head)
        layers.append(norms | _attention(head=head) | qk_norms | _feed_forward())
    keys = _basics(
        5,
        attention__sliding_window=_WINDOW,
        attention__sliding_window_pattern=slides,
        attention__shared_kv_layers=2,
        attention__key_length_swa=_HEAD,
        attention__value_length_swa=_HEAD,
        rope__dimension_count_swa=_HEAD,
        embedding_length_per_layer_input=0,
    ) | {
        "attention.key_length": 2 * _HEAD,
        "attention.value_length": 2 * _HEAD,
        "rope.dimension_count": 2 * _HEAD,
    }
    architecture, keys, tensors = _of_layers("gemma4", keys, *layers)
    return architecture, keys, tensors | {"rope_freqs.weight": (_HEAD,)}


def _gpt_oss() -> Model:
    layer = (
        _norms("attn_norm", "post_attention_norm")
        | _attention()
        | {
            "attn_q.bias": (_HEADS * _HEAD,),
            "attn_k.bias": (_KV_HEADS * _HEAD,),
            "attn_v.bias": (_KV_HEADS * _HEAD,),
        }
        | {"attn_output.bias": (_WIDTH,), "attn_sinks.weight": (_HEADS,)}
        | _experts()
        | {
            "ffn_gate_inp.bias": (_EXPERTS,),
            "ffn_gate_exps.bias": (_EXPERT_WIDTH, _EXPERTS),
            "ffn_up_exps.bias": (_EXPERT_WIDTH, _EXPERTS),
            "ffn_down_exps.bias": (_WIDTH, _EXPERTS),
        }
    )
    keys = _basics(4, attention__sliding_window=_WINDOW) | _EXPERT_KEYS
    return _of_layers("gpt-oss", keys, *[layer] * 4)


def _cohere2() -> Model:
    layer = _norms("attn_norm") | _attention() | _feed_forward()
    keys = _basics(4, attention__sliding_window=_WINDOW, attention__layer_norm_epsilon=1e-5, logit_scale=0.25)
    return _of_layers("cohere2", keys, *[layer] * 4, tied=True)


def _deepseek2() -> Model:
    """Multi-head latent attention: one key of rank + rope elements for all heads, and no value."""
    rank, rope = 64, 32
    layer = _norms("attn_norm", "ffn_norm") | {
        "attn_q_a.weight": (_WIDTH, rank),
        "attn_q_a_norm.weight": (rank,),
        "attn_q_b.weight": (rank, _HEADS * (_HEAD + rope)),
        "attn_kv_a_mqa.weight": (_WIDTH, rank + rope),
        "attn_kv_a_norm.weight": (rank,),
        "attn_k_b.weight": (_HEAD, rank, _HEADS),
        "attn_v_b.weight": (rank, _HEAD, _HEADS),
        "attn_output.weight": (_HEADS * _HEAD, _WIDTH),
    }
    keys = (
        _basics(
            3,
            attention__kv_lora_rank=rank,
            attention__q_lora_rank=rank,
            attention__key_length_mla=_HEAD + rope,
            attention__value_length_mla=_HEAD,
            leading_dense_block_count=1,
            expert_shared_count=1,
            expert_weights_scale=1.0,
        )
        | _EXPERT_KEYS
        | {
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "rope.dimension_count": rope,
        }
    )
    experts = layer | _experts() | _feed_forward(_EXPERT_WIDTH, "_shexp")
    return _of_layers("deepseek2", keys, layer | _feed_forward(), experts, experts)


def _glm4moe() -> Model:
    """The last layer predicts further tokens."""
    layer = (
        _norms("attn_norm", "post_attention_norm")
        | _attention()
        | {
            "attn_q.bias": (_HEADS * _HEAD,),
            "attn_k.bias": (_KV_HEADS * _HEAD,),
            "attn_v.bias": (_KV_HEADS * _HEAD,),
        }
    )
    experts = layer | _experts() | {"exp_probs_b.bias": (_EXPERTS,)} | _feed_forward(_EXPERT_WIDTH, "_shexp")
    keys = (
        _basics(3, leading_dense_block_count=1, expert_shared_count=1, nextn_predict_layers=1) | _EXPERT_KEYS
    )
    return _of_layers("glm4moe", keys, layer | _feed_forward(), experts, experts | _PREDICTION)


# --- recurrence -----------------------------------------------------------------------------------


def _mamba1_model() -> Model:
    keys = _basics(2) | _MAMBA_KEYS | {"attention.head_count": 0, "feed_forward_length": 0}
    del keys["attention.head_count_kv"]
    return _of_layers("mamba", keys, *[_norms("attn_norm") | _mamba()] * 2)


def _mamba2_model() -> Model:
    keys = _basics(2) | _MAMBA2_KEYS | {"attention.head_count": 0, "feed_forward_length": 0}
    del keys["attention.head_count_kv"]
    return _of_layers("mamba2", keys, *[_norms("attn_norm") | _mamba2()] * 2)


def _jamba() -> Model:
    ends = _norms("attn_norm", "ffn_norm") | _feed_forward()
    recurrent = ends | _mamba("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm")
    keys = _basics(4) | _MAMBA_KEYS | {"attention.head_count_kv": [0, _KV_HEADS, 0, _KV_HEADS]}
    return _of_layers("jamba", keys, *[recurrent, ends | _attention()] * 2)


def _falcon_h1() -> Model:
    layer = _norms("attn_norm") | {"ffn_norm": (_WIDTH,)} | _attention() | _mamba2() | _feed_forward()
    return _of_layers("falcon-h1", _basics(2) | _MAMBA2_KEYS, *[layer] * 2)


def _granite_hybrid() -> Model:
    ends = _norms("attn_norm", "ffn_norm") | _feed_forward()
    keys = _basics(3) | _MAMBA2_KEYS | {"attention.head_count_kv": [0, _KV_HEADS, 0]}
    recurrent = ends | _mamba2()
    return _of_layers("granitehybrid", keys, recurrent, ends | _attention(), recurrent)


def _nemotron_h() -> Model:
    """A layer is recurrence, attention, or a feed-forward network alone."""
    norm = _norms("attn_norm")
    forward = {"ffn_up.weight": (_WIDTH, _FEED_FORWARD), "ffn_down.weight": (_FEED_FORWARD, _WIDTH)}
    keys = (
        _basics(4)
        | _MAMBA2_KEYS
        | {"attention.head_count_kv": [0, 0, _KV_HEADS, 0], "feed_forward_length": [0, _FEED_FORWARD, 0, 0]}
        | {"attention.layer_norm_epsilon": 1e-5}
    )
    return _of_layers(
        "nemotron_h", keys, norm | _mamba2(), norm | forward, norm | _attention(), norm | _mamba2()
    )


def _lfm2() -> Model:
    cached = 3
    ends = _norms("attn_norm", "ffn_norm") | _feed_forward()
    convolution: Tensors = {
        "shortconv.conv.weight": (cached, _WIDTH),
        "shortconv.in_proj.weight": (_WIDTH, 3 * _WIDTH),
        "shortconv.out_proj.weight": (_WIDTH, _WIDTH),
    }
    keys = _basics(3, shortconv__l_cache=cached) | {"attention.head_count_kv": [0, _KV_HEADS, 0]}
    attention = ends | _attention() | _QK_NORMS
    architecture, keys, tensors = _of_layers("lfm2", keys, ends | convolution, attention, ends | convolution)
    tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")
    return architecture, keys, tensors


def _qwen35() -> Model:
    """Attention in every fourth layer, the others recurrent; the last one predicts further tokens."""
    ends = _norms("attn_norm", "post_attention_norm") | _feed_forward()
    recurrent, attention = ends | _delta_net(), ends | _attention(query=2) | _QK_NORMS
    keys = (
        _basics(5, nextn_predict_layers=1, full_attention_interval=4)
        | _MAMBA2_KEYS
        | {"rope.dimension_sections": [4, 4, 4, 4]}
    )
    return _of_layers("qwen35", keys, *[recurrent] * 3, attention, attention | _PREDICTION)


def _rwkv7() -> Model:
    rank = 32
    names: Tensors = {}
    for index in range(2):
        lora: Tensors = {}
        for part in ("w", "a", "v", "g"):
            lora |= {f"time_mix_{part}1.weight": (_WIDTH, rank), f"time_mix_{part}2.weight": (rank, _WIDTH)}
            if part != "g":
                lora[f"time_mix_{part}0.weight"] = (_WIDTH,)
        names |= _layer(
            index,
            {
                f"{norm}.{kind}": (_WIDTH,)
                for norm in ("attn_norm", "attn_norm_2")
                for kind in ("weight", "bias")
            },
            lora,
            {"time_mix_lerp_fused.weight": (_WIDTH, 1, 1, 6)},
            {f"time_mix_{part}.weight": (_WIDTH,) for part in ("k_k", "k_a")},
            {"time_mix_r_k.weight": (_WIDTH,)},
            {
                f"time_mix_{part}.weight": (_WIDTH, _WIDTH)
                for part in ("key", "value", "receptance", "output")
            },
            {"time_mix_ln.weight": (_WIDTH,), "time_mix_ln.bias": (_WIDTH,)},
            {"channel_mix_lerp_k.weight": (_WIDTH, 1, 1)},
            {
                "channel_mix_key.weight": (_WIDTH, _FEED_FORWARD),
                "channel_mix_value.weight": (_FEED_FORWARD, _WIDTH),
            },
        )
    ends = _ends("token_embd_norm", "output_norm")
    ends |= {"token_embd_norm.bias": (_WIDTH,), "output_norm.bias": (_WIDTH,)}
    keys = _basics(
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


# --- encoder and decoder --------------------------------------------------------------------------


def _t5() -> Model:
    """Two encoder and two decoder layers; the latter also attend to the encoder's output."""
    buckets = 8
    tensors = _ends("enc.output_norm", "dec.output_norm")
    for index in range(2):
        for side, crosses in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
            block = f"{side}.blk.{index}."
            for kind in crosses:
                tensors |= {f"{block}{kind}_{part}.weight": (_WIDTH, _WIDTH) for part in ("q", "k", "v", "o")}
                tensors[f"{block}{kind}_norm.weight"] = (_WIDTH,)
            if index == 0:
                tensors[f"{block}attn_rel_b.weight"] = (_HEADS, buckets)
            tensors[f"{block}ffn_norm.weight"] = (_WIDTH,)
            tensors |= {f"{block}{name}": shape for name, shape in _feed_forward().items()}
    keys = _basics(2, attention__relative_buckets_count=buckets, decoder_start_token_id=1)
    return "t5", keys | {"attention.head_count_kv": _HEADS}, tensors


ARCHITECTURES: Mapping[str, Callable[[], Model]] = MappingProxyType(
    {
        "llama": _llama,
        "llama with experts": _llama_experts,
        "qwen2moe": _qwen2moe,
        "qwen3moe": _qwen3moe,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gemma4": _gemma4,
        "gpt-oss": _gpt_oss,
        "cohere2": _cohere2,
        "deepseek2": _deepseek2,
        "glm4moe": _glm4moe,
        "mamba": _mamba1_model,
        "mamba2": _mamba2_model,
        "rwkv7": _rwkv7,
        "jamba": _jamba,
        "falcon-h1": _falcon_h1,
        "granitehybrid": _granite_hybrid,
        "nemotron_h": _nemotron_h,
        "lfm2": _lfm2,
        "qwen35": _qwen35,
        "t5": _t5,
    }
)
