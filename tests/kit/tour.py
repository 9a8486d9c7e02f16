"""The blocks of code that tests run: the tour for new users, and the marked blocks of other pages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.paths import ROOT

__all__ = [
    "FIRST",
    "README",
    "RUN",
    "SERVING",
    "SHELL",
    "TOUR",
    "blocks",
    "commands_of",
    "marked_blocks",
]

README = (ROOT / "README.md").read_text("utf-8")
TOUR = (ROOT / "docs" / "get-started.md").read_text("utf-8")
FIRST = "llamasup run demo"
RUN = "<!-- run -->\n"
"""The line before a block whose commands a test runs, one after the other, while the demo is served."""


def blocks(language: str, page: str = TOUR) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def commands_of(block: str) -> list[str]:
    """The commands of a block, each on one line."""
    return re.sub(r"^\$ ", "", re.sub(r"\\\n *", "", block), flags=re.M).strip().splitlines()


SHELL = [block for block in blocks("sh") if block.strip() != FIRST]
SERVING = [block for block in SHELL if block.startswith("llamasup run")]


def marked_blocks(page: Path) -> list[str]:
    """The commands of each block of a page that a test runs."""
    found = re.findall(rf"^{RUN}```(?:sh|console)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    return ["\n".join(commands_of(block)) for block in found]
