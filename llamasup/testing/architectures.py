"""Tiny models of many architectures, with random weights: one for each way that layers keep memory.

llama.cpp b11434 loads all of them and reserves what models of their kind take (tests/real/test_memory.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from llamasup.core.demo_model import demo_keys, random_weights
from llamasup.core.gguf_writer import KeyValue, TensorPlan, tensor_bytes, write_gguf, write_gguf_header
from llamasup.testing.layers import Model, Tensors, Widths, layer_of

__all__ = ["ARCHITECTURES", "Widths", "tiny_model", "write_hollow"]


def tiny_model(name: str) -> bytes:
    """The file of one of ARCHITECTURES, byte for byte the same each time."""
    keys, plans = _contents(name, Widths())
    return write_gguf(keys, [(plan, _weights(plan, name)) for plan in plans])


def write_hollow(path: Path, name: str, widths: Widths) -> Path:
    """One of ARCHITECTURES as wide as a real model, for measuring what it reserves; its weights are a hole.

    Takes no space on a disk that knows sparse files. llama-server faults in all that it maps, so the weights
    are of the smallest type. Load it with ``--no-warmup``: nothing can be computed with it.
    """
    keys, plans = _contents(name, widths)
    plans = [TensorPlan(plan.name, plan.shape, _small_type(plan)) for plan in plans]
    header = write_gguf_header(keys, plans)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor_bytes(plan) + -tensor_bytes(plan) % 32 for plan in plans))
    return path


def _small_type(plan: TensorPlan) -> str:
    """1.6 bits for matrices with rows that divide by its block, f32 for what llama.cpp wants in f32."""
    matrix = len(plan.shape) > 1 and plan.shape[0] % 256 == 0
    return "IQ1_S" if matrix and "norm" not in plan.name else "F32"


def _contents(name: str, widths: Widths) -> tuple[dict[str, KeyValue], list[TensorPlan]]:
    architecture, keys, tensors = ARCHITECTURES[name](widths)
    words = [f"word{index}" for index in range(widths.words)]
    named: dict[str, KeyValue] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"llamasup {name}",
        "general.file_type": 0,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **{key: value for key, value in demo_keys(words).items() if key.startswith("tokenizer.")},
    }
    return named, [TensorPlan(tensor, shape) for tensor, shape in tensors.items()]


def _weights(plan: TensorPlan, seed: str) -> bytes:
    count = math.prod(plan.shape)
    if plan.name.endswith(("norm.weight", "norm")):
        return struct.pack("<f", 1.0) * count
    if plan.name.endswith((".bias", ".ssm_a")):
        return struct.pack("<f", -0.5 if plan.name.endswith(".ssm_a") else 0.0) * count
    return random_weights(count, 0.1, f"{seed} {plan.name}")


# --- attention ------------------------------------------------------------------------------------


def _llama(w: Widths) -> Model:
    layer = w.norms("attn_norm", "ffn_norm") | w.attention() | w.feed_forward()
    return w.model("llama", w.basics(3), *[layer] * 3)


def _llama_experts(w: Widths) -> Model:
    layer = w.norms("attn_norm", "ffn_norm") | w.attention() | w.experts(w.forward_width)
    keys = w.basics(2, expert_count=w.expert_count, expert_used_count=w.experts_used)
    return w.model("llama", keys, *[layer] * 2)


def _qwen2moe(w: Widths) -> Model:
    layer = (
        w.norms("attn_norm", "ffn_norm")
        | w.attention(biased=True)
        | w.experts()
        | w.feed_forward(w.expert_width, "_shexp")
        | {"ffn_gate_inp_shexp.weight": (w.width,)}
    )
    keys = w.basics(2) | w.expert_keys | {"expert_shared_feed_forward_length": w.expert_width}
    return w.model("qwen2moe", keys, *[layer] * 2)


def _qwen3moe(w: Widths) -> Model:
    layer = w.norms("attn_norm", "ffn_norm") | w.attention() | w.qk_norms | w.experts()
    return w.model("qwen3moe", w.basics(2) | w.expert_keys, *[layer] * 2)


def _gemma2(w: Widths) -> Model:
    norms = w.norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    keys = w.basics(
        4,
        attention__sliding_window=w.window,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    return w.model("gemma2", keys, *[norms | w.attention() | w.feed_forward()] * 4, tied=True)


def _gemma3(w: Widths) -> Model:
    norms = w.norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    layer = norms | w.attention() | w.qk_norms | w.feed_forward()
    return w.model("gemma3", w.basics(7, attention__sliding_window=w.window), *[layer] * 7, tied=True)


def _gemma3n(w: Widths) -> Model:
    """22 layers, since the first 20 have KV caches; side streams of fixed widths make it 11 MB."""
    streams, laurel, side = 4, 64, 256
    norms = w.norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    mixing: Tensors = {
        "altup_correct_coef.weight": (streams, streams),
        "altup_correct_scale.weight": (w.width,),
        "altup_predict_coef.weight": (streams, streams * streams),
        "altup_router.weight": (w.width, streams),
        "laurel_l.weight": (w.width, laurel),
        "laurel_r.weight": (laurel, w.width),
        **w.norms("altup_router_norm", "laurel_post_norm"),
    }
    layer = norms | w.attention() | w.qk_norms | w.feed_forward() | mixing | _side_input(w, side)
    keys = w.basics(22, attention__sliding_window=w.window)
    architecture, keys, tensors = w.model("gemma3n", keys, *[layer] * 22, tied=True)
    tensors |= {
        "altup_proj.weight": (w.width, w.width, streams - 1),
        "altup_unembd_proj.weight": (w.width, w.width, streams - 1),
    }
    return architecture, keys, tensors | _side_ends(w, side, 22)


def _side_input(w: Widths, side: int) -> Tensors:
    """What takes a layer's own input in."""
    return {"inp_gate.weight": (w.width, side), "proj.weight": (side, w.width), **w.norms("post_norm")}


