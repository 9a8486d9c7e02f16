"""A flood of refused requests, and of errors that requests cause, is a few lines and a count."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from llamasup.cli.output import refusals, view
from llamasup.cli.output.console import Narrator
from llamasup.cli.output.refusals import Refusals
from llamasup.cli.output.repeats import BURST
from llamasup.cli.output.view import View, ViewHandler
from llamasup.supervision.events import Stopped
from tests.cli.test_narrator import Heard, Terminal
from tests.observability.test_metrics import DONE

pytestmark = pytest.mark.anyio

REFUSED = msgspec.structs.replace(DONE, status=401, outcome="refused", path="/" + "x" * 9000)


class Awaited(Heard):
    """And an event for the first count."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = asyncio.Event()

    def say(self, level: str, event: str, text: str, **fields: Any) -> None:
        super().say(level, event, text, **fields)
        if event == "requests_left_out":
            self.counted.set()


async def test_the_first_refusals_are_shown_at_once_and_the_others_counted_by_kind() -> None:
    heard = Awaited()
    narrator = Narrator(cast("View", heard), cast("Any", SimpleNamespace(launch=object())), 0.0)
    for _ in range(4_211 + BURST):
        narrator.request(REFUSED)
        narrator.request(msgspec.structs.replace(REFUSED, status=503, outcome="unavailable"))
    assert [fields["status"] for _, _, _, fields in heard.told] == [401, 503] * BURST
    async with asyncio.timeout(60):
        await heard.counted.wait()
    level, _, text, fields = heard.told[2 * BURST]
    assert (level, text) == ("info", "… and 4,211 more with status 401 (refused) in the last second")
    assert fields == {"status": 401, "outcome": "refused", "left_out": 4_211}
    assert sum(len(text) for _, _, text, _ in heard.told) < 2 * BURST * 700


async def test_a_path_is_shown_as_in_the_access_log() -> None:
    heard = Heard()
    narrator = Narrator(cast("View", heard), cast("Any", SimpleNamespace(launch=object())), 0.0)
    narrator.request(msgspec.structs.replace(REFUSED, path="/\x1b[2J" + "y" * 9000))
    ((_, _, text, fields),) = heard.told
    assert fields["path"].startswith("/%1B[2Jyyy")
    assert fields["path"].endswith("…")
    assert len(fields["path"]) == 513
    assert fields["path"] in text


async def test_what_was_counted_is_said_at_the_end() -> None:
    heard = Terminal()
    narrator = Narrator(cast("View", heard), cast("Any", SimpleNamespace(launch=object())), 0.0)
    for _ in range(BURST + 3):
        narrator.request(REFUSED)
    narrator.notice(Stopped())
    assert [event for _, event, _, _ in heard.told[BURST:]] == ["requests_left_out", "stopped"]
    assert heard.told[BURST][3]["left_out"] == 3


async def test_a_flood_that_goes_on_is_said_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(refusals, "monotonic", lambda: now_s)
    heard = Heard()
    shown = Refusals(cast("View", heard))
    for _ in range(10):
        for _ in range(1_000):
            shown.shows(REFUSED)
        now_s += 1.0
        shown.close()  # in the place of its timer
    assert [fields["left_out"] for _, _, _, fields in heard.told] == [1_000 - BURST] + [1_000] * 9


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
async def test_requests_that_need_no_key_are_counted_also_if_llama_server_answers(
    method: str, status: int, outcome: str
) -> None:
    heard = Heard()
    shown = Refusals(cast("View", heard))
    record = msgspec.structs.replace(DONE, method=method, status=status, outcome=outcome)
    assert sum(shown.shows(record) for _ in range(1_000)) == BURST
    shown.close()
    ((level, _, text, fields),) = heard.told
    assert fields == {"status": status, "outcome": outcome, "left_out": 1_000 - BURST}
    assert level == ("warning" if status >= 500 else "info")
    assert "(ok)" not in text


async def test_lines_of_the_debug_level_are_not_counted() -> None:
    shown = Refusals(cast("View", Heard()))
    assert all(shown.shows(msgspec.structs.replace(REFUSED, outcome="local")) for _ in range(100))
    model_list = msgspec.structs.replace(DONE, method="GET", model="")
    assert all(shown.shows(model_list) for _ in range(100))


async def test_answered_requests_are_all_shown() -> None:
    shown = Refusals(cast("View", Heard()))
    assert all(shown.shows(DONE) for _ in range(100))


def log(handler: ViewHandler, name: str, times: int) -> None:
    for number in range(times):
        handler.handle(logging.LogRecord(name, logging.ERROR, "x.py", 7, "failed %d", (number,), None))


def test_errors_that_requests_cause_are_counted_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(threading.Timer, "start", lambda _: None)
    heard = Heard()
    handler = ViewHandler(cast("View", heard))
    log(handler, "llamasup.proxy", 1_000)
    assert [text for _, _, text, _ in heard.told] == [f"failed {n}" for n in range(BURST)]
    handler.close()  # in the place of its timer
    assert heard.told[-1][2] == f"failed {BURST} ({1_000 - BURST} like it in the last second)"
    log(handler, "llamasup.proxy", 1_000)
    handler.close()
    assert heard.told[-1][2] == "failed 0 (1,000 like it in the last second)"
    assert len(heard.told) == BURST + 2
    log(handler, "llamasup.models", 50)
    assert len(heard.told) == BURST + 52


def test_the_count_of_errors_is_said_also_if_no_error_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: 100.0))  # all within a second
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(view, "threading", SimpleNamespace(Timer=Timer))
    heard = Heard()
    handler = ViewHandler(cast("View", heard))
    log(handler, "llamasup.proxy", BURST)
    assert timers == []  # while nothing is left out
    log(handler, "llamasup.proxy", 2)
    (timer,) = timers
    assert (timer.interval, timer.daemon) == (1.0, True)
    timer.function(*timer.args)
    assert heard.told[BURST:] == [
        ("error", "log", "failed 0 (2 like it in the last second)", heard.told[-1][3])
    ]
