"""Times and sizes as people write them: ``1h30m``, ``12GiB``, ``80%``."""

from __future__ import annotations

import re

import msgspec

_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"\d{1,9}(?:\.\d{1,6})?"
# Larger units first, each once: 1h30m, not 30m1h.
DURATION = f"(?=\\d){''.join(f'(?:{_NUMBER}{unit})?' for unit in _UNITS_S)}"
_DURATION = "(?=\\d)" + "".join(f"(?:({_NUMBER}){unit})?" for unit in _UNITS_S)
_MAX_S = 10 * 365 * 86_400.0  # ten years: longer is a typing error, and timers overflow after some centuries

_BYTES = {
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
SIZE = f"{_NUMBER} ?(?:{'|'.join(_BYTES)})"
PERCENT = f"{_NUMBER}%"
_SIZE = f"(-?)({_NUMBER}) ?([A-Za-z%]*)"


class Size(msgspec.Struct, frozen=True):
    """An amount of memory or disk: ``bytes``, or a share of the total; exactly one of them is set."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, total_bytes: int) -> int:
        """The size in bytes, at most ``total_bytes``."""
        wanted = total_bytes * (self.percent or 0) / 100 if self.bytes is None else self.bytes
        return min(int(wanted), total_bytes)

    def __str__(self) -> str:
        """Write the size in the notation of a config."""
        if self.bytes is None:
            return f"{self.percent:g}%"
        exact = ((unit, factor) for unit, factor in reversed(_BYTES.items()) if not self.bytes % factor)
        unit, factor = next(exact, ("KiB", 1 << 10))
        return f"{self.bytes / factor:g}{unit}"


def read_duration(text: str) -> float | None:
    """Read a time in seconds. A bare number is seconds. None: the text is not a time."""
    if re.fullmatch(_NUMBER, text, re.ASCII):
        seconds = float(text)
    else:
        parts = re.fullmatch(_DURATION, text, re.ASCII)
        if parts is None:
            return None
        seconds = sum(
            float(part) * unit_s
            for part, unit_s in zip(parts.groups(), _UNITS_S.values(), strict=True)
            if part
        )
    return seconds if seconds <= _MAX_S else None


def duration_text(seconds: float) -> str:
    """Write a time in the notation of a config: ``1h30m``, ``0.5s``."""
    if seconds == float("inf"):
        return "never"
    parts: list[str] = []
    for unit in ("d", "h", "m"):
        count = int(seconds // _UNITS_S[unit])
        if count:
            parts.append(f"{count}{unit}")
            seconds -= count * _UNITS_S[unit]
    return "".join(parts) + (f"{seconds:g}s" if seconds or not parts else "")


def read_size(text: str) -> tuple[Size | None, str]:
    """Read a size, or return the reason why the text is not one ("": it does not look like a size)."""
    parts = re.fullmatch(_SIZE, text, re.ASCII)
    if parts is None:
        return None, ""
    minus, number, unit = parts.groups()
    amount = float(number)
    if minus:
        return None, "it is negative"
    if unit == "%":
        return (Size(percent=amount), "") if 1 <= amount <= 100 else (None, "it is outside 1% to 100%")
    if unit not in _BYTES:
        return None, f"unknown unit {unit!r}, use {', '.join(_BYTES)}" if unit else "the unit is missing"
    size_bytes = int(amount * _BYTES[unit])
    if not size_bytes:
        return None, "it is less than a byte"
    return Size(bytes=size_bytes), ""
