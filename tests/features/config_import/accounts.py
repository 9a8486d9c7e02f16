"""Checks that a translation accounts for each key and value of its source, and what it means."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import Issue
from llamasup.core.llama_server.help_text import Capabilities, parse_help
from llamasup.features.config_import.draft import Draft, flow, is_secret
from tests.core.config.reading import config_of
from tests.kit.configs import read_text
from tests.kit.paths import FIXTURES

NOW = Capabilities("b11434", parse_help((FIXTURES / "help" / "b11434.txt").read_text()), ())


def issues_of(text: str) -> tuple[Issue, ...]:
    names = dict.fromkeys(re.findall(r"\$\{(\w+)\}", text), "x")
    return read_text(text.encode(), "c.yaml", Path("/c"), {"HOME": "/home/ann", **names})[1]


def config_from(draft: Draft, **environ: str) -> Config:
    """The config, of which nothing had to be left out."""
    text = draft.text()
    assert draft.checked(issues_of) == (text, ())
    return config_of(text, **environ)


def plain(text: str) -> str:
    """The text without the marks and the lines of comments."""
    return re.sub(r"\s*\n *(?:# *)?", " ", f"\n{text}")


def lost(source: Any, text: str) -> list[str]:
    """The keys and values of a config of llama-swap that are not in the text of its translation."""
    found = plain(text)
    return [each for each in _parts(source) if each not in found and flow(each) not in found]


def _parts(node: Any, key: str = "") -> Iterator[str]:
    if key == "apiKeys" or is_secret(key):
        return
    if isinstance(node, dict):
        for name, value in node.items():
            yield from () if "${" in str(name) else (str(name),)
            yield from _parts(value, str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _parts(value, key)
    elif key in ("cmd", "cmdStop"):
        text = re.sub(r"(?m)^\s*#.*$|\\$", "", str(node))
        words = text.split() if text.count('"') % 2 else shlex.split(text)
        yield from (word for word in words if "${" not in word)
    elif key == "env":
        yield str(node).partition("=")[0]
    elif "${" not in str(node):
        yield str(node) if isinstance(node, str) else flow(node)
