"""The result of a tuning as JSON, as text, and as a picture."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes, Conditions, Kept
from llamasup.features.tuning.candidates import Candidate
from llamasup.features.tuning.report import (
    SessionResult,
    kept_as_json,
    kept_line,
    picture,
    report_as_json,
    report_lines,
)
from llamasup.features.tuning.search import Screen, Search, begin, failed, next_step, observed
from llamasup.features.tuning.workload import Measurement

ONE = Candidate("threads", Changes((("--threads", "1"),)), "waits less")
TWO = Candidate("spin", Changes(env=(("GOMP_SPINCOUNT", "300"),)), "sleeps sooner")
BAD = Candidate("load", Changes((("--no-mmap", None),)), "larger <pages>")
SPEED = Measurement(1.0, 0.1, 20.0, 1 << 20)
MEASURED_ON = Conditions("build", "machine", "asked", "files", "defaults")
KEPT = Kept(MEASURED_ON, "latency", None, ONE.changes, 1.18, 1.11, 1.24, "2026-11-26", 50, 3.0)


def search(*, ends: bool = True) -> Search:
    found = failed(begin([BAD, ONE, TWO]), BAD, "it ended with <SIGSEGV>")
    while isinstance(step := next_step(found), Screen):
        found = observed(found, step.candidate, [0.2 if step.candidate == ONE else 0.15] * step.pairs)
    for _ in range(9 if ends else 2):
        found = observed(found, found.proofs[0].candidate, [0.2])
    return found


def result_of(found: Search, **changes: Any) -> SessionResult:
    made = SessionResult(found, True, KEPT, SPEED, SPEED, 3.0, None)
    return replace(made, **changes)


def as_json(found: SessionResult) -> dict[str, Any]:
    return report_as_json(found, model="/m.gguf", purpose="latency", profile=None)


def test_the_json_says_what_was_taken_and_how_much_better_it_is() -> None:
    shown = as_json(result_of(search()))
    assert shown["taken"] == {"--threads": "1"}
    assert (shown["gain"], shown["lower"], shown["upper"]) == (1.18, 1.11, 1.24)
    assert shown["trials"] > 9
    assert [one["state"] for one in shown["candidates"]] == ["failed", "open", "open", "open"]
    assert shown["candidates"][0]["gain"] is None


@pytest.mark.parametrize("kept", [None, replace(KEPT, changes=NO_CHANGES)])
def test_the_json_of_no_gain_has_no_numbers(kept: Kept | None) -> None:
    shown = as_json(result_of(begin([]), kept=kept, finished=kept is not None, drift=1.23456))
    assert (shown["taken"], shown["gain"], shown["lower"], shown["upper"]) == (None, None, None, None)
    assert shown["tuned"] is None
    assert shown["drift"] == 1.235


def test_the_text_names_the_change_with_its_bounds() -> None:
    lines = report_lines(result_of(search()))
    why = "measured here on 2026-11-26: 1.18 ×, 95 % 1.11 to 1.24"
    assert lines[0] == f"Taken: --threads 1: at least 1.11 ×, {why}"
    assert "Nothing" in report_lines(result_of(search(), kept=replace(KEPT, changes=NO_CHANGES)))[0]
    unfinished = result_of(search(), kept=None, finished=False)
    assert report_lines(unfinished)[0].startswith("The time is up before a verdict")
    stopped = replace(unfinished, stopped="The machine was suspended during 20 measurements")
    assert report_lines(stopped)[0].startswith("The machine was suspended during 20 measurements before")
    assert "continues" in report_lines(stopped)[0]


def test_a_drift_is_reported() -> None:
    assert "1.30 ×" in report_lines(result_of(search(), drift=1.3))[-1]


def test_a_kept_result_shows_whether_answers_may_differ() -> None:
    assert "differ" in kept_line(replace(KEPT, lossy=True))
    assert kept_line(replace(KEPT, changes=NO_CHANGES)) == "nothing was better (50 pairs, 2026-11-26)"
    assert kept_as_json(KEPT)["gain"] == 1.18
    assert kept_as_json(replace(KEPT, changes=NO_CHANGES))["gain"] is None


@pytest.mark.parametrize("found", [search(), search(ends=False), begin([]), begin([ONE])])
def test_the_picture_is_valid_and_names_each_candidate(found: Search) -> None:
    drawn = picture(found, "a <model>")
    root = ElementTree.fromstring(drawn)  # noqa: S314 - our own text
    text = " ".join(root.itertext())
    assert "a <model>" in text
    for entry in found.entries:
        assert entry.name in text


def test_the_picture_shows_what_was_taken() -> None:
    assert "taken" in picture(search(), "model")
    assert "taken" not in picture(search(ends=False), "model")


@pytest.mark.parametrize(
    ("ratio", "labels"),
    [
        (1e9, ["0.25 ×", "0.5 ×", "0.67 ×", "0.83 ×", "1 ×", "1.2 ×", "1.5 ×", "2 ×", "4 ×"]),
        (1.5, ["0.67 ×", "0.83 ×", "1 ×", "1.2 ×", "1.5 ×"]),
        (1.01, ["1 ×"]),
    ],
)
def test_axis_of_the_picture_reaches_as_far_as_the_ratios(ratio: float, labels: list[str]) -> None:
    drawn = picture(observed(begin([ONE]), ONE, [math.log(ratio)]), "model")
    assert re.findall(r'text-anchor="middle">([^<]+)<', drawn) == labels


def test_an_enormous_ratio_stays_in_the_picture() -> None:
    wild = observed(begin([ONE]), ONE, [math.log(1e9), 0.1, math.log(1e-9)])
    long = Candidate("x", Changes((("--override-tensor", "x" * 100),)), "long")
    drawn = picture(replace(wild, entries=(*wild.entries, *begin([long]).entries)), "model")
    assert "…" in drawn
