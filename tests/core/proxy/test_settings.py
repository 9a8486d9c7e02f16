"""docs/proxy.md lists the limits."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import fields

from llamasup.core.proxy import Limits
from llamasup.service.options import largest_body
from tests.kit.paths import ROOT

_DOCS = ROOT / "docs" / "proxy.md"
_ROW = re.compile(r"^- `(\w+)`: ([\d.]+(?: (?:KiB|MiB|s)\b)?)", re.MULTILINE)


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value // (1 << 20):.0f} MiB" if value >= 1 << 20 else f"{value // (1 << 10):.0f} KiB"
    return f"{value:g} s" if name.endswith("_s") else f"{value}"


@pytest.mark.parametrize(
    ("memory_gib", "body_mib"), [(1, 32), (2, 32), (4, 64), (6, 96), (8, 100), (512, 100)]
)
def test_largest_body_depends_on_the_memory(memory_gib: int, body_mib: int) -> None:
    assert largest_body(memory_gib << 30) == body_mib << 20


def test_every_client_may_send_the_largest_body() -> None:
    for largest in (1 << 20, 32 << 20, 100 << 20, 1 << 30):
        limits = Limits().for_bodies(largest)
        assert limits.body_bytes == largest
        assert 2 * largest <= limits.bodies_per_client_bytes
        assert 2 * limits.bodies_per_client_bytes <= limits.bodies_bytes


def test_docs_list_the_limits() -> None:
    text = _DOCS.read_text().partition("<!-- limits")[2].partition("<!-- end of limits")[0]
    limits = Limits()
    assert _ROW.findall(text) == [
        (field.name, _shown(field.name, getattr(limits, field.name))) for field in fields(Limits)
    ]
