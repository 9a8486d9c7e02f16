"""The text of a draft, its comments, and what the check of the config leaves out of it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from llamasup.core.config.issues import Issue
from llamasup.features.config_import.draft import Draft, flow, is_secret, literal, valid_name
from tests.features.config_import.accounts import issues_of


def test_comments_are_above_what_they_are_about() -> None:
    draft = Draft()
    draft.note((), "first\x1b words")
    draft.put(("models", "a", "path"), "x.gguf", "from -m x.gguf")
    draft.add(("models", "a", "aliases"), ["b"])
    draft.add(("models", "a", "aliases"), ["c", "b"], "from two places")
    draft.add(("models", "a", "loras"), [])
    draft.put(("models", "b:c"), {})
    draft.note(("models", "a"), "about a")
    draft.note(("models", "a", "nothing", 3), "also about a")
    draft.note(("models", "a"), "long " * 30)
    assert draft.text().split("\n") == [
        "# first\\x1b words",
        "",
        "models:",
        "  # about a",
        "  # also about a",
        f"  # {('long ' * 21).rstrip()}",
        f"  #   {('long ' * 9).rstrip()}",
        "  a:",
        "    # from -m x.gguf",
        "    path: x.gguf",
        "    # from two places",
        "    aliases: [b, c]",
        "  'b:c': {}",
        "",
    ]


def test_check_leaves_out_what_is_wrong_until_nothing_is() -> None:
    draft = Draft()
    draft.put(("models", "a"), {"path": "x.gguf", "aliases": ["b", "b", "*", "c"], "ctxsize": 7})
    draft.put(("models", "d"), {"pin": "maybe"})
    draft.put(("virtual_models", "v"), {"model": "d", "set": {"temp": 1, "top_k": 2}})
    draft.put(("groups", "g"), ["a", "nobody"])
    text, issues = draft.checked(issues_of)
    assert issues == ()
    assert yaml.safe_load(text) == {
        "models": {"a": {"path": "x.gguf", "aliases": ["b", "c"]}},
        "virtual_models": {},
        "groups": {"g": ["a"]},
    }
    for left_out in ("ctxsize: 7", "pin: maybe", "temp: 1", "nobody", "'*'", "d: {}", "v: {"):
        assert f"{left_out}" in text.replace("\n", ""), left_out


def test_issues_of_the_whole_file_stay() -> None:
    issue = Issue(0, "", "no models")
    assert Draft().checked(lambda _: (issue,)) == ("\n", (issue,))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
)


@given(VALUES)
@example({"a\x85b": ["\u2028", "x\n y", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]})
def test_any_value_is_written_on_one_line(value: Any) -> None:
    text = flow(value)
    assert "\n" not in text
    assert yaml.safe_load(f"a: {text}") == {"a": value}


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("qwen2.5:7b", "qwen2.5:7b"),
        ("GPT OSS (20B)", "GPT-OSS-20B"),
        ("/a..b/", "a.b"),
        ("…", "model"),
        ("", "model"),
    ],
)
def test_names_get_the_letters_that_names_have(name: str, valid: str) -> None:
    assert valid_name(name) == valid


def test_secrets_and_variables_of_other_programs() -> None:
    assert [name for name in ("HF_TOKEN", "apiKey", "max_tokens", "keepalive") if is_secret(name)] == [
        *("HF_TOKEN", "apiKey")
    ]
    assert literal("${x} $y") == "$${x} $y"
