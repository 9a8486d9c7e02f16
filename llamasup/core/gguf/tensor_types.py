"""ggml's tensor types and llama.cpp's names for files of these types (ggml.c and llama.h, build b11434)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePath
from types import MappingProxyType

from msgspec import Struct


class TensorType(Struct, frozen=True):
    """A tensor type, in which ``block_bytes`` hold ``block_elements`` weights."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}

KV_CACHE_TYPES: Mapping[str, TensorType] = MappingProxyType(
    {
        name: kind
        for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
        for kind in TENSOR_TYPES.values()
        if kind.name.lower() == name
    }
)
"""The types of a KV cache by their names in --cache-type-k, in llama-server's order."""


def kv_block(cache_type: str) -> int:
    """Return the number of values in a block. A type newer than the table packs 32 values."""
    return KV_CACHE_TYPES[cache_type].block_elements if cache_type in KV_CACHE_TYPES else 32


# Types that ggml has removed; llama-server refuses files with them.
REMOVED_TENSOR_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# general.file_type (enum llama_ftype), as it is written in file names.
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
}


# For a projector in several types. F16 is exact enough and fast everywhere; BF16 is slow on older devices.
PREFERRED_TYPES = ("F16", "BF16", "Q8_0", "F32")


_PART = re.compile(r"-\d{5}-of-\d{5}$")


_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud[-_.])?"
    r"(?:i?q\d(?:[-_](?:[0-9ksml]|k[sml]|x?xs|xl|nl))*|tq\d_\d|mxfp4(?:[-_]moe)?|bf16|fp?16|fp?32)(?![a-z0-9])"
)


# Words for the kind of a file, not for its model.
_NOT_NAMES = frozenset(
    {"mmproj", "projector", "clip", "model", "ggml", "gguf", "i1", "imat", "imatrix"}
    | {"mtp", "draft", "eagle3", "dflash", "assistant"}
)


@lru_cache(maxsize=4096)  # a folder listing asks for each name once per model
def name_words(path: str) -> frozenset[str]:
    """Return the words of a file's name that identify its model."""
    stem = _PART.sub("", PurePath(path).name.lower().removesuffix(".gguf"))
    words = re.findall(r"[a-z0-9]+", _QUANTIZATION.sub(" ", stem))
    return frozenset(words) - _NOT_NAMES
