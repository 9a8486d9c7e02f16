from __future__ import annotations

import pytest

from llamasup.features.ollama.names import shown_name, spellings


def test_id_without_a_tag_is_shown_as_latest() -> None:
    assert shown_name("qwen3-4b") == "qwen3-4b:latest"
    assert shown_name("org/chat:Q4_K_M") == "org/chat:Q4_K_M"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", ("tiny",)),
        ("tiny:latest", ("tiny:latest", "tiny")),
        ("qwen3:4b", ("qwen3:4b", "qwen3-4b")),
        ("../x", ("../x",)),
    ],
)
def test_name_has_spellings_in_order(name: str, expected: tuple[str, ...]) -> None:
    assert spellings(name) == expected
