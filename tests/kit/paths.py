"""Where the tests find the files of the repository."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FIXTURES", "ROOT"]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
