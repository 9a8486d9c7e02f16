"""Records the bytes that go to the C parsers."""

from __future__ import annotations

from typing import Any

import httptools
import pytest


def record_parser_input(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bytes]:
    """The bytes that parsers made from now on receive."""
    shown: list[bytes] = []
    made: Any = getattr(httptools, name)

    class Recording:
        def __init__(self, protocol: object) -> None:
            self._parser = made(protocol)

        def feed_data(self, data: bytes) -> None:
            shown.append(data)
            self._parser.feed_data(data)

        def __getattr__(self, asked: str) -> Any:
            return getattr(self._parser, asked)

    monkeypatch.setattr(module.httptools, name, Recording)
    return shown
