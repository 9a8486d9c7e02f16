"""Rules of a config: the models that they match, their precedence, and their errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.models.names import pattern
from llamasup.core.models.registry import Unknown, build
from llamasup.core.models.rules import ModelRule, wrong_rules
from llamasup.core.settings.model import ModelSettings


@given(st.text("ab*?.", max_size=8), st.text("ab.", max_size=8))
def test_pattern_matches_like_an_exhaustive_search(written: str, name: str) -> None:
    words = {"*": ".*", "?": "."}
    plain = re.compile("".join(words.get(letter) or re.escape(letter) for letter in written))

    assert bool(pattern(written).fullmatch(name)) == bool(plain.fullmatch(name))


def test_pattern_of_many_stars_is_fast() -> None:
    """With backtracking, this match would never end."""
    assert pattern("*a" * 100 + "*b").fullmatch("a" * 256) is None


@pytest.mark.parametrize(
    ("ctx_sizes", "own", "counts"),
    [((1, 2), None, 2), ((2, 1), None, 1), ((1, None), None, 1), ((1, 2), 3, 3)],
)
def test_later_options_and_own_options_take_precedence(
    ctx_sizes: tuple[int | None, ...], own: int | None, counts: int
) -> None:
    rules = [
        ModelRule(name, options=ModelSettings(ctx_size=ctx_size))
        for name, ctx_size in zip(("q*", "qw*"), ctx_sizes, strict=True)
    ]
    model = ModelRule("qwen", "org/repo:Q4_K_M", options=ModelSettings(ctx_size=own))

    found = build([model, *rules], defaults=ModelSettings(ctx_size=9)).find("qwen")

    assert not isinstance(found, Unknown)
    assert found.options.ctx_size == counts


def test_errors_belong_to_their_rules() -> None:
    a = ModelRule("a", "/a", ("b",), where="c.yaml:1")
    b = ModelRule("b", "/b", where="c.yaml:2")

    assert list(wrong_rules([a, b])) == [(a, "'b' is an alias of 'a', and a model's name (c.yaml:2)")]
