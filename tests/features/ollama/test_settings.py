"""The section ``ollama`` of a config."""

from __future__ import annotations

import pytest

from tests.core.config.reading import issue_of


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{listen: 127.0.0.1:8080}", "is also in listen; give Ollama's API an address of its own"),
        ("{listen: 11434}", "127.0.0.1:8080"),
    ],
)
def test_invalid_section_is_refused(section: str, message: str) -> None:
    found = issue_of(f"models_dir: m\nollama: {section}\n")
    assert found.startswith("c.yaml:2: ollama")
    assert message in found
