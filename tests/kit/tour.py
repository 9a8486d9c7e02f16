"""The blocks of code in docs/get-started.md, which is the tour for new users."""

from __future__ import annotations

import re

from tests.kit.paths import ROOT

__all__ = ["FIRST", "README", "SERVING", "SHELL", "TOUR", "blocks", "commands_of"]

README = (ROOT / "README.md").read_text("utf-8")
TOUR = (ROOT / "docs" / "get-started.md").read_text("utf-8")
FIRST = "llamasup run demo"


def blocks(language: str, page: str = TOUR) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def commands_of(block: str) -> list[str]:
    """The commands of a block, each on one line."""
    return re.sub(r"^\$ ", "", re.sub(r"\\\n *", "", block), flags=re.M).strip().splitlines()


SHELL = [block for block in blocks("sh") if block.strip() != FIRST]
SERVING = [block for block in SHELL if block.startswith("llamasup run")]
