from __future__ import annotations

import sys

import pytest

from llamasup.core.system.process import platform


def test_memory_can_be_returned_at_any_time() -> None:
    platform.give_memory_back()
    platform.give_memory_back()


def test_system_without_malloc_trim_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str | None) -> None: ...

    monkeypatch.setattr("ctypes.CDLL", Library)
    assert platform._malloc_trim.__wrapped__() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_below_a_block_in_use_is_returned() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * 4096

    if platform._malloc_trim() is None:
        pytest.skip("this is not glibc")
    pieces = [bytes(100_000) for _ in range(1_000)]
    for piece in pieces:
        assert not piece[0]
    block = bytes(100_000)
    held = resident()
    del pieces
    platform.give_memory_back()
    assert resident() < held - 50_000_000
    assert len(block) == 100_000
