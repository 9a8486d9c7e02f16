"""Reads configs from text."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import ConfigIssues
from tests.kit.configs import read_text

HERE = Path("/etc/llamasup")
"""The folder of the config."""


def config_of(text: str, **environ: str) -> Config:
    reading, issues = read_text(dedent(text).encode(), "c.yaml", HERE, {"HOME": "/home/ann", **environ})
    assert not issues, [issue.in_file("c.yaml") for issue in issues]
    return reading.config


def issues_of(text: str | bytes, **environ: str) -> list[str]:
    """The messages, in the order of the lines."""
    content = text if isinstance(text, bytes) else dedent(text).encode()
    try:
        _, issues = read_text(content, "c.yaml", HERE, {"HOME": "/home/ann", **environ})
    except ConfigIssues as error:
        return list(error.details)
    return list(ConfigIssues("c.yaml", issues).details)


def issue_of(text: str | bytes, **environ: str) -> str:
    """The only message."""
    found = issues_of(text, **environ)
    assert len(found) == 1, found
    return found[0]
