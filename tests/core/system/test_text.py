"""Text for terminals and JSON."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.system.text import (
    display_width,
    is_path,
    joined_row,
    json_text,
    path_text,
    printable,
    split_row,
)


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


@pytest.mark.parametrize(
    ("text", "on_posix", "on_windows"),
    [
        ("llama-server", False, False),
        ("~/llama-server", True, True),
        ("bin/llama-server", True, True),
        (r"C:\\bin\\llama-server.exe", False, True),
        ("", False, False),
    ],
)
def test_a_path_has_a_separator_of_its_system(text: str, on_posix: bool, on_windows: bool) -> None:
    assert is_path(text, "/") is on_posix
    assert is_path(text, "\\/") is on_windows


def test_path_outside_utf8_becomes_text() -> None:
    assert path_text("/m/\udcff é.gguf") == "/m/\\xff é.gguf"


@pytest.mark.parametrize(
    ("text", "columns"), [("model", 5), ("模型", 4), ("é", 1), ("e\u0301", 1), ("ＡB", 3)]
)
def test_the_width_of_a_text_is_that_of_its_letters(text: str, columns: int) -> None:
    assert display_width(text) == columns


def strict(text: str) -> Any:
    """msgspec refuses half a surrogate pair, as Rust's serde_json does."""
    return msgspec.json.decode(text.encode())


def test_strict_parsers_reject_lone_surrogates() -> None:
    with pytest.raises(msgspec.DecodeError):
        strict(json.dumps("/m/\udcff.gguf"))


def test_a_path_outside_utf8_is_escaped_wherever_it_is() -> None:
    path = "/m/\udcff.gguf"
    shown = {
        "model": path,
        "argv": ["--model", path],
        "env": {path: 1},
        "memory": ({"name": path}, None, 1.5),
    }
    escaped = "/m/\\xff.gguf"
    assert strict(json_text(shown)) == {
        "model": escaped,
        "argv": ["--model", escaped],
        "env": {escaped: 1},
        "memory": [{"name": escaped}, None, 1.5],
    }


def test_other_text_is_unchanged_ascii_json() -> None:
    text = json_text({"name": "模型 \U0001f600 \\udcff"}, indent=2)
    assert text.isascii()
    assert text.startswith('{\n  "name"')
    assert strict(text) == {"name": "模型 \U0001f600 \\udcff"}


def test_values_unknown_to_json_become_text() -> None:
    assert json_text([PurePosixPath("/m")]) == '["/m"]'
    assert json_text([PurePosixPath("/\udcff")]) == '["/\\\\xff"]'


def test_lone_surrogate_outside_bytes_is_escaped() -> None:
    assert strict(json_text("\ud800")) == "\\ud800"


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)
    )
)
def test_well_formed_text_is_unchanged(value: Any) -> None:
    assert json.loads(json_text(value)) == value


@given(st.binary())
def test_path_with_any_bytes_is_valid_json(path: bytes) -> None:
    assert isinstance(strict(json_text(path.decode("utf-8", "surrogateescape"))), str)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("", [""]),
        (",a,", ["", "a", ""]),
        ('"a, b",c', ["a, b", "c"]),
        ('"say ""hi"", you"', ['say "hi", you']),
        ('a"b,"c', ['a"b', '"c']),
        ('""', [""]),
    ],
)
def test_a_row_is_split_at_commas_outside_of_quotes(row: str, parts: list[str]) -> None:
    assert split_row(row) == parts


@given(st.lists(st.text(alphabet='ab,"\n '), min_size=1))
def test_a_joined_row_has_the_same_parts(parts: list[str]) -> None:
    assert split_row(joined_row(parts)) == parts
