"""Tables, and lines broken between words at the width of a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamasup.cli.output.layout import hanging, table
from llamasup.core.system.text import display_width


def test_table_aligns_all_but_the_last_column() -> None:
    assert table([("a", "1", "x  y"), ("bbb", "", "z")]) == "  a    1  x  y\n  bbb     z"
    assert table([]) == ""
    assert table([("alone",)]) == "  alone"


def test_wide_characters_count_as_two_columns() -> None:
    assert (
        table([("模型", "x"), ("abcd", "y"), ("e\u0301", "z")], indent="")
        == "模型  x\nabcd  y\ne\u0301     z"
    )


def test_last_column_is_broken_between_words_with_hanging_indent() -> None:
    rows = [("--flag", "so that nothing is ever broken inside a word"), ("-f", "short")]
    assert table(rows, columns=36) == (
        "  --flag  so that nothing is ever\n          broken inside a word\n  -f      short"
    )


def test_text_of_narrow_column_begins_on_next_line() -> None:
    rows = [("a-name-of-thirty-letters-or-more", "so that nothing is ever broken inside a word")]
    assert table(rows, columns=40) == (
        "  a-name-of-thirty-letters-or-more\n      so that nothing is ever broken\n      inside a word"
    )


def test_word_longer_than_a_line_stays_whole() -> None:
    path = "/a/path/that/is/to/be/copied/and/is/longer/than/the/terminal"
    assert path in hanging("ok  ", f"found in {path} and nowhere else", columns=40).split("\n")[1]


def test_text_without_width_is_not_broken() -> None:
    assert hanging("ok  ", "word " * 100) == "ok  " + ("word " * 100).rstrip()


@given(st.text("abc 模", max_size=200), st.integers(30, 80))
def test_lines_fit_the_terminal_and_no_word_is_lost(text: str, columns: int) -> None:
    laid = hanging("ok  name  ", text, columns=columns)
    assert laid.split() == f"ok name {text}".split()
    longest = max(map(display_width, text.split()), default=0)
    for line in laid.split("\n"):
        assert display_width(line) <= columns or longest > columns - 10
