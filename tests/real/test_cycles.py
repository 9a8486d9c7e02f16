"""S18: crashes, stops and starts leave nothing in the process that supervises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.children import NewChildren
from tests.real.cycles import Held, crash_cycles, leaks
from tests.real.remains import folders_of

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_sixty_crash_cycles_hold_no_more_resources_than_ten(
    runtime: str,
    tiny_model: Path,
    own_folders: Path,
    new_children: NewChildren,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, folder in folders_of(own_folders).items():
        monkeypatch.setenv(variable, folder)
    held = crash_cycles(runtime, tiny_model, own_folders, services=6, crashes=10)
    print(held[0], held[-1], sep="\n")
    assert held[-1].cycles - held[0].cycles == 50
    assert new_children() == []
    assert leaks(held) == []


def test_leaks_are_reported() -> None:
    before = Held(10, descriptors=9, threads=3, tasks=1, children=0, files=1, rss_bytes=40_000_000)
    after = Held(20, descriptors=10, threads=3, tasks=1, children=0, files=1, rss_bytes=50_000_000)
    assert leaks([before, after]) == ["descriptors: 9 before, 10 after", "RSS: 10000000 bytes more"]
    assert leaks([before, before]) == []
