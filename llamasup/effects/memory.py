"""Returns freed memory of this process to the system."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

__all__ = ["give_memory_back"]


def give_memory_back() -> None:
    """glibc keeps freed memory below a block in use. Takes 0.1 ms for each MiB that is returned."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function. None: other C libraries return memory themselves, or have no such call."""
    import ctypes

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows, where CDLL takes no None
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
