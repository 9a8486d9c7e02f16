"""Requests that agents of others sent, from ``tests/fixtures/agents``, without the texts of their authors."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.kit.paths import ROOT
from tests.kit.scripted import Call, scripted
from tests.kit.tiny import WORDS

__all__ = ["FIXTURES", "FOLDER", "MODEL", "TOOLS", "WORDS_KEY", "body_of", "model_of", "recorded"]

FIXTURES = ROOT / "tests" / "fixtures" / "agents"
FOLDER = "/home/user/project"
MODEL = "model"
TOOLS = "$tools"
"""Stands for the tools of the fixture."""
WORDS_KEY = "$words"
"""The only key of the object in place of a text. Its value is the number of characters."""


def recorded() -> dict[str, Any]:
    """Return the fixtures by the name of the client."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(Path(FIXTURES).glob("*.json"))}


def model_of(fixture: Any, *, is_strict: bool = False) -> bytes:
    """Return the GGUF file of the model that the client talked to."""
    calls = [Call(call["name"], call["arguments"]) for call in fixture["calls"]]
    return scripted(calls, fixture["text"], is_strict=is_strict)


def body_of(fixture: Any, request: Any) -> Any:
    """Return the body of a request, with words in the place of the texts."""
    body = request["body"]
    return _filled({**body, "tools": fixture["tools"]} if body.get("tools") == TOOLS else body)


def _filled(value: Any) -> Any:
    if isinstance(value, list):
        return [_filled(item) for item in value]
    if isinstance(value, dict):
        if list(value) == [WORDS_KEY]:
            return _words(value[WORDS_KEY])
        return {name: _filled(item) for name, item in value.items()}
    return value


def _words(length: int) -> str:
    text, words = "", cycle(WORDS)
    while len(text) < length:
        text += f"{next(words)} "
    return text[:length]
