"""The screen of ``llamasup top``, what its keys do, and a llamasup that no longer answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from llamasup.cli.commands.top import (
    SORTS,
    Row,
    Screen,
    _Top,
    ended_table,
    log_lines,
    press,
    requests_table,
    rows_of,
    shown_lines,
    sorted_requests,
)
from llamasup.core.system.text import display_width
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping


def model(name: str) -> dict[str, Any]:
    return {"id": name, "state": "ready", "slots": 4, "slots_busy": 1, "restarts": 0, "ctx_size": 4096}


def request(request_id: str, **changes: Any) -> dict[str, Any]:
    usual = {
        "id": request_id,
        "model": "tiny",
        "key": None,
        "client": "127.0.0.1",
        "path": "/v1/chat/completions",
        "phase": "generating",
        "age_s": 2.5,
        "tokens_prompt": 100,
        "tokens_completion": 20,
        "tokens_per_s": 8.0,
    }
    return {**usual, **changes}


ENDED = {
    "request_id": "old",
    "model": "tiny",
    "client": "key:phone",
    "status": 200,
    "outcome": "ok",
    "duration_s": 1.5,
    "tokens_prompt": 9,
    "tokens_completion": 8,
    "tokens_per_s": 7.0,
    "path": "/completion",
}
STATUS = {"version": "1.0", "url": "http://127.0.0.1:8080", "uptime_s": 61, "models": [model("tiny")]}
ROWS = (Row("tiny"), Row("tiny", "a"), Row("tiny", "b"))


def texts(screen: Screen, requests: dict[str, Any], *, columns: int = 120, lines: int = 24) -> list[str]:
    return [line.text for line in shown_lines(screen, STATUS, requests, columns=columns, lines=lines)]


def test_screen_shows_models_requests_and_finished_ones() -> None:
    shown = texts(Screen(), {"live": [request("a")], "ended": [ENDED]})
    assert shown[0].startswith("llamasup 1.0 at http://127.0.0.1:8080, up 1 min 1 s · 1 request in flight")
    assert any(line.startswith("tiny  ready") for line in shown)
    assert any(line.split()[:5] == ["a", "tiny", "127.0.0.1", "generating", "2.5"] for line in shown)
    assert any(line.split()[:5] == ["old", "tiny", "phone", "200", "ok"] for line in shown)
    assert "q quit" in shown[-1]


def test_screen_without_requests_says_so() -> None:
    assert "No request is in flight." in texts(Screen(), {"live": [], "ended": []})


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("lines", [6, 10, 24, 100])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_screen_fits_into_the_terminal(columns: int, lines: int, count: int) -> None:
    requests = {"live": [request(f"r{number}") for number in range(count)], "ended": [ENDED] * 20}
    shown = texts(Screen(chosen=Row("tiny", "r250")), requests, columns=columns, lines=lines)
    assert len(shown) == lines
    assert max(map(display_width, shown)) <= columns


def test_chosen_row_stays_on_the_screen() -> None:
    requests = {"live": [request(f"r{number}") for number in range(300)], "ended": []}
    chosen = Screen(chosen=Row("tiny", "r250"))
    shown = shown_lines(chosen, STATUS, requests, columns=120, lines=24)
    assert [line.text.split()[0] for line in shown if line.style == "chosen"] == ["r250"]


def test_names_cannot_change_the_terminal() -> None:
    shown = texts(
        Screen(), {"live": [request("\x1b[2J", model="<b>\x07", path="/\x1b]0;x\x07")], "ended": []}
    )
    assert not any(ord(letter) < 32 for line in shown for letter in line)


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"phase": "queued", "position": 2, "expected_wait_s": 12.0}, "queued #2, about 12.0 s"),
        ({"phase": "loading", "position": 1, "expected_wait_s": None}, "loading #1"),
        ({"phase": "loading", "position": 1, "percent": 43.2, "eta_s": 12.3}, "loading 43 %, 12 s left"),
        ({"phase": "prompt", "percent": 44.6}, "prompt 45 %"),
        ({"phase": "sending"}, "sending"),
    ],
)
def test_phase_in_words(changes: dict[str, Any], phase: str) -> None:
    assert f"  {phase}  " in requests_table([request("a", **changes)])


def test_unknown_numbers_are_dashes() -> None:
    unknown = {"tokens_prompt": None, "tokens_completion": None, "tokens_per_s": None, "model": None}
    assert requests_table([request("a", **unknown)]).splitlines()[1].split()[-4:-1] == ["-", "-", "-"]
    assert ended_table([{**ENDED, "client": None}]).splitlines()[1].split()[2] == "-"


def test_every_order_sorts() -> None:
    old = request("old", age_s=9.0, tokens_completion=1, tokens_per_s=1.0, model="b", key="z")
    new = request("new", age_s=1.0, tokens_completion=5, tokens_per_s=9.0, model="a", key="y")
    first = {by: sorted_requests([old, new], by)[0]["id"] for by in SORTS}
    assert first == {"age": "old", "tokens": "new", "speed": "new", "model": "new", "client": "new"}


# --- other nodes


def test_models_and_requests_of_other_nodes_have_a_column() -> None:
    models = [model("tiny"), {**model("tiny"), "node": "desk"}, {**model("other"), "node": "\x1b[2J"}]
    requests = {"live": [request("a", node="desk"), request("b", node=None)], "ended": []}
    shown = shown_lines(Screen(), {**STATUS, "models": models}, requests, columns=120, lines=24)
    nodes = [line.text.split()[1] for line in shown if line.text.startswith(("NAME", "tiny", "other"))]
    assert nodes[:3] == ["NODE", "-", "desk"]
    assert "\x1b" not in nodes[3]
    works = [line.text.split()[1] for line in shown if line.text.startswith(("REQUEST", "a ", "b "))]
    assert works == ["NODE", "desk", "-"]


def test_same_model_on_two_nodes_is_two_rows() -> None:
    status = {**STATUS, "models": [model("tiny"), {**model("tiny"), "node": "desk"}]}
    rows = rows_of(status, [])
    screen, _ = press(press(Screen(), "down", rows)[0], "down", rows)
    assert screen.chosen == Row("tiny", node="desk")
    shown = shown_lines(screen, status, {"live": [], "ended": []}, columns=120, lines=24)
    assert [line.text.split()[1] for line in shown if line.style == "chosen"] == ["desk"]
    screen, _ = press(screen, "l", rows)
    assert (screen.log_of, "the node desk" in screen.message) == ("", True)


def test_log_of_a_node_of_a_fleet_is_in_the_log_of_ray() -> None:
    row = Row("tiny", node="tiny@x1")
    screen, _ = press(Screen(chosen=row), "l", [row])
    assert "tiny@x1 is in Ray's log" in screen.message
    assert "--url" not in screen.message


def test_chosen_request_stays_chosen_when_it_moves_to_another_node() -> None:
    screen = Screen(chosen=Row("tiny", "a"))
    live = [request("a", node="desk")]
    rows = rows_of(STATUS, live)
    assert press(screen, "c", rows)[0].cancels == "a"
    shown = shown_lines(screen, STATUS, {"live": live, "ended": []}, columns=120, lines=24)
    assert [line.text.split()[0] for line in shown if line.style == "chosen"] == ["a"]


# --- keys


def test_arrows_move_within_the_rows() -> None:
    screen = Screen()
    for key, chosen in (("down", 0), ("j", 1), ("down", 2), ("down", 2), ("k", 1), ("up", 0), ("up", 0)):
        screen, action = press(screen, key, ROWS)
        assert (screen.chosen, action) == (ROWS[chosen], "")
    assert press(Screen(), "up", ROWS)[0].chosen == ROWS[-1]
    assert press(Screen(), "up", ())[0].chosen is None


def test_cancelling_needs_a_yes() -> None:
    screen, action = press(Screen(chosen=ROWS[1]), "c", ROWS)
    assert (screen.cancels, action) == ("a", "")
    assert "Cancel the request a?" in texts(screen, {"live": [], "ended": []})[-1]
    assert press(screen, "y", ROWS) == (Screen(chosen=ROWS[1]), "a")
    assert press(screen, "n", ROWS) == (Screen(chosen=ROWS[1]), "")


@pytest.mark.parametrize("chosen", [None, ROWS[0], Row("tiny", "gone")])
def test_only_a_chosen_request_is_cancelled(chosen: Row | None) -> None:
    screen, action = press(Screen(chosen=chosen), "c", ROWS)
    assert not action
    assert screen.message == "Choose a request with ↑ and ↓ first."
    assert screen.message in texts(screen, {"live": [], "ended": []})[-1]


def test_log_opens_and_closes() -> None:
    screen, _ = press(Screen(chosen=ROWS[2]), "l", ROWS)
    assert screen.log_of == "tiny"
    assert press(screen, "c", ROWS) == (screen, "")
    for key in ("escape", "q"):
        assert press(screen, key, ROWS) == (Screen(chosen=ROWS[2]), "")
    assert press(Screen(), "l", ROWS)[0].message


def test_log_shows_its_end_without_control_characters() -> None:
    shown = log_lines("tiny", [f"line {number}\x1b[31m" for number in range(50)], columns=40, lines=10)
    assert len(shown) == 10
    assert shown[-2].text.startswith("line 49")
    assert "\x1b" not in "".join(line.text for line in shown)


@pytest.mark.parametrize("lines", [1, 2, 3, 4])
def test_log_fits_into_a_low_terminal(lines: int) -> None:
    assert len(log_lines("tiny", ["one", "two", "three"], columns=40, lines=lines)) == lines


def test_arrows_move_past_requests_with_the_same_id() -> None:
    rows = rows_of(
        STATUS, [request("same"), request("same"), request("same", model="other"), request("last")]
    )
    screen = Screen()
    for row in rows:
        screen, _ = press(screen, "down", rows)
        assert screen.chosen == row
    assert press(Screen(chosen=rows[2]), "c", rows)[0].cancels == "same"
    requests = {"live": [request("same"), request("same")], "ended": []}
    shown = shown_lines(Screen(chosen=rows[2]), STATUS, requests, columns=120, lines=24)
    assert sum(line.style == "chosen" for line in shown) == 1


def test_sort_goes_round_and_q_quits() -> None:
    screen = Screen()
    for by in (*SORTS[1:], SORTS[0]):
        screen, _ = press(screen, "s", ROWS)
        assert screen.sort == by
    assert press(screen, "q", ROWS)[0].quits
    assert press(screen, "x", ROWS) == (screen, "")


def test_rows_are_models_then_requests() -> None:
    assert list(rows_of(STATUS, [request("a"), request("b", model=None)])) == [
        Row("tiny"), Row("tiny", "a"), Row("", "b"),
    ]  # fmt: skip


# --- a llamasup that no longer answers ---------------------------------------------------------------

SILENT, GONE, STOPS = ControlFailed("does not answer"), NotRunning("nobody listens"), Stopping("is stopping")


class Client:
    """Its answers, in turn: an error, or a status."""

    def __init__(self, *answers: LlamasupError | None) -> None:
        self._answers: Iterator[LlamasupError | None] = iter(answers)

    def status(self) -> dict[str, Any]:
        if error := next(self._answers):
            raise error
        return {"models": ()}


@pytest.mark.parametrize(
    ("first", "then", "has_ended"),
    [
        (GONE, (), True),
        (STOPS, (), True),
        (SILENT, (GONE,), True),  # the connection broke, because it ended
        (SILENT, (SILENT, STOPS), True),
        (SILENT, (None,), False),
        (SILENT, (SILENT, SILENT), False),  # suspended
    ],
)
def test_silent_llamasup_has_not_ended(
    first: LlamasupError, then: tuple[LlamasupError | None, ...], has_ended: bool
) -> None:
    assert _Top(cast("Any", Client(*then)))._has_ended(first) is has_ended
