"""Random JSON bodies that ask for jobs, and the plain way to count what they ask for.

``jobs_of`` decodes a body into Python objects and counts as the source of llama-server (b11434) does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import ceil
from typing import Any

from hypothesis import strategies as st

LABELS = {
    "/completion": ("prompt",),
    "/v1/embeddings": ("input", "content"),
    "/v1/rerank": ("documents", "texts"),
    "/v1/chat/completions": (),
}

_texts = st.text(st.sampled_from(list('ab,:"\\[]{}\n é1-')), max_size=6)
_numbers = st.integers(-3, 9) | st.sampled_from([1.5, 2.0, 1e2])
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _texts,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(_texts, each, max_size=3),
    max_leaves=8,
)
_prompts = (
    st.lists(_texts, max_size=6)
    | st.lists(st.integers(0, 99), max_size=6)
    | st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5)
    | st.lists(_texts | st.integers(0, 9) | _values, max_size=5)
    | _values
)
NAMES = ("prompt", "input", "content", "documents", "texts", "n", "n_cmpl", "model", "stream", "messages")


def _field(name: str) -> st.SearchStrategy[tuple[str, Any]]:
    values = _numbers | _values if name in ("n", "n_cmpl") else _prompts
    return values.map(lambda value: (name, value))


@st.composite
def bodies(draw: st.DrawFn, names: Sequence[str] = NAMES) -> bytes:
    """Keys may come twice, letters may be escaped, and blanks may stand wherever they are allowed."""
    fields = draw(st.lists(st.sampled_from(names).flatmap(_field), max_size=5))
    spread = draw(st.sampled_from([(",", ":"), (", ", " : "), (" ,\r\n\t", ":\n")]))
    escape = draw(st.booleans())

    def text(name: str) -> str:
        if not escape:
            return json.dumps(name)
        return '"' + "".join(f"\\u{ord(each):04x}" for each in name) + '"'

    ascii_only = draw(st.booleans())
    members = [
        text(name) + spread[1] + json.dumps(value, separators=spread, ensure_ascii=ascii_only)
        for name, value in fields
    ]
    return ("{" + spread[0].join(members) + "}").encode()


def jobs_of(body: bytes, lists: tuple[str, ...]) -> int:
    """What llama-server begins for a body that it does not refuse; at most, for one that it does."""
    fields = json.loads(body)
    items = 1
    for name in lists:
        value = fields.get(name)
        # One integer makes one prompt of ids of it; any other number is refused.
        if isinstance(value, list) and not any(type(each) in (int, float) for each in value):
            items = max(items, len(value))
    return items * max(_times(fields.get("n")), _times(fields.get("n_cmpl")))


def _times(value: Any) -> int:
    return max(1, ceil(value)) if isinstance(value, int | float) and not isinstance(value, bool) else 1
