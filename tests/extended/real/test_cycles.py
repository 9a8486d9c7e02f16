"""S18: crashes, stops and starts leak no resources of the supervising process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extended.real.cycles import ResourceUsage, crash_cycles, leaked_resources
from tests.kit.children import NewChildren
from tests.real.remains import folders_of


def test_sixty_crash_cycles_hold_no_more_resources_than_ten(
    runtime: str,
    tiny_model: Path,
    own_folders: Path,
    new_children: NewChildren,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, folder in folders_of(own_folders).items():
        monkeypatch.setenv(variable, folder)
    usages = crash_cycles(runtime, tiny_model, own_folders, services=6, crashes=10)
    print(usages[0], usages[-1], sep="\n")
    assert usages[-1].cycles - usages[0].cycles == 50
    assert new_children() == []
    assert leaked_resources(usages) == []


def test_leaks_are_reported() -> None:
    before = ResourceUsage(10, descriptors=9, threads=3, tasks=1, children=0, files=1, rss_bytes=40_000_000)
    after = ResourceUsage(20, descriptors=10, threads=3, tasks=1, children=0, files=1, rss_bytes=50_000_000)
    assert leaked_resources([before, after]) == [
        "descriptors: 9 before, 10 after",
        "RSS: 10000000 bytes more",
    ]
    assert leaked_resources([before, before]) == []
