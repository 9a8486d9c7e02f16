"""Any file is a valid config or raises ConfigIssues: no other exception, and in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import ConfigIssues
from llamasup.core.config.nodes import MAX_BYTES
from llamasup.core.settings.declaration import settings_of
from llamasup.core.settings.model import ModelEntry
from tests.core.config.reading import issues_of
from tests.kit.configs import read_text
from tests.kit.extent import examples

_KEYS = st.sampled_from([*settings_of(Config), *settings_of(ModelEntry), "ram", "keep", "api_key_file", "x"])
_TEXTS = st.sampled_from(
    [
        "80%",
        "-1GiB",
        "10m",
        "never",
        "yes",
        "080",
        "${A}",
        "${",
        "a*",
        "..",
        "/x",
        "demo",
        "h:80",
        "x.sock",
        "auto",
        "",
    ]
)
_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), _TEXTS)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=20,
)
_PIECES = st.lists(
    st.sampled_from(
        [*settings_of(Config), ": ", "\n", "  ", "\t", "- ", "[", "]", "{", "}", ", ", "&a ", "*a", "!!x ",
         "|", ">", "'", '"', "---", "...", "?", "#", "%", "\\u0000", "\ufeff", "${", "}", "\x85", "<<"]
    ),
    max_size=40,
)  # fmt: skip


def _read(content: bytes) -> None:
    with suppress(ConfigIssues):
        read_text(content, "c.yaml", Path("/x"), {"A": "b\x00c", "HOME": "/home/ann"})


@settings(max_examples=examples(150))
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    _read(content)


@settings(max_examples=examples(200))
@given(_PIECES)
def test_any_pieces_of_yaml_are_read_or_refused(pieces: list[str]) -> None:
    _read("".join(pieces).encode("utf-8", "surrogatepass"))


@settings(max_examples=examples(60))
@given(st.dictionaries(_KEYS, _TREES, max_size=6))
def test_any_values_of_any_keys_are_read_or_refused(tree: dict[str, Any]) -> None:
    _read(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


_HOSTILE: Mapping[str, Callable[[int], str]] = {
    "open lists": lambda size: "[" * size,
    "open mappings": lambda size: "{" * size,
    "lists in lists": lambda size: "- " * (size // 2),
    "mappings in mappings": lambda size: "a: " * (size // 3),
    "keys of keys": lambda size: "? " * (size // 2),
    "one long name": lambda size: "a" * size,
    "one long number": lambda size: "max_loaded: " + "9" * (size - 20),
    "one long time": lambda size: "swap_after: " + "9" * (size - 20),
    "unknown keys": lambda size: "".join(f"k{n}:\n" for n in range(size // 12)),
    "one alias of all": lambda size: "models:\n" + "".join(
        f" k{n}: {{path: x, aliases: a}}\n" for n in range(size // 75)
    ),
    "a pattern of many stars": lambda size: "models:\n" + "".join(
        f" k{n}: {{path: x}}\n" for n in range(size // 52)
    ) + f"groups: {{g: ['{'*k' * 60}x']}}",
    "many patterns": lambda size: "models: {a: {path: x}}\ngroups: {g: [" + "'*a*a*b'," * (size // 26) + "]}",
    "many variables": lambda size: "models: {a: {extra: [" + "'${A}'," * (size // 12) + "]}}",
    "half a variable": lambda size: "models_dir: " + "${A" * (size // 4),
}  # fmt: skip


@pytest.mark.parametrize("size", [MAX_BYTES // 16, pytest.param(MAX_BYTES, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", _HOSTILE)
def test_hostile_text_takes_about_the_time_of_a_real_config(kind: str, size: int) -> None:
    models = "".join(f"  model-{n}: {{path: model-{n}.gguf, ttl: 10m}}\n" for n in range(size // 70))

    def took_s(text: str) -> float:
        assert len(text) <= MAX_BYTES
        began_s = time.process_time()
        _read(text.encode())
        return time.process_time() - began_s

    # The factor covers the listing of a hundred errors; quadratic time would be a factor of a thousand.
    assert took_s(_HOSTILE[kind](size)) < 10 * took_s(f"models:\n{models}")


def test_number_of_patterns_in_groups_is_limited() -> None:
    found = issues_of("models_dir: m\ngroups: {g: [" + "'a*'," * 200 + "]}")

    assert found == [
        "c.yaml:2: groups.g[100]: more than 100 names with * or ?; groups have at most that many"
    ]