def _side_ends(w: Widths, side: int, layers: int) -> Tensors:
    """What makes the inputs of all layers."""
    return {
        "per_layer_token_embd.weight": (layers * side, w.vocab),
        "per_layer_model_proj.weight": (w.width, layers * side),
        "per_layer_proj_norm.weight": (side,),
    }


def _gemma4(w: Widths) -> Model:
    """Wider heads in the full layers, two layers that use the KV caches of earlier ones, an input to each."""
    side = 32
    slides = [True, True, False, True, False]
    norms = w.norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    layers = []
    for sliding in slides:
        head = w.head if sliding else 2 * w.head
        qk_norms = w.norms("attn_q_norm", "attn_k_norm", width=head)
        layers.append(norms | w.attention(head=head) | qk_norms | w.feed_forward() | _side_input(w, side))
    keys = w.basics(
        5,
        attention__sliding_window=w.window,
        attention__sliding_window_pattern=slides,
        attention__shared_kv_layers=2,
        attention__key_length_swa=w.head,
        attention__value_length_swa=w.head,
        rope__dimension_count_swa=w.head,
        embedding_length_per_layer_input=side,
    ) | {
        "attention.key_length": 2 * w.head,
        "attention.value_length": 2 * w.head,
        "rope.dimension_count": 2 * w.head,
    }
    architecture, keys, tensors = w.model("gemma4", keys, *layers)
    return architecture, keys, tensors | _side_ends(w, side, 5) | {"rope_freqs.weight": (w.head,)}


def _gpt_oss(w: Widths) -> Model:
    layer = (
        w.norms("attn_norm", "post_attention_norm")
        | w.attention(biased=True)
        | {"attn_output.bias": (w.width,), "attn_sinks.weight": (w.heads,)}
        | w.experts()
        | {
            "ffn_gate_inp.bias": (w.expert_count,),
            "ffn_gate_exps.bias": (w.expert_width, w.expert_count),
            "ffn_up_exps.bias": (w.expert_width, w.expert_count),
            "ffn_down_exps.bias": (w.width, w.expert_count),
        }
    )
    keys = w.basics(4, attention__sliding_window=w.window) | w.expert_keys
    return w.model("gpt-oss", keys, *[layer] * 4)


def _cohere2(w: Widths) -> Model:
    layer = w.norms("attn_norm") | w.attention() | w.feed_forward()
    keys = w.basics(
        4, attention__sliding_window=w.window, attention__layer_norm_epsilon=1e-5, logit_scale=0.25
    )
    return w.model("cohere2", keys, *[layer] * 4, tied=True)


