"""Records the input of the C parsers."""

from __future__ import annotations

from typing import Any

import httptools
import pytest


def record_parser_input(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bytes]:
    """The bytes that later created parsers receive."""
    shown: list[bytes] = []
    made: Any = getattr(httptools, name)

    class Recording:
        def __init__(self, protocol: object) -> None:
            self._parser = made(protocol)

        def feed_data(self, data: bytes) -> None:
            shown.append(data)
            self._parser.feed_data(data)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._parser, attribute)

    monkeypatch.setattr(module.httptools, name, Recording)
    return shown
