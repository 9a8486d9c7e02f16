"""The table in docs/proxy.md lists the limits."""

from __future__ import annotations

import re

from msgspec.structs import fields

from llamasup.proxy import Limits
from tests.kit.paths import ROOT

_DOCS = ROOT / "docs" / "proxy.md"
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.MULTILINE)


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value // (1 << 20):.0f} MiB" if value >= 1 << 20 else f"{value // (1 << 10):.0f} KiB"
    return f"{value:g} s" if name.endswith("_s") else f"{value}"


def test_docs_list_the_limits() -> None:
    text = _DOCS.read_text().partition("<!-- limits")[2].partition("<!-- end of limits")[0]
    limits = Limits()
    assert _ROW.findall(text) == [
        (field.name, _shown(field.name, getattr(limits, field.name))) for field in fields(Limits)
    ]
