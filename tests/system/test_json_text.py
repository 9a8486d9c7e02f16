"""What is printed as JSON is JSON to the strictest parser."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.system.text import json_text


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
