"""The fields of a request in Ollama's API: wrong types and wrong numbers are refused, with the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from llamasup.ollama.fields import (
    Refused,
    boolean,
    decoded,
    integer,
    items,
    keep_alive,
    number,
    object_of,
    text,
)


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        read()
    assert caught.value.error.status == 400
    return f"{caught.value.error.message}: {caught.value.error.remedy}"


def test_body_must_be_a_json_object() -> None:
    assert decoded(b'{"a":1}') == {"a": 1}
    assert "the body is an array" in refused(lambda: decoded(b"[1]"))
    assert "the body is null" in refused(lambda: decoded(b"null"))
    for body in (b"", b"{", b'{"a":NaN}', b'{"a":1e999}', b"[" * 100_000, b"\xff\xfe"):
        assert "the body is not JSON" in refused(partial(decoded, body))


@pytest.mark.parametrize(
    ("read", "absent", "valid", "wrong"),
    [
        (text, "", "x", (1, True, [], {})),
        (boolean, False, True, (1, "true", [], {})),
        (integer, None, 5, ("5", True, [], {}, 1.5)),
        (number, None, 0.5, ("5", True, [], {})),
        (object_of, {}, {"a": 1}, (1, "x", [], False)),
        (items, (), [1], (1, "x", {}, False)),
    ],
)
def test_field_of_a_wrong_type_is_refused_and_null_counts_as_absent(
    read: Callable[[Mapping[str, Any], str], Any], absent: Any, valid: Any, wrong: tuple[Any, ...]
) -> None:
    assert read({}, "f") == absent
    assert read({"f": None}, "f") == absent
    assert read({"f": valid}, "f") == valid
    for value in wrong:
        assert refused(partial(read, {"f": value}, "f")).startswith("f is ")


def test_whole_number_may_be_written_with_a_point() -> None:
    assert integer({"f": 5.0}, "f") == 5


@pytest.mark.parametrize("huge", [1 << 70, float("inf"), float("nan"), -(1 << 63)])
def test_number_beyond_64_bits_is_refused(huge: float) -> None:
    assert "use a smaller number" in refused(lambda: number({"f": huge}, "f"))


def test_whole_number_outside_of_its_range_is_refused() -> None:
    assert refused(lambda: integer({"num_ctx": -1}, "num_ctx", 1)) == "num_ctx is -1: use 1 to 2147483647"


def test_long_value_is_shown_shortened() -> None:
    assert len(refused(lambda: integer({"f": "x" * 1000}, "f"))) < 200


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (300, 300.0),
        (0.5, 0.5),
        (-1, float("inf")),
        ("0", 0.0),
        ("-0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("+1.5s", 1.5),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("-1m", float("inf")),
    ],
)
def test_keep_alive_is_seconds_or_a_text_as_in_go(value: object, seconds: float | None) -> None:
    assert keep_alive({"keep_alive": value}) == seconds


@pytest.mark.parametrize("value", ["", "5", "5x", "m", "five", "1h 2m", True, [], {}, float("nan")])
def test_keep_alive_that_is_no_time_is_refused(value: object) -> None:
    assert "keep_alive" in refused(lambda: keep_alive({"keep_alive": value}))
