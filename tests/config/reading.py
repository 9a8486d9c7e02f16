"""Reads configs from text, as the tests of this folder need it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from llamasup.config.mistakes import ConfigMistakes
from llamasup.config.reading import read_text
from llamasup.config.values import Config

HERE = Path("/etc/llamasup")
"""Where the config is taken to be."""


def config_of(text: str, **environ: str) -> Config:
    reading, mistakes = read_text(dedent(text).encode(), "c.yaml", HERE, {"HOME": "/home/ann", **environ})
    assert not mistakes, [each.in_file("c.yaml") for each in mistakes]
    return reading.config


def mistakes_of(text: str | bytes, **environ: str) -> list[str]:
    """As they are told, in the order of the lines."""
    content = text if isinstance(text, bytes) else dedent(text).encode()
    try:
        _, mistakes = read_text(content, "c.yaml", HERE, {"HOME": "/home/ann", **environ})
    except ConfigMistakes as error:
        return list(error.details)
    return list(ConfigMistakes("c.yaml", mistakes).details)


def mistake_of(text: str | bytes, **environ: str) -> str:
    """The only one."""
    found = mistakes_of(text, **environ)
    assert len(found) == 1, found
    return found[0]
