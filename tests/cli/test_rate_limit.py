"""A flood of refused requests, and of errors that requests cause, becomes a few lines and a count."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from llamasup.cli.output import rate_limit
from llamasup.cli.output.rate_limit import (
    BURST,
    PERIOD_S,
    RateWindow,
    RequestLineLimit,
    ViewHandler,
    count_message,
    end_period,
)
from llamasup.cli.output.view import Level
from llamasup.core.supervision.events import Stopped
from tests.cli.recording_view import RecordingView, reporter_to
from tests.core.observability.test_counters import DONE

pytestmark = pytest.mark.anyio

REFUSED = msgspec.structs.replace(DONE, status=401, outcome="refused", path="/" + "x" * 9000)


class CountedView(RecordingView):
    """Sets ``counted`` with the counts of two kinds, which come in any order."""

    counted: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    counts: dict[int, tuple[str, str, dict[str, Any]]] = msgspec.field(default_factory=dict)

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        super().say(level, event, text, **fields)
        if event == "requests_left_out":
            self.counts[fields["status"]] = level, text, fields
            if len(self.counts) == 2:
                self.counted.set()


# --- one kind of message -------------------------------------------------------------------------------


def shown_of(window: RateWindow | None, times: list[float]) -> tuple[RateWindow, list[bool]]:
    shown = []
    for now_s in times:
        window, is_shown = count_message(window, now_s)
        shown.append(is_shown)
    assert window is not None
    return window, shown


def test_first_messages_are_shown_and_others_counted() -> None:
    window, shown = shown_of(None, [10.0 + n / 1000 for n in range(500)])
    assert shown == [True] * BURST + [False] * (500 - BURST)
    assert window == RateWindow(10.0 + PERIOD_S, BURST, 500 - BURST)


def test_first_message_after_quiet_period_is_shown() -> None:
    window, _ = end_period(shown_of(None, [0.0] * 100)[0], PERIOD_S)
    assert shown_of(window, [2 * PERIOD_S + 0.1])[1] == [True]


def test_messages_with_pauses_are_all_shown() -> None:
    assert all(shown_of(None, [n * PERIOD_S for n in range(50)])[1])


def test_messages_are_counted_until_their_count_is_shown() -> None:
    """The timer may be late on a busy machine."""
    window, shown = shown_of(None, [0.0] * (BURST + 1) + [100.0])
    assert not shown[-1]
    assert window.left_out == 2


# --- requests ------------------------------------------------------------------------------------------


async def test_first_refusals_are_shown_and_others_counted_by_kind() -> None:
    view = CountedView()
    reporter = reporter_to(view)
    for _ in range(4_211 + BURST):
        reporter.request(REFUSED)
        reporter.request(msgspec.structs.replace(REFUSED, status=503, outcome="unavailable"))
    assert [fields["status"] for _, _, _, fields in view.lines] == [401, 503] * BURST
    async with asyncio.timeout(60):
        await view.counted.wait()
    level, text, fields = view.counts[401]
    assert (level, text) == ("info", "… and 4,211 more with status 401 (refused) in the last second")
    assert fields == {"status": 401, "outcome": "refused", "left_out": 4_211}
    assert sum(len(text) for _, _, text, _ in view.lines) < 2 * BURST * 700


async def test_path_is_shown_as_in_access_log() -> None:
    view = RecordingView()
    reporter = reporter_to(view)
    reporter.request(msgspec.structs.replace(REFUSED, path="/\x1b[2J" + "y" * 9000))
    ((_, _, text, fields),) = view.lines
    assert fields["path"].startswith("/%1B[2Jyyy")
    assert fields["path"].endswith("…")
    assert len(fields["path"]) == 513
    assert fields["path"] in text


async def test_pending_counts_are_shown_at_stop() -> None:
    view = RecordingView()
    reporter = reporter_to(view)
    for _ in range(BURST + 3):
        reporter.request(REFUSED)
    reporter.on_event(Stopped())
    assert [event for _, event, _, _ in view.lines[BURST:]] == ["requests_left_out", "stopped"]
    assert view.lines[BURST][3]["left_out"] == 3


async def test_continuing_flood_shows_one_count_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(rate_limit, "monotonic", lambda: now_s)
    view = RecordingView()
    limit = RequestLineLimit(view)
    for _ in range(10):
        for _ in range(1_000):
            limit.shows(REFUSED)
        now_s += 1.0
        limit.close()  # in place of its timer
    assert [fields["left_out"] for _, _, _, fields in view.lines] == [1_000 - BURST] + [1_000] * 9


@pytest.mark.parametrize(
    ("method", "status", "outcome"),
    [
        ("POST", 401, "ok"),
        ("POST", 403, "ok"),
        ("GET", 404, "ok"),
        ("GET", 200, "ok"),
        ("OPTIONS", 200, "ok"),
        ("POST", 499, "client_gone"),
        ("POST", 502, "upstream_failed"),
        ("POST", 408, "timed_out"),
    ],
)
async def test_requests_that_need_no_key_are_limited_even_if_llama_server_answers(
    method: str, status: int, outcome: str
) -> None:
    view = RecordingView()
    limit = RequestLineLimit(view)
    record = msgspec.structs.replace(DONE, method=method, status=status, outcome=outcome)
    assert sum(limit.shows(record) for _ in range(1_000)) == BURST
    limit.close()
    ((level, _, text, fields),) = view.lines
    assert fields == {"status": status, "outcome": outcome, "left_out": 1_000 - BURST}
    assert level == ("warning" if status >= 500 else "info")
    assert "(ok)" not in text


async def test_lines_of_debug_level_are_not_limited() -> None:
    limit = RequestLineLimit(RecordingView())
    assert all(limit.shows(msgspec.structs.replace(REFUSED, outcome="local")) for _ in range(100))
    model_list = msgspec.structs.replace(DONE, method="GET", model="")
    assert all(limit.shows(model_list) for _ in range(100))


async def test_answered_requests_are_not_limited() -> None:
    limit = RequestLineLimit(RecordingView())
    assert all(limit.shows(DONE) for _ in range(100))


# --- log records ---------------------------------------------------------------------------------------


def log(handler: ViewHandler, name: str, times: int) -> None:
    for number in range(times):
        handler.handle(logging.LogRecord(name, logging.ERROR, "x.py", 7, "failed %d", (number,), None))


def test_errors_that_requests_cause_are_limited_by_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(rate_limit, "monotonic", lambda: now_s)
    monkeypatch.setattr(threading.Timer, "start", lambda _: None)
    view = RecordingView()
    handler = ViewHandler(view)
    log(handler, "llamasup.proxy", 1_000)
    assert [text for _, _, text, _ in view.lines] == [f"failed {n}" for n in range(BURST)]
    handler.close()  # in place of its timer
    assert view.lines[-1][2] == f"failed {BURST} ({1_000 - BURST} like it in the last second)"
    log(handler, "llamasup.proxy", 1_000)
    handler.close()
    assert view.lines[-1][2] == "failed 0 (1,000 like it in the last second)"
    assert len(view.lines) == BURST + 2
    log(handler, "llamasup.models", 50)
    assert len(view.lines) == BURST + 52


def test_timer_shows_count_of_errors_without_further_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "monotonic", lambda: 100.0)  # all within a second
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(rate_limit, "threading", SimpleNamespace(Timer=Timer))
    view = RecordingView()
    handler = ViewHandler(view)
    log(handler, "llamasup.proxy", BURST)
    assert timers == []  # while nothing is left out
    log(handler, "llamasup.proxy", 2)
    (timer,) = timers
    assert (timer.interval, timer.daemon) == (1.0, True)
    timer.function(*timer.args)
    assert view.lines[BURST:] == [
        ("error", "log", "failed 0 (2 like it in the last second)", view.lines[-1][3])
    ]
