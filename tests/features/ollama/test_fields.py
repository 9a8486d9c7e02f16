"""The fields of a request in Ollama's API: wrong types and wrong numbers are refused, with the value."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from llamasup.features.ollama.fields import (
    Fields,
    Refused,
    boolean,
    decoded,
    integer,
    keep_alive,
    number,
    object_of,
    objects,
    source,
    text,
    texts,
)


def given(value: Any) -> Fields:
    """A request with this field."""
    return decoded(json.dumps({"f": value, "keep_alive": value}).encode())


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        read()
    assert caught.value.error.status == 400
    return f"{caught.value.error.message}: {caught.value.error.remedy}"


def test_body_must_be_a_json_object() -> None:
    assert integer(decoded(b' {"a" : 1 }'), "a") == 1
    assert "the body is an array" in refused(lambda: decoded(b"[1]"))
    assert "the body is null" in refused(lambda: decoded(b"null"))
    assert "the body is the string" in refused(lambda: decoded(b' "x"'))
    for body in (b"", b"{", b'{"a":NaN}', b'{"a":' + b"[" * 100_000, b"\xff\xfe", b'{"\xff":1}'):
        assert "the body is not JSON" in refused(partial(decoded, body))


@pytest.mark.parametrize(
    ("read", "absent", "valid", "wrong"),
    [
        (text, "", "x", (1, True, [], {})),
        (boolean, False, True, (1, "true", [], {})),
        (integer, None, 5, ("5", True, [], {}, 1.5)),
        (number, None, 0.5, ("5", True, [], {})),
        (texts, (), ["x"], (1, "x", {}, False)),
    ],
)
def test_field_of_a_wrong_type_is_refused_and_null_counts_as_absent(
    read: Callable[[Fields, str], Any], absent: Any, valid: Any, wrong: tuple[Any, ...]
) -> None:
    assert read({}, "f") == absent
    assert read(given(None), "f") == absent
    assert read(given(valid), "f") == valid
    for value in wrong:
        assert refused(partial(read, given(value), "f")).startswith("f is ")


def test_objects_stay_json_until_they_are_read() -> None:
    assert integer(object_of(given({"a": [1, {}], "b": 5}), "f"), "b") == 5
    assert [source(item, "a") for item in objects(given([{"a": [1, {}]}]), "f")] == ["[1, {}]"]
    assert object_of(given(None), "f") == {}
    wrong: tuple[Any, ...] = (1, "x", [], False)
    for value in wrong:
        assert refused(partial(object_of, given(value), "f")).startswith("f is ")


def test_item_of_a_wrong_type_is_named() -> None:
    assert refused(lambda: objects(given([{}, 5]), "f")) == "f[1] is invalid: use an array of objects"
    assert refused(lambda: texts(given(["a", "b", {}]), "f")) == "f[2] is invalid: use an array of strings"


def test_text_that_is_not_utf_8_is_refused() -> None:
    fields = decoded(b'{"f":"\xff","g":["\xff"],"h":{"\xff":1}}')
    assert "not a valid string" in refused(lambda: text(fields, "f"))
    assert "not UTF-8" in refused(lambda: source(fields, "f"))
    assert "an item of g is invalid" in refused(lambda: texts(fields, "g"))
    assert "not a valid object" in refused(lambda: object_of(fields, "h"))


@pytest.mark.parametrize("items", [b"[]", b"{}", b'"/9j/"'])
def test_large_body_of_many_items_is_refused_before_it_is_decoded(items: bytes) -> None:
    body = b'{"model":"m","x":[' + b",".join([items] * 400_000) + b"]}"
    assert "too complex" in refused(lambda: decoded(body))


def test_numbers_make_no_objects() -> None:
    body = b'{"model":"m","messages":[' + b",".join([b"1234567"] * 1_000_000) + b"]}"
    tracemalloc.start()
    try:
        assert "messages[0] is invalid" in refused(lambda: objects(decoded(body), "messages"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)  # the list of its numbers has five times as much


def test_whole_number_may_be_written_with_a_point() -> None:
    assert integer(given(5.0), "f") == 5


@pytest.mark.parametrize("huge", [str(1 << 70), "1e999", "9" * 5000, str(-(1 << 63))])
def test_number_beyond_64_bits_is_refused(huge: str) -> None:
    fields = decoded(b'{"f":%b}' % huge.encode())
    assert "use a smaller number" in refused(lambda: number(fields, "f"))


def test_whole_number_outside_of_its_range_is_refused() -> None:
    assert refused(lambda: integer(given(-1), "f", 1)) == "f is -1: use 1 to 2147483647"


def test_long_value_is_shown_shortened() -> None:
    assert len(refused(lambda: integer(given("x" * 1000), "f"))) < 200


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (300, 300.0),
        (1.5, 1.5),
        (-1, float("inf")),
        ("0", 0.0),
        ("-0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("+1.5s", 1.5),
        (".5m", 30.0),
        ("-1m", float("inf")),
        ("250ms", 0.0),
        (0.001, 0.0),
        (1e12, float("inf")),
        ("99999999h", float("inf")),
    ],
)
def test_keep_alive_is_seconds_or_a_text_as_in_go(value: object, seconds: float | None) -> None:
    assert keep_alive(given(value)) == seconds


@pytest.mark.parametrize("value", ["", "5", "5x", "m", "five", "1h 2m", True, [], {}])
def test_invalid_keep_alive_is_refused(value: object) -> None:
    assert "keep_alive" in refused(lambda: keep_alive(given(value)))
