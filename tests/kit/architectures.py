"""Tiny models of many architectures, with random weights: one for each way that layers keep memory.

llama.cpp b11434 loads all of them and reserves what models of their kind take
(tests/extended/real/test_memory.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.kit.attention_models import ATTENTION
from tests.kit.gguf_writer import KeyValue, TensorPlan, tensor_bytes, write_gguf, write_gguf_header
from tests.kit.layers import Model, Widths
from tests.kit.recurrent_models import RECURRENT
from tests.kit.tiny import FIXED, PRINTABLE, random_weights, tiny_keys

__all__ = ["ARCHITECTURES", "Widths", "tiny_model", "write_hollow", "write_model"]


ARCHITECTURES: Mapping[str, Callable[[Widths], Model]] = MappingProxyType({**ATTENTION, **RECURRENT})


def tiny_model(name: str) -> bytes:
    """The file of one of ARCHITECTURES, byte for byte the same each time."""
    return write_model(name, ARCHITECTURES[name](Widths()))


def write_model(name: str, model: Model) -> bytes:
    """The file of a model with random weights, whose seed is ``name``."""
    keys, plans = _contents(name, model, Widths())
    return write_gguf(keys, [(plan, _weights(plan, name)) for plan in plans])


def write_hollow(path: Path, name: str, widths: Widths) -> Path:
    """One of ARCHITECTURES as wide as a real model, for measuring what it reserves; its weights are a hole.

    Takes no space on a disk that knows sparse files. llama-server faults in all that it maps, so the weights
    are of the smallest type. Load it with ``--no-warmup``: nothing can be computed with it.
    """
    keys, plans = _contents(name, ARCHITECTURES[name](widths), widths)
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


def _contents(name: str, model: Model, widths: Widths) -> tuple[dict[str, KeyValue], list[TensorPlan]]:
    architecture, keys, tensors = model
    words = [f"word{index}" for index in range(widths.words)]
    named: dict[str, KeyValue] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"llamasup {name}",
        "general.file_type": 0,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **{key: value for key, value in tiny_keys(words).items() if key.startswith("tokenizer.")},
    }
    return named, [TensorPlan(tensor, shape) for tensor, shape in tensors.items()]


def _weights(plan: TensorPlan, seed: str) -> bytes:
    count = math.prod(plan.shape)
    if plan.name.endswith(("norm.weight", "norm")):
        return struct.pack("<f", 1.0) * count
    if plan.name.endswith((".bias", ".ssm_a")):
        return struct.pack("<f", -0.5 if plan.name.endswith(".ssm_a") else 0.0) * count
    weights = random_weights(count, 0.1, f"{seed} {plan.name}")
    if plan.name == "output.weight":  # of no end, and of no part of a UTF-8 character: some builds refuse it
        silent = 4 * plan.shape[0] * FIXED.index(PRINTABLE[0])
        return bytes(silent) + weights[silent:]
    return weights
