"""Lines of the access log, and the limit on logged slow requests."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import msgspec
import pytest

from llamasup.core.observability.access_record import (
    SlowLog,
    access_line,
    admit_slow,
    shortened,
    waiting_time_s,
)
from tests.core.observability.test_counters import DONE

ENDED = datetime(2026, 11, 21, 3, 2, 1, 999_400, UTC)


def fields(**changes: object) -> dict[str, object]:
    line = access_line(msgspec.structs.replace(DONE, **changes), ENDED)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    read = json.loads(line)
    assert isinstance(read, dict)
    return read


def test_a_line_has_every_field_of_the_record_and_the_time() -> None:
    read = fields(queue_s=0.0001234567, client="key:alice", context="cut", n_ctx=256, n_prompt_tokens=25)
    only_in_spans = {"parent_id", "parent_sampled"}
    only_in_usage = {"ended_s", "slot_s", "tokens_estimated"}
    assert set(read) == {"time", *DONE.__struct_fields__} - only_in_spans - only_in_usage
    assert read["time"] == "2026-11-21T03:02:01.999400Z"
    assert (read["queue_s"], read["client"]) == (0.000123, "key:alice")
    assert (read["context"], read["n_ctx"], read["n_prompt_tokens"]) == ("cut", 256, 25)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("queue_s", 1.2345678, 1.234567),
        ("waited_s", 1.2345678, 1.234567),
        ("first_byte_s", 1.2345678, 1.234567),
        ("duration_s", 1.2345678, 1.234567),
        ("tokens_per_s", 12.3456, 12.34),
    ],
)
def test_numbers_are_cut_to_what_is_of_use(field: str, value: float, shown: float) -> None:
    assert fields(**{field: value})[field] == shown


def test_unknown_values_are_null() -> None:
    read = fields(first_byte_s=None, tokens_per_s=None, model="", client="", trace_id="")
    unknown = ("first_byte_s", "tokens_per_s", "model", "client", "trace_id", "context", "n_ctx")
    assert [read[name] for name in unknown] == [None] * len(unknown)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/a\n{}", "/a%0A{}"),
        ("/a%0ab", "/a%0ab"),
        ("/\x1b[2J\x9b2J é", "/%1B[2J%9B2J%20%E9"),
        ("/" + "x" * 70_000, "/" + "x" * 511 + "…"),
        ("/" + "\x00" * 70_000, "/" + "%00" * 170 + "%…"),
    ],
    ids=["line feed", "encoded line feed", "terminal", "long", "long and odd"],
)
def test_path_is_truncated_and_escaped(path: str, shown: str) -> None:
    assert fields(path=path)["path"] == shown


def test_pending_record_has_a_truncated_path() -> None:
    long = msgspec.structs.replace(DONE, path="/" + "x" * 100_000)
    assert len(shortened(long).path) < 1000
    assert access_line(shortened(long), ENDED) == access_line(long, ENDED)
    assert shortened(DONE) is DONE


def test_waiting_time_ends_at_the_first_byte_or_at_the_end() -> None:
    assert waiting_time_s(0.2, 90.0) == 0.2
    assert waiting_time_s(None, 90.0) == 90.0


def test_burst_is_logged_and_then_one_line_in_five_seconds() -> None:
    log = SlowLog(0.0)
    logged = 0
    for _ in range(100):
        log, tell = admit_slow(log, 0.0)
        logged += tell
    assert (logged, log.left_out) == (10, 90)
    log, tell = admit_slow(log, 4.9)
    assert (tell, log.left_out) == (False, 91)
    log, tell = admit_slow(log, 5.1)
    assert (tell, log.left_out) == (True, 0)


def test_idle_time_allows_only_one_burst() -> None:
    log, logged = SlowLog(0.0), 0
    for _ in range(100):
        log, tell = admit_slow(log, 100_000.0)
        logged += tell
    assert logged == 10
