"""What the C parsers are shown."""

from __future__ import annotations

from typing import Any

import httptools
import pytest


def parser_shows(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bytes]:
    """What parsers that are made from now on are shown."""
    shown: list[bytes] = []
    made: Any = getattr(httptools, name)

    class Noting:
        def __init__(self, protocol: object) -> None:
            self._parser = made(protocol)

        def feed_data(self, data: bytes) -> None:
            shown.append(data)
            self._parser.feed_data(data)

        def __getattr__(self, asked: str) -> Any:
            return getattr(self._parser, asked)

    monkeypatch.setattr(module.httptools, name, Noting)
    return shown