def _deepseek2(w: Widths) -> Model:
    """Multi-head latent attention: one key of rank + rope elements for all heads, and no value."""
    rank, rope = w.latent_rank, w.latent_rope
    layer = w.norms("attn_norm", "ffn_norm") | {
        "attn_q_a.weight": (w.width, rank),
        "attn_q_a_norm.weight": (rank,),
        "attn_q_b.weight": (rank, w.heads * (w.head + rope)),
        "attn_kv_a_mqa.weight": (w.width, rank + rope),
        "attn_kv_a_norm.weight": (rank,),
        "attn_k_b.weight": (w.head, rank, w.heads),
        "attn_v_b.weight": (rank, w.head, w.heads),
        "attn_output.weight": (w.heads * w.head, w.width),
    }
    keys = (
        w.basics(
            3,
            attention__kv_lora_rank=rank,
            attention__q_lora_rank=rank,
            attention__key_length_mla=w.head + rope,
            attention__value_length_mla=w.head,
            leading_dense_block_count=1,
            expert_shared_count=1,
            expert_weights_scale=1.0,
        )
        | w.expert_keys
        | {
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "rope.dimension_count": rope,
        }
    )
    experts = layer | w.experts() | w.feed_forward(w.expert_width, "_shexp")
    return w.model("deepseek2", keys, layer | w.feed_forward(), experts, experts)


def _deepseek32(w: Widths) -> Model:
    """As deepseek2, and each layer has an indexer that chooses which cells are attended to."""
    heads, head = 2, 64
    _, keys, tensors = _deepseek2(w)
    for layer in range(3):
        tensors |= layer_of(
            layer,
            {
                "indexer.k_norm.weight": (head,),
                "indexer.k_norm.bias": (head,),
                "indexer.proj.weight": (w.width, heads),
                "indexer.attn_k.weight": (w.width, head),
                "indexer.attn_q_b.weight": (w.latent_rank, heads * head),
            },
            {"exp_probs_b.bias": (w.expert_count,)} if layer else {},
        )
    keys |= {
        "attention.indexer.head_count": heads,
        "attention.indexer.key_length": head,
        "attention.indexer.top_k": 2048,
        "attention.layer_norm_epsilon": 1e-5,
        "expert_gating_func": 2,
    }
    return "deepseek32", keys, tensors


def _glm4moe(w: Widths) -> Model:
    """The last layer predicts further tokens."""
    layer = w.norms("attn_norm", "post_attention_norm") | w.attention(biased=True)
    experts = (
        layer
        | w.experts()
        | {"exp_probs_b.bias": (w.expert_count,)}
        | w.feed_forward(w.expert_width, "_shexp")
    )
    keys = (
        w.basics(3, leading_dense_block_count=1, expert_shared_count=1, nextn_predict_layers=1)
        | w.expert_keys
    )
    return w.model("glm4moe", keys, layer | w.feed_forward(), experts, experts | w.prediction)


# --- recurrence -----------------------------------------------------------------------------------


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


# --- encoder and decoder --------------------------------------------------------------------------


def _t5(w: Widths) -> Model:
    """Two encoder and two decoder layers; the latter also attend to the encoder's output."""
    buckets = 8
    tensors = w.ends("enc.output_norm", "dec.output_norm")
    for index in range(2):
        for side, crosses in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
            block = f"{side}.blk.{index}."
            for kind in crosses:
                tensors |= {
                    f"{block}{kind}_{part}.weight": (w.width, w.width) for part in ("q", "k", "v", "o")
                }
                tensors[f"{block}{kind}_norm.weight"] = (w.width,)
            if index == 0:
                tensors[f"{block}attn_rel_b.weight"] = (w.heads, buckets)
            tensors[f"{block}ffn_norm.weight"] = (w.width,)
            tensors |= {f"{block}{name}": shape for name, shape in w.feed_forward().items()}
    keys = w.basics(2, attention__relative_buckets_count=buckets, decoder_start_token_id=1)
    return "t5", keys | {"attention.head_count_kv": w.heads}, tensors


ARCHITECTURES: Mapping[str, Callable[[Widths], Model]] = MappingProxyType(
    {
        "llama": _llama,
        "llama with experts": _llama_experts,
        "qwen2moe": _qwen2moe,
        "qwen3moe": _qwen3moe,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gemma3n": _gemma3n,
        "gemma4": _gemma4,
        "gpt-oss": _gpt_oss,
        "cohere2": _cohere2,
        "deepseek2": _deepseek2,
        "deepseek32": _deepseek32,
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
        "kimi-linear": _kimi_linear,
        "t5": _t5,
    }
)
