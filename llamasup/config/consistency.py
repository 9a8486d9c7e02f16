"""What is wrong between keys that are right each by itself."""

from __future__ import annotations

from collections.abc import Mapping

from llamasup.config.mistakes import Mistake
from llamasup.config.values import Config

__all__ = ["inconsistencies"]


def inconsistencies(config: Config, lines: Mapping[str, int], environ: Mapping[str, str]) -> list[Mistake]:
    return []
