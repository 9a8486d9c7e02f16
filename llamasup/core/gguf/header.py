"""Reads the GGUF container: the first bytes of a file in, its keys and tensors out. ``Keys`` looks keys up.

It reads versions 2 and 3 in either byte order. It skips long arrays, bounds counts and sizes, and checks
every length, so that a damaged header costs an error, and not much memory or time (X12).
Format: ggml/docs/gguf.md; the checks are the same as in gguf.cpp, llama.cpp b11434.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NoReturn

from msgspec import Struct

from llamasup.core.gguf.cursor import DAMAGED, Cursor, Short
from llamasup.core.gguf.not_gguf import describe
from llamasup.core.gguf.tensor_types import REMOVED_TENSOR_TYPES, TENSOR_TYPES
from llamasup.errors import ModelInvalid

# The largest vocabularies (260,000 tokens, 515,000 merges) make a header of 16 MiB. The bound keeps the
# reader below 50 MB of memory.
MAX_HEADER_BYTES = 32 * 1024 * 1024

_MAX_KEY_BYTES = 65_535  # gguf.md
_MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with its NUL
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_TENSOR_BYTES = 1 << 50
_MAX_KEYS = 16_384
_MAX_TENSORS = 16_384  # the largest models have 2,000; bounds memory as much as the header's size does
_MAX_KEPT_ITEMS = 4_096  # arrays per layer are at most LLAMA_MAX_LAYERS (512) long
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, smallest value
_MIN_TENSOR_BYTES = (
    8 + 1 + 4 + 8 + 4 + 8
)  # length, one letter, count of dimensions, one of them, type, offset
_FIRST_BYTES = 64 * 1024
# id: (name, struct code), without strings (8) and arrays (9).
_SCALARS = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "?"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}
_STRING = 8
_ARRAY = 9

_VOCABULARY = "tokenizer.ggml.tokens"
_UNSHARED_TOKENS = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID of llama.cpp
# Sizes may differ by 128 (SPEC_VOCAB_MAX_SIZE_DIFFERENCE): of four multiples of 64 below, one is shared.
_DIGEST_STEP = 64
_DIGEST_STEPS = 4


class NeedMore(Struct, frozen=True):
    """The header is longer than the given bytes; call again with the first ``bytes_needed`` of the file."""

    bytes_needed: int


class Array(Struct, frozen=True):
    """An array: the number and type of its items, and the items if they are few numbers.

    ``digests`` of a vocabulary: (count, CRC-32) of its first ``count`` tokens, without the first five, which
    a draft model need not share. Two vocabularies of nearly the same size have one count in common.
    """

    item_type: str
    count: int
    items: tuple[bool | int | float, ...] = ()
    digests: tuple[tuple[int, int], ...] = ()


Value = bool | int | float | str | Array


class Tensor(Struct, frozen=True):
    name: str
    elements: int
    type_name: str
    size_bytes: int
    lengths: tuple[int, ...] = ()  # of its dimensions, that of a row first


class Container(Struct, frozen=True):
    """One file's header. ``offsets`` are where each key's value begins; sizes are bytes."""

    values: dict[str, Value]
    offsets: dict[str, int]
    tensors: tuple[Tensor, ...]
    version: int
    big_endian: bool
    file_bytes: int
    expected_bytes: int


def read_container(header: bytes | bytearray | memoryview, file_bytes: int) -> Container | NeedMore:
    """Read the header of a file of ``file_bytes`` from its first bytes.

    Raises ModelInvalid, with the field and its offset, for headers that llama.cpp would also refuse.
    """
    given = len(header)
    if given < min(file_bytes, 24):
        return NeedMore(min(file_bytes, _FIRST_BYTES))
    if bytes(header[:4]) != b"GGUF":
        message, remedy = describe(bytes(header[:512]), file_bytes)
        raise ModelInvalid(message, remedy=remedy)
    if file_bytes < 24:
        raise ModelInvalid(
            f"the file has {file_bytes} bytes, and the shortest GGUF header has 24",
            remedy=DAMAGED,
        )
    try:
        return _Reader(header, file_bytes).read()
    except Short as short:
        if given >= MAX_HEADER_BYTES:
            raise ModelInvalid(
                f"the header does not end within {MAX_HEADER_BYTES >> 20} MiB; no vocabulary needs more",
                remedy=DAMAGED,
            ) from None
        # Four times as much, so that a header is parsed at most three times: 64 KiB, some MiB, all.
        wanted = max(short.bytes_needed, 4 * given, _FIRST_BYTES)
        return NeedMore(min(wanted, file_bytes, MAX_HEADER_BYTES))


class _Reader:
    """Reads keys and tensors in the order of the format, with one cursor."""

    def __init__(self, header: bytes | bytearray | memoryview, file_bytes: int) -> None:
        self._version, self._big_endian = _version(bytes(header[4:8]))
        self._order = order = ">" if self._big_endian else "<"
        self._at = Cursor(header, file_bytes, order, position=8)
        # By number of dimensions: these, then the type and the offset.
        self._shapes = tuple(struct.Struct(f"{order}{count}QIQ") for count in range(_MAX_DIMENSIONS + 1))
        self._scalars = {
            type_id: (name, struct.Struct(order + code)) for type_id, (name, code) in _SCALARS.items()
        }

    def read(self) -> Container:
        tensor_count = self._at.count("the tensor count", _MIN_TENSOR_BYTES, _MAX_TENSORS)
        key_count = self._at.count("the key count", _MIN_KEY_BYTES, _MAX_KEYS)
        values, offsets = self._read_keys(key_count)
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            at = offsets["general.alignment"]
            self._at.refuse("general.alignment", at, f"is {alignment!r}, not a power of two")
        tensors, data_bytes, data_offset = self._read_tensors(tensor_count, alignment)
        expected_bytes = data_offset + data_bytes if tensors else self._at.position
        if expected_bytes > self._at.file_bytes:
            raise ModelInvalid(
                f"truncated: {self._at.file_bytes} of {expected_bytes} bytes, "
                f"{100 * self._at.file_bytes / expected_bytes:.1f} %",
                remedy="Finish the download (most tools resume it), or download the file again.",
            )
        return Container(
            values=values,
            offsets=offsets,
            tensors=tensors,
            version=self._version,
            big_endian=self._big_endian,
            file_bytes=self._at.file_bytes,
            expected_bytes=expected_bytes,
        )

    # --- keys ------------------------------------------------------------------------------------

    def _read_keys(self, count: int) -> tuple[dict[str, Value], dict[str, int]]:
        values: dict[str, Value] = {}
        offsets: dict[str, int] = {}
        for index in range(count):
            at = self._at.position
            key = self._at.string(f"the name of key {index}", _MAX_KEY_BYTES)
            if not key:
                self._at.refuse(f"the name of key {index}", at, "is empty")
            if key in offsets:
                self._at.refuse(f"key {key!r}", at, f"appears twice, first at offset {offsets[key]}")
            type_id = self._at.u32(f"the type of {key!r}")
            offsets[key] = self._at.position
            if type_id == _STRING:
                values[key] = self._at.string(key, self._at.file_bytes)
            elif type_id == _ARRAY:
                values[key] = self._array(key)
            elif type_id in self._scalars:
                packed = self._scalars[type_id][1]
                at = self._at.position
                self._at.advance(packed.size, key)
                values[key] = packed.unpack_from(self._at.header, at)[0]
            else:
                self._at.refuse(key, offsets[key] - 4, f"has the unknown type {type_id}")
        return values, offsets

    def _array(self, key: str) -> Array:
        at = self._at.position
        item_type = self._at.u32(f"the item type of {key!r}")
        count_at = self._at.position
        count = self._at.u64(f"the length of {key!r}")
        if item_type == _ARRAY:
            self._at.refuse(key, at, "is an array of arrays, which llama.cpp does not read")
        if item_type == _STRING:
            self._at.check_count(key, count_at, count, 8)
            if key == _VOCABULARY:
                return Array("str", count, digests=self._skip_vocabulary(key, count))
            self._at.skip_strings(key, count)
            return Array("str", count)
        if item_type not in self._scalars:
            self._at.refuse(key, at, f"is an array of the unknown type {item_type}")
        name, packed = self._scalars[item_type]
        self._at.check_count(key, count_at, count, packed.size)
        at = self._at.position
        self._at.advance(count * packed.size, key)
        if count > _MAX_KEPT_ITEMS:
            return Array(name, count)
        self._at.keep(key, at, 40 * count)
        code = _SCALARS[item_type][1]
        return Array(name, count, struct.unpack_from(f"{self._order}{count}{code}", self._at.header, at))

    def _skip_vocabulary(self, key: str, count: int) -> tuple[tuple[int, int], ...]:
        """Skip the tokens and compute their digests (4 ms for 150,000 tokens)."""
        last = count - count % _DIGEST_STEP
        ends = sorted({count, *(last - step * _DIGEST_STEP for step in range(_DIGEST_STEPS))})
        done = min(_UNSHARED_TOKENS, count)
        self._at.skip_strings(key, done, more=count - done)
        digests = []
        checksum = 0
        for end in ends:
            if end > done:
                begin = self._at.position
                self._at.skip_strings(key, end - done, more=count - end)
                with memoryview(self._at.header) as header:
                    checksum = zlib.crc32(header[begin : self._at.position], checksum)
                digests.append((end, checksum))
                done = end
        return tuple(digests)

    # --- tensors ---------------------------------------------------------------------------------

    def _read_tensors(self, count: int, alignment: int) -> tuple[tuple[Tensor, ...], int, int]:
        """The tensors, the bytes from the first one's begin to the last one's end, and where they begin."""
        tensors: list[Tensor] = []
        names: set[str] = set()
        end = 0
        for index in range(count):
            at = self._at.position
            name = self._at.string(f"the name of tensor {index}", _MAX_TENSOR_NAME_BYTES)
            if not name or name in names:
                self._at.refuse(
                    f"the name of tensor {index}", at, f"is {name!r}, {'twice' if name else 'empty'}"
                )
            names.add(name)
            tensor, offset = self._tensor(name)
            # llama.cpp accepts only consecutive, padded tensors; this check also finds every wrong offset.
            begin = _padded(end, alignment)
            if offset != begin:
                at = self._at.position - 8
                self._at.refuse(f"the offset of tensor {name!r}", at, f"is {offset}, expected {begin}")
            end = begin + tensor.size_bytes
            tensors.append(tensor)
        return tuple(tensors), end, _padded(self._at.position, alignment)

    def _tensor(self, name: str) -> tuple[Tensor, int]:
        """A tensor and its stated offset, read in one step, because models have hundreds of tensors."""
        at = self._at.position
        dimensions = self._at.u32(f"the number of dimensions of tensor {name!r}")
        if dimensions > _MAX_DIMENSIONS:
            self._at.refuse(f"the number of dimensions of tensor {name!r}", at, f"is {dimensions}, at most 4")
        packed = self._shapes[dimensions]
        at = self._at.position
        self._at.advance(packed.size, f"the shape of tensor {name!r}")
        *lengths, type_id, offset = packed.unpack_from(self._at.header, at)
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            removed = REMOVED_TENSOR_TYPES.get(type_id)
            raise ModelInvalid(
                f"the type of tensor {name!r} at offset {self._at.position - 12} is {type_id}, "
                + (f"{removed}, which llama.cpp has removed" if removed else "an unknown quantisation"),
                remedy="Use a file of the model with another quantisation.",
            )
        row = lengths[0] if lengths else 1
        if row % kind.block_elements:
            self._at.refuse(
                f"the first dimension of tensor {name!r}",
                at,
                f"is {row}, not a multiple of the {kind.block_elements} that {kind.name} packs together",
            )
        elements = math.prod(lengths)
        size_bytes = elements // kind.block_elements * kind.block_bytes
        if size_bytes > _MAX_TENSOR_BYTES:
            self._at.refuse(f"the size of tensor {name!r}", at, f"would be {size_bytes} bytes")
        return Tensor(name, elements, kind.name, size_bytes, tuple(lengths)), offset


def _version(field: bytes) -> tuple[int, bool]:
    """Version and whether the file is big-endian; the version is small, so only one order makes sense."""
    little, big = int.from_bytes(field, "little"), int.from_bytes(field, "big")
    if little in (2, 3):
        return little, False
    if big in (2, 3):
        return big, True
    if 1 in (little, big):
        raise ModelInvalid(
            "the version at offset 4 is 1, which llama.cpp no longer reads (2023)",
            remedy="Download a newer .gguf file of the model.",
        )
    version = min(little, big)
    raise ModelInvalid(
        f"the version at offset 4 is {version}, and llamasup reads only 2 and 3",
        remedy="The file is damaged, or newer than this llamasup: download it again, or update llamasup.",
    )


def _padded(size_bytes: int, alignment: int) -> int:
    return -(-size_bytes // alignment) * alignment


# --- typed look-up of keys ------------------------------------------------------------------------


_MAX = 1 << 31  # what llama.cpp holds in 32 bits


class Keys:
    """The keys of ``container``; ``{a}`` at the head of a key stands for ``prefix``, the architecture."""

    def __init__(self, container: Container, prefix: str = "") -> None:
        self.prefix = prefix
        self._values = container.values
        self._offsets = container.offsets

    def __contains__(self, key: str) -> bool:
        return self._named(key) in self._values

    def refuse(self, key: str, why: str) -> NoReturn:
        key = self._named(key)
        where = f" at offset {self._offsets[key]}" if key in self._offsets else ""
        raise ModelInvalid(
            f"{key}{where} {why}",
            remedy="The file is damaged or was converted wrongly: use another file of this model.",
        )

    def text(self, key: str) -> str | None:
        value = self._values.get(self._named(key))
        if value is not None and not isinstance(value, str):
            self.refuse(key, f"is {_shown(value)}, not a string")
        return value

    def integer(self, key: str, default: int = 0, *, least: int = 0, most: int = _MAX) -> int:
        value = self._values.get(self._named(key))
        return default if value is None else self._checked(key, value, least, most)

    def optional(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def required(self, key: str) -> int:
        """Return a number above zero without which llama.cpp does not load the model."""
        if key not in self:
            self.refuse(key, "is missing")
        return self.integer(key, least=1)

    def flag(self, key: str) -> bool | None:
        value = self._values.get(self._named(key))
        if value is not None and not isinstance(value, bool):
            self.refuse(key, f"is {_shown(value)}, not true or false")
        return value

    @property
    def tokens(self) -> Array:
        """The vocabulary; empty without one."""
        value = self._values.get(_VOCABULARY, Array("str", 0))
        if not isinstance(value, Array):
            self.refuse(_VOCABULARY, f"is {_shown(value)}, not an array")
        return value

    def per_layer(self, key: str, layers: int, *, trailing: int = 0) -> tuple[int, ...] | None:
        """Return one number for each layer, from an array or from one number for all.

        Returns None without such a key.

        An array may leave out the ``trailing`` layers (those for multi-token prediction): its last number
        then holds for them.
        """
        value = self._values.get(self._named(key))
        if value is None:
            return None
        if not isinstance(value, Array):
            return (self._checked(key, value, 0, _MAX),) * layers
        if value.count not in (layers, layers - trailing) or not value.items:
            self.refuse(key, f"has {value.count} entries of {value.item_type} for {layers} layers")
        items = tuple(self._checked(key, item, 0, _MAX) for item in value.items)
        return items + items[-1:] * (layers - value.count)

    def is_array(self, key: str) -> bool:
        return isinstance(self._values.get(self._named(key)), Array)

    def _checked(self, key: str, value: Value, least: int, most: int) -> int:
        if not isinstance(value, int):
            self.refuse(key, f"is {_shown(value)}, not a whole number")
        if not least <= value <= most:
            self.refuse(key, f"is {int(value)}, expected {least} to {most}")
        return int(value)

    def _named(self, key: str) -> str:
        return key.replace("{a}", self.prefix, 1)


def _shown(value: Value) -> str:
    if isinstance(value, Array):
        return f"an array of {value.count} {value.item_type}"
    return repr(value[:64] if isinstance(value, str) else value)
