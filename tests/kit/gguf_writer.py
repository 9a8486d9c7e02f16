"""Writes GGUF (version 3) from keys and tensors, for the demo model and for test models."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct

from llamasup.core.gguf.tensor_types import TENSOR_TYPES


class U16(int):
    """A number to be written as u16; llama.cpp takes split.no and split.count in no other type."""


class I32(int):
    """A number to be written as i32, as split.tensors.count must be."""


# int: u32 (u64 beyond 32 bits, i32 below zero), float: f32; in sequences int: i32, float: f32.
KeyValue = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]

_ALIGNMENT = 32  # gguf.md: the default of general.alignment
_TYPE_IDS = {kind.name: type_id for type_id, kind in TENSOR_TYPES.items()}
_U16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 2, 4, 5, 6, 7, 8, 9, 10


class TensorPlan(Struct, frozen=True):
    """A tensor to be written. ``shape`` in ggml's order: the length of a row comes first."""

    name: str
    shape: tuple[int, ...]
    type_name: str = "F32"


def tensor_bytes(plan: TensorPlan) -> int:
    """Return the bytes of the tensor's weights.

    Raises ValueError if its rows do not fit into blocks of its type.
    """
    kind = TENSOR_TYPES[_TYPE_IDS[plan.type_name]]
    if plan.shape[0] % kind.block_elements:
        raise ValueError(
            f"{plan.name}: rows of {plan.shape[0]} are not multiples of {kind.block_elements} ({kind.name})"
        )
    elements = 1
    for length in plan.shape:
        elements *= length
    return elements // kind.block_elements * kind.block_bytes


def write_gguf(
    keys: Mapping[str, KeyValue], tensors: Sequence[tuple[TensorPlan, bytes]], *, big_endian: bool = False
) -> bytes:
    """Write a complete file. Raises ValueError for weights of another size than their plan's."""
    plans = [plan for plan, _ in tensors]
    pieces = [write_gguf_header(keys, plans, big_endian=big_endian)]
    for plan, weights in tensors:
        if len(weights) != tensor_bytes(plan):
            raise ValueError(f"{plan.name}: {len(weights)} bytes of weights, expected {tensor_bytes(plan)}")
        pieces += (weights, bytes(-len(weights) % _ALIGNMENT))
    return b"".join(pieces)


def write_gguf_header(
    keys: Mapping[str, KeyValue], plans: Sequence[TensorPlan], *, big_endian: bool = False
) -> bytes:
    """Write everything before the weights, padded; the weights follow in order, each padded to 32 bytes."""
    pack = _Packer(">" if big_endian else "<")
    pieces = [b"GGUF", pack.number("I", 3), pack.number("Q", len(plans)), pack.number("Q", len(keys))]
    for key, value in keys.items():
        pieces += (pack.string(key), pack.value(value))
    offset = 0
    for plan in plans:
        pieces += (pack.string(plan.name), pack.number("I", len(plan.shape)))
        pieces += (pack.number("Q", length) for length in plan.shape)
        pieces += (pack.number("I", _TYPE_IDS[plan.type_name]), pack.number("Q", offset))
        offset += tensor_bytes(plan)
        offset += -offset % _ALIGNMENT
    header = b"".join(pieces)
    return header + bytes(-len(header) % _ALIGNMENT)


class _Packer:
    def __init__(self, order: str) -> None:
        self._order = order

    def number(self, code: str, value: float) -> bytes:
        return struct.pack(self._order + code, value)

    def string(self, text: str) -> bytes:
        encoded = text.encode()
        return self.number("Q", len(encoded)) + encoded

    def value(self, value: KeyValue) -> bytes:
        """Write the type and the value."""
        if isinstance(value, bool):
            return self.number("I", _BOOL) + self.number("?", value)
        if isinstance(value, int):
            type_id, code = _integer_type(value)
            return self.number("I", type_id) + self.number(code, value)
        if isinstance(value, float):
            return self.number("I", _F32) + self.number("f", value)
        if isinstance(value, str):
            return self.number("I", _STRING) + self.string(value)
        return self._array(value)

    def _array(self, items: Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]) -> bytes:
        first = items[0] if items else 0
        if isinstance(first, str):
            type_id, body = _STRING, b"".join(self.string(str(item)) for item in items)
        else:
            kinds = {bool: (_BOOL, "?"), int: (_I32, "i"), float: (_F32, "f")}
            type_id, code = kinds[type(first)]
            body = struct.pack(f"{self._order}{len(items)}{code}", *items)
        return self.number("I", _ARRAY) + self.number("I", type_id) + self.number("Q", len(items)) + body


def _integer_type(value: int) -> tuple[int, str]:
    if isinstance(value, U16):
        return _U16, "H"
    if isinstance(value, I32) or value < 0:
        return _I32, "i"
    return (_U32, "I") if value < 1 << 32 else (_U64, "Q")
