"""Models of attention: grouped heads, experts, windows, latent and shared caches, prediction, encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.kit.layers import Model, Tensors, Widths, layer_of

__all__ = ["ATTENTION"]


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


ATTENTION: Mapping[str, Callable[[Widths], Model]] = MappingProxyType(
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
        "t5": _t5,
    }
)
