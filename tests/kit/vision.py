"""A tiny vision projector that a real llama-server loads beside the tiny decoder, and pictures to show it.

A CLIP tower of two layers (of which LLaVA uses one) over patches of 14 pixels, and LLaVA's projector of two
layers; random weights from fixed seeds. What a real llama-server (b11434) makes of it is shown by
tests/real/test_vision.py.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable

from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf
from tests.kit.tiny import random_weights

__all__ = ["IMAGE_TOKENS", "gemma_projector", "picture", "picture_url", "vision_projector"]

_WIDTH = 32
_HEADS = 2
_FEED_FORWARD = 64
_LAYERS = 2
_IMAGE = 56  # pixels on each side, whatever the picture's size
_PATCH = 14

IMAGE_TOKENS = (_IMAGE // _PATCH) ** 2
"""What one picture takes of the context."""

_Tensors = list[tuple[TensorPlan, bytes]]


def vision_projector(projection_length: int = 64) -> bytes:
    """For models of the width ``projection_length``; the tiny decoder has 64. 170 KB."""
    keys: dict[str, KeyValue] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": "llamasup vision",
        "general.file_type": 0,
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.use_gelu": True,
        "clip.vision.block_count": _LAYERS,
        "clip.vision.embedding_length": _WIDTH,
        "clip.vision.feed_forward_length": _FEED_FORWARD,
        "clip.vision.attention.head_count": _HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_size": _IMAGE,
        "clip.vision.patch_size": _PATCH,
        "clip.vision.projection_dim": projection_length,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    tensors = [
        _matrix("v.patch_embd.weight", _PATCH, _PATCH, 3, _WIDTH),
        _matrix("v.position_embd.weight", _WIDTH, IMAGE_TOKENS),
    ]
    for index in range(_LAYERS):
        block = f"v.blk.{index}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors += _linear(block + part, _WIDTH, _WIDTH)
        for part in ("ln1", "ln2"):
            tensors += [_vector(f"{block}{part}.weight", _WIDTH, 1.0), _vector(f"{block}{part}.bias", _WIDTH)]
        tensors += _linear(f"{block}ffn_up", _WIDTH, _FEED_FORWARD)
        tensors += _linear(f"{block}ffn_down", _FEED_FORWARD, _WIDTH)
    tensors += _linear("mm.0", _WIDTH, projection_length)
    tensors += _linear("mm.2", projection_length, projection_length)
    return write_gguf(keys, tensors)


def gemma_projector(projection_length: int = 64) -> bytes:
    """Of the kind of Gemma 3, whose picture has 256 tokens that llama-server decodes in one micro-batch.

    With a smaller micro-batch (``-ub``), llama-server aborts (b10068 to b11434).
    """
    side = 896 // _PATCH
    keys: dict[str, KeyValue] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": "llamasup gemma vision",
        "general.file_type": 0,
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.block_count": 1,
        "clip.vision.embedding_length": projection_length,
        "clip.vision.feed_forward_length": _FEED_FORWARD,
        "clip.vision.attention.head_count": _HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_size": 896,
        "clip.vision.patch_size": _PATCH,
        "clip.vision.projection_dim": projection_length,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    tensors = [
        _matrix("v.patch_embd.weight", _PATCH, _PATCH, 3, projection_length),
        _vector("v.patch_embd.bias", projection_length),
        _matrix("v.position_embd.weight", projection_length, side * side),
        _vector("v.post_ln.weight", projection_length, 1.0),
        _vector("v.post_ln.bias", projection_length),
        _matrix("mm.input_projection.weight", projection_length, projection_length),
        _vector("mm.soft_emb_norm.weight", projection_length, 1.0),
    ]
    for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
        tensors += _linear(f"v.blk.0.{part}", projection_length, projection_length)
    for part in ("ln1", "ln2"):
        tensors += [_vector(f"v.blk.0.{part}.weight", projection_length, 1.0)]
        tensors += [_vector(f"v.blk.0.{part}.bias", projection_length)]
    tensors += _linear("v.blk.0.ffn_up", projection_length, _FEED_FORWARD)
    tensors += _linear("v.blk.0.ffn_down", _FEED_FORWARD, projection_length)
    return write_gguf(keys, tensors)


def picture(
    width: int = 64, height: int = 48, colour: Callable[[int, int], tuple[int, int, int]] | None = None
) -> bytes:
    """A PNG; ``colour`` of x and y, by default a gradient."""
    paint = colour or (lambda x, y: (x * 255 // width, y * 255 // height, 128))
    rows = (b"\0" + b"".join(bytes(paint(x, y)) for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in pieces)


def picture_url(content: bytes | None = None) -> str:
    """A PNG as the data URL that ``/v1/chat/completions`` takes."""
    return "data:image/png;base64," + base64.b64encode(content or picture()).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def _linear(name: str, row: int, rows: int) -> _Tensors:
    return [_matrix(f"{name}.weight", row, rows), _vector(f"{name}.bias", rows)]


def _matrix(name: str, *shape: int) -> tuple[TensorPlan, bytes]:
    count = 1
    for length in shape:
        count *= length
    return TensorPlan(name, shape), random_weights(count, 0.3, name)


def _vector(name: str, length: int, value: float = 0.0) -> tuple[TensorPlan, bytes]:
    return TensorPlan(name, (length,)), struct.pack("<f", value) * length
