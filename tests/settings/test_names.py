"""The names of a model."""

from __future__ import annotations

import pytest

from llamasup.errors import UsageInvalid
from llamasup.settings.names import Names, names_of


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
