"""The names of a model."""

from __future__ import annotations

import pytest

from llamasup.core.settings.names import MAX_LETTERS, Names, names_of, why_not_an_alias
from llamasup.errors import UsageInvalid


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/qwen3-8b.Q4_K_M.gguf", "qwen3-8b.Q4_K_M"),
        ("/models/big-00001-of-00012.gguf", "big"),
        ("/models/one-00001-of-00012-merged.gguf", "one-00001-of-00012-merged"),
        ("/models/a,b.gguf", "a_b"),
        ("/models/ .gguf", "model"),
        ("/models/-00001-of-00002.gguf", "model"),
    ],
)
def test_file_name_is_the_model_name(path: str, name: str) -> None:
    assert names_of(path, None) == Names(name)


def test_first_alias_is_the_name() -> None:
    assert names_of("/models/x.gguf", "gpt") == Names("gpt")
    assert names_of("/models/x.gguf", "gpt, small ,gpt,tiny") == Names("gpt", ("small", "tiny"))


@pytest.mark.parametrize("alias", ["", " ", ",", "a,", ",a"])
def test_empty_alias_is_rejected(alias: str) -> None:
    with pytest.raises(UsageInvalid, match="has an empty name") as refused:
        names_of("/models/x.gguf", alias)
    assert repr(alias) in refused.value.message


@pytest.mark.parametrize(
    "alias",
    [
        "claude-sonnet[1m]",
        "gpt 4",
        "openrouter/anthropic/claude-3.5-sonnet:beta",
        "unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL (local)",
        "/models/llama-3.gguf",
        "C:\\models\\llama.gguf",
        "gpt-4o,mini",
        "模型",
        "modèle n° 1",
        "🦙",
        '{"a": 1}',
        "a" * MAX_LETTERS,
    ],
)
def test_printable_name_is_an_alias(alias: str) -> None:
    assert why_not_an_alias(alias) == ""


@pytest.mark.parametrize(
    ("alias", "why"),
    [
        ("", "is empty"),
        ("a" * (MAX_LETTERS + 1), "257 characters"),
        ("gpt*", "is a pattern"),
        ("what?", "is a pattern"),
        (" a", "a space"),
        ("a ", "a space"),
        ("a\nb", "not printable"),
        ("a\x00", "not printable"),
        ("\x1b[31mred", "not printable"),
        ("a\u202eb", "not printable"),  # turns the direction of the text
        ("a\u200bb", "not printable"),  # has no width
        ("a\ud800", "not printable"),
        ("a\xa0b", "not printable"),  # looks like a space
    ],
)
def test_alias_that_nobody_can_read_or_type_is_refused(alias: str, why: str) -> None:
    assert why in why_not_an_alias(alias)
