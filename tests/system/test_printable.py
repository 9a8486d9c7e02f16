"""No text from a file reaches the terminal as anything but letters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.system.text import display_width, path_text, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Qwen3 8B – 模型 ✓", "Qwen3 8B – 模型 ✓"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("one\ntwo\r", "one\\ntwo\\r"),
        ("\x9b31m", "\\x9b31m"),  # CSI in one byte
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),  # turns the direction of reading
        ("a\udcffb", "a\\xffb"),  # a byte outside UTF-8 in a file's name
        ("a\ud800b", "a\\ud800b"),  # no byte of anything
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_any_text_becomes_printable(text: str) -> None:
    assert printable(text).isprintable()
    printable(text).encode()


def test_path_outside_utf8_becomes_text() -> None:
    assert path_text("/m/\udcff é.gguf") == "/m/\\xff é.gguf"


@pytest.mark.parametrize(
    ("text", "columns"), [("model", 5), ("模型", 4), ("é", 1), ("e\u0301", 1), ("ＡB", 3)]
)
def test_the_width_of_a_text_is_that_of_its_letters(text: str, columns: int) -> None:
    assert display_width(text) == columns
