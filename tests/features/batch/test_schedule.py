"""When lines of a batch run: retries, pace, hours, order."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from llamasup.features.batch.lines import prefix_key
from llamasup.features.batch.schedule import (
    FIRST_LIMIT,
    MAX_DROPS,
    MAX_LIMITED_S,
    MAX_TRIES,
    PREEMPTED,
    UNREACHABLE,
    Again,
    Aside,
    Decision,
    Ended,
    Finished,
    Refusal,
    Stop,
    Waiting,
    decide,
    limit_after_refusal,
    next_limit,
    read_window,
    refusal_of,
)

CRASH = Refusal(502, "segmentation_fault", "llama-server crashed")
FULL = Refusal(500, "", "Context size has been exceeded.")


@pytest.mark.parametrize(
    ("ended", "decision"),
    [
        (Ended(None), Finished()),
        (Ended(Refusal(400)), Finished()),
        (Ended(Refusal(404)), Finished()),
        (Ended(Refusal(401)), Stop()),
        (Ended(Refusal(403)), Stop()),
        (Ended(Refusal(429, retry_after_s=7.0)), Again(7.0, waiting=Waiting.ALL, limited=True)),
        (Ended(Refusal(429)), Again(1.0, waiting=Waiting.ALL, limited=True)),
        (Ended(Refusal(425), limited_s=8.0), Again(8.0, waiting=Waiting.ALL, limited=True)),
        (Ended(Refusal(408), limited_s=99.0), Again(30.0, waiting=Waiting.ALL, limited=True)),
        (Ended(Refusal(409), limited_s=MAX_LIMITED_S), Finished()),
        (Ended(Refusal(503, "loading")), Again(1.0, waiting=Waiting.MODEL)),
        (Ended(Refusal(503, "loading", retry_after_s=600.0)), Again(30.0, waiting=Waiting.MODEL)),
        (Ended(Refusal(503, PREEMPTED, retry_after_s=2.0)), Again(2.0, waiting=Waiting.ALL)),
        (Ended(Refusal(503, "batch_waits", retry_after_s=3.0)), Again(3.0, waiting=Waiting.ALL)),
        (Ended(Refusal(502, "upstream_unreachable")), Aside()),
        (Ended(Refusal(504, "upstream_unreachable")), Again(1.0, waiting=Waiting.MODEL)),
        (Ended(Refusal(500)), Again(1.0, counts=True)),
        (Ended(Refusal(504), tries=1), Again(2.0, counts=True)),
        (Ended(Refusal(500), tries=MAX_TRIES - 1), Finished()),
        (Ended(Refusal(0)), Again(1.0, waiting=Waiting.ALL)),
        (Ended(Refusal(0), drops=MAX_DROPS - 1), Finished()),
        (Ended(Refusal(0, UNREACHABLE), drops=99), Again(1.0, waiting=Waiting.ALL)),
        (Ended(CRASH), Aside()),
        (Ended(FULL), Aside()),
        (Ended(FULL, alone=True), Again(1.0, counts=True)),
        (Ended(CRASH, alone=True), Again(1.0, crashed=True)),
        (Ended(CRASH, alone=True, alone_crashes=1), Finished(poison=True)),
        (Ended(Refusal(503, "poison_request")), Finished(poison=True)),
    ],
)
def test_end_of_a_request_decides_about_its_line(ended: Ended, decision: Decision) -> None:
    assert decide(ended) == decision


@pytest.mark.parametrize(
    ("status", "body", "header", "refusal"),
    [
        (503, b'{"error": {"message": "m", "cause": "loading"}}', "3", Refusal(503, "loading", "m", 3.0)),
        (400, b'{"error": "no"}', None, Refusal(400, "", "no")),
        (500, b"<html>", "soon", Refusal(500)),
        (0, b'{"error": {"code": 502, "cause": null}}', "-1", Refusal(502, "", "", 0.0)),
        (0, b'{"error": {"code": "x"}}', None, Refusal(500)),
    ],
)
def test_refusal_is_read_from_an_answer_or_an_event(
    status: int, body: bytes, header: str | None, refusal: Refusal
) -> None:
    assert refusal_of(status, body, header) == refusal


def test_more_lines_are_in_flight_until_some_wait() -> None:
    assert next_limit(FIRST_LIMIT, None) > FIRST_LIMIT
    assert next_limit(FIRST_LIMIT, 1) > FIRST_LIMIT
    assert next_limit(FIRST_LIMIT, 3) == FIRST_LIMIT
    assert next_limit(FIRST_LIMIT, 9) == FIRST_LIMIT - 1
    assert next_limit(1, 9) == 1
    assert next_limit(64, None, most=64) == 64
    assert limit_after_refusal(6.0) == 3.0
    assert limit_after_refusal(1.5) == 1.0


@pytest.mark.parametrize(
    ("window", "now", "opens_in"),
    [
        ("22:00-07:00", "23:30", 0),
        ("22:00-07:00", "06:59", 0),
        ("22:00-07:00", "07:00", 15),
        ("22:00-07:00", "21:00", 1),
        ("09:00-17:00", "12:00", 0),
        ("09:00-17:00", "08:00", 1),
        ("09:00-17:00", "17:00", 16),
        ("09:00-09:00", "03:00", 0),
        ("00:00 - 06:00", "12:00", 12),
    ],
)
def test_window_says_when_it_opens(window: str, now: str, opens_in: int) -> None:
    at = datetime.fromisoformat(f"2026-03-01T{now}:00").replace(tzinfo=UTC)
    assert read_window(window).opens_in(at) == timedelta(hours=opens_in)


@pytest.mark.parametrize("text", ["", "22-07", "24:00-07:00", "22:00-07:60", "22:00"])
def test_invalid_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time range"):
        read_window(text)


def chat(system: str, user: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return json.dumps({"messages": messages}).encode()


def test_prompts_with_the_same_beginning_are_neighbours() -> None:
    bodies = [chat("A" * 3000, "1"), chat("B" * 3000, "1"), chat("A" * 3000, "2"), chat("B" * 3000, "2")]
    ordered = sorted(bodies, key=prefix_key)
    systems = [json.loads(body)["messages"][0]["content"][0] for body in ordered]
    assert systems in (["A", "A", "B", "B"], ["B", "B", "A", "A"])


def test_body_without_a_prompt_has_no_key() -> None:
    assert prefix_key(b"{}") == b""
