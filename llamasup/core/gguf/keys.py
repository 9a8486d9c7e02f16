"""Typed look-up of a GGUF header's keys. An invalid type or value is an error with key and offset."""

from __future__ import annotations

from typing import NoReturn

from llamasup.core.gguf.header import Array, Container, Value
from llamasup.errors import ModelInvalid

_MAX = 1 << 31  # what llama.cpp holds in 32 bits


class Keys:
    """The keys of ``container``; ``{a}`` at the head of a key stands for ``prefix``, the architecture."""

    def __init__(self, container: Container, prefix: str = "") -> None:
        self.prefix = prefix
        self._values = container.values
        self._offsets = container.offsets

    def __contains__(self, key: str) -> bool:
        return self._named(key) in self._values

    def refuse(self, key: str, why: str, *, remedy: str = "") -> NoReturn:
        key = self._named(key)
        where = f" at offset {self._offsets[key]}" if key in self._offsets else ""
        raise ModelInvalid(
            f"{key}{where} {why}",
            remedy=remedy or "The file is damaged or was converted wrongly: use another file of this model.",
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

    def array_length(self, key: str) -> int:
        """Return the number of items of an array; 0 without such a key."""
        value = self._values.get(self._named(key))
        if value is None:
            return 0
        if not isinstance(value, Array):
            self.refuse(key, f"is {_shown(value)}, not an array")
        return value.count

    def array_digests(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return the digests of a vocabulary's texts; empty without such an array."""
        value = self._values.get(self._named(key))
        return value.digests if isinstance(value, Array) else ()

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
