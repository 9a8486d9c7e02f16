"""What the layers of language models are made of, as llama.cpp b11434 names and shapes their tensors.

For test models (:mod:`tests.kit.architectures`). The names are those of src/llama-arch.cpp; the shapes
are in ggml's order, the length of a row first.
"""

from __future__ import annotations

from msgspec import Struct

from tests.kit.gguf_writer import KeyValue

__all__ = ["Keys", "Model", "Tensors", "Widths", "layer_of"]

Tensors = dict[str, tuple[int, ...]]
Keys = dict[str, KeyValue]  # without the architecture before them
Model = tuple[str, Keys, Tensors]  # architecture, keys, tensors

_OTHER_TOKENS = 5 + 256 + 96  # of the demo model's vocabulary: specials, bytes, printable characters


def layer_of(index: int, *parts: Tensors) -> Tensors:
    return {f"blk.{index}.{name}": shape for part in parts for name, shape in part.items()}


class Widths(Struct, frozen=True):
    """As tiny as llama.cpp takes it. Heads of 32 elements, so that quantised KV caches work."""

    width: int = 64
    heads: int = 2
    kv_heads: int = 1
    head: int = 32
    forward_width: int = 96
    expert_count: int = 4
    experts_used: int = 2
    expert_width: int = 32
    latent_rank: int = 64
    latent_rope: int = 32
    conv_kernel: int = 4
    inner: int = 128
    state: int = 32
    ssm_heads: int = 4
    groups: int = 1
    window: int = 64
    words: int = 8

    @property
    def vocab(self) -> int:
        return _OTHER_TOKENS + self.words

    def model(self, architecture: str, keys: Keys, *layers: Tensors, tied: bool = False) -> Model:
        tensors = self.ends()
        if tied:  # the token embeddings are the output head too
            del tensors["output.weight"]
        for index, layer in enumerate(layers):
            tensors |= layer_of(index, layer)
        return architecture, keys, tensors

    def basics(self, layers: int, **more: KeyValue) -> Keys:
        """Keys that all have; ``__`` in a keyword stands for the point."""
        return {
            "block_count": layers,
            "context_length": 8192,
            "embedding_length": self.width,
            "feed_forward_length": self.forward_width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head,
            "vocab_size": self.vocab,
            **{key.replace("__", "."): value for key, value in more.items()},
        }

    @property
    def expert_keys(self) -> Keys:
        return {
            "expert_count": self.expert_count,
            "expert_used_count": self.experts_used,
            "expert_feed_forward_length": self.expert_width,
        }

    @property
    def mamba_keys(self) -> Keys:
        return {
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.ssm_heads,
        }

    @property
    def mamba2_keys(self) -> Keys:
        return self.mamba_keys | {"ssm.group_count": self.groups}

    # --- tensors ------------------------------------------------------------------------------

    def ends(self, *norms: str) -> Tensors:
        return {
            "token_embd.weight": (self.width, self.vocab),
            **self.norms(*norms or ("output_norm",)),
            "output.weight": (self.width, self.vocab),
        }

    def norms(self, *names: str, width: int = 0) -> Tensors:
        return {f"{name}.weight": (width or self.width,) for name in names}

    @property
    def qk_norms(self) -> Tensors:
        return self.norms("attn_q_norm", "attn_k_norm", width=self.head)

    def attention(self, *, query: int = 1, head: int = 0, biased: bool = False) -> Tensors:
        """``query``: how many times as wide as usual the queries are, with a gate for instance."""
        head = head or self.head
        rows = {"q": query * self.heads * head, "k": self.kv_heads * head, "v": self.kv_heads * head}
        tensors: Tensors = {f"attn_{part}.weight": (self.width, count) for part, count in rows.items()}
        if biased:
            tensors |= {f"attn_{part}.bias": (count,) for part, count in rows.items()}
        return tensors | {"attn_output.weight": (self.heads * head, self.width)}

    def feed_forward(self, width: int = 0, suffix: str = "") -> Tensors:
        width = width or self.forward_width
        return {
            f"ffn_gate{suffix}.weight": (self.width, width),
            f"ffn_up{suffix}.weight": (self.width, width),
            f"ffn_down{suffix}.weight": (width, self.width),
        }

    def experts(self, width: int = 0) -> Tensors:
        width = width or self.expert_width
        return {
            "ffn_gate_inp.weight": (self.width, self.expert_count),
            "ffn_gate_exps.weight": (self.width, width, self.expert_count),
            "ffn_up_exps.weight": (self.width, width, self.expert_count),
            "ffn_down_exps.weight": (width, self.width, self.expert_count),
        }

    def mamba(self, *norms: str) -> Tensors:
        widths = {"ssm_dt_norm": self.ssm_heads, "ssm_b_norm": self.state, "ssm_c_norm": self.state}
        return {
            "ssm_in.weight": (self.width, 2 * self.inner),
            "ssm_conv1d.weight": (self.conv_kernel, self.inner),
            "ssm_conv1d.bias": (self.inner,),
            "ssm_x.weight": (self.inner, self.ssm_heads + 2 * self.state),
            "ssm_dt.weight": (self.ssm_heads, self.inner),
            "ssm_dt.bias": (self.inner,),
            "ssm_a": (self.state, self.inner),
            "ssm_d": (self.inner,),
            "ssm_out.weight": (self.inner, self.width),
            **{f"{norm}.weight": (widths[norm],) for norm in norms},
        }

    def mamba2(self) -> Tensors:
        convolved = self.inner + 2 * self.groups * self.state
        return {
            "ssm_in.weight": (self.width, self.inner + convolved + self.ssm_heads),
            "ssm_conv1d.weight": (self.conv_kernel, convolved),
            "ssm_conv1d.bias": (convolved,),
            "ssm_dt.bias": (self.ssm_heads,),
            "ssm_a": (1, self.ssm_heads),
            "ssm_d": (1, self.ssm_heads),
            "ssm_norm.weight": (self.inner // self.groups, self.groups),
            "ssm_out.weight": (self.inner, self.width),
        }

    def delta_net(self) -> Tensors:
        """Gated delta net, as Qwen3.5 has it."""
        convolved = self.inner + 2 * self.groups * self.state
        return {
            "attn_qkv.weight": (self.width, convolved),
            "attn_gate.weight": (self.width, self.inner),
            "ssm_conv1d.weight": (self.conv_kernel, convolved),
            "ssm_dt.bias": (self.ssm_heads,),
            "ssm_a": (self.ssm_heads,),
            "ssm_beta.weight": (self.width, self.ssm_heads),
            "ssm_alpha.weight": (self.width, self.ssm_heads),
            "ssm_norm.weight": (self.state,),
            "ssm_out.weight": (self.inner, self.width),
        }

    @property
    def prediction(self) -> Tensors:
        """Of a layer that predicts further tokens."""
        return {"nextn.eh_proj.weight": (2 * self.width, self.width)} | self.norms(
            "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"
        )
