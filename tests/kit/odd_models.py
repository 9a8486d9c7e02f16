"""Files as people have them, in which the header promises more than the file or llama.cpp holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.kit.architectures import ARCHITECTURES, write_model
from tests.kit.layers import Model, Widths

__all__ = ["ODD_MODELS", "odd_model"]


def _glm4moe_trunk(w: Widths) -> Model:
    """Without the layers that the key for MTP counts (lemonade-sdk/lemonade#2451)."""
    architecture, keys, tensors = ARCHITECTURES["glm4moe"](w)
    last = int(str(keys["block_count"])) - 1
    return (
        architecture,
        keys,
        {name: shape for name, shape in tensors.items() if not name.startswith(f"blk.{last}.")},
    )


def _glm4_nextn(w: Widths) -> Model:
    """With MTP layers that llama.cpp keeps and does not compute (ggml-org/llama.cpp#28188)."""
    wide = {
        "ffn_up.weight": (w.width, 2 * w.forward_width),
        "ffn_down.weight": (w.forward_width, w.width),
    }
    norms = w.norms("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    layer = norms | w.attention() | wide
    return w.model("glm4", w.basics(3, nextn_predict_layers=1), layer, layer, layer | w.prediction)


def _exaone4_nextn(w: Widths) -> Model:
    layer = w.qk_norms | w.norms("post_attention_norm", "post_ffw_norm") | w.attention() | w.feed_forward()
    return w.model("exaone4", w.basics(3, nextn_predict_layers=1), layer, layer, layer | w.prediction)


ODD_MODELS: Mapping[str, Callable[[Widths], Model]] = MappingProxyType(
    {"glm4moe-trunk": _glm4moe_trunk, "glm4-nextn": _glm4_nextn, "exaone4-nextn": _exaone4_nextn}
)


def odd_model(name: str) -> bytes:
    """The file of one of ODD_MODELS, byte for byte the same each time."""
    return write_model(name, ODD_MODELS[name](Widths()))
