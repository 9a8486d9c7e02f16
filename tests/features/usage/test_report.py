"""The arguments of a report, and its formats."""

from __future__ import annotations

from datetime import date

import pytest

from llamasup.errors import UsageInvalid
from llamasup.features.usage.ledger import Group, Sums
from llamasup.features.usage.report import COLUMNS, csv_text, not_counted, read_by, read_since, report

TODAY = date(2026, 3, 10)
ROWS = [
    (Group("2026-03-09", "b", "phone"), Sums(2, 1, 20, 8, 10, slot_us=1_500_000)),
    (Group("2026-03-10", "a", ""), Sums(1, 0, 5, 0, 4, 6, 1, 500_000, energy_uj=2_500_000)),
    (Group("2026-03-10", "b", ""), Sums(3, 0, 30, 0, 15, slot_us=250_000)),
]


def test_groups_are_model_key_day_or_several_of_them() -> None:
    assert read_by("model") == ("model",)
    assert read_by("day,key,day") == ("day", "key")


@pytest.mark.parametrize("text", ["", "week", "model,", "Model", "x" * 100])
def test_unknown_group_is_an_error_that_names_the_groups(text: str) -> None:
    with pytest.raises(UsageInvalid) as caught:
        read_by(text)
    assert "model, key or day" in caught.value.remedy
    assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("2026-03-01", date(2026, 3, 1)),
        ("2026-03-10", TODAY),
        ("0d", TODAY),
        ("7d", date(2026, 3, 3)),
    ],
)
def test_since_is_a_day_or_a_number_of_days(text: str, day: date) -> None:
    assert read_since(text, TODAY) == day


@pytest.mark.parametrize(
    ("text", "today", "why"),
    [
        *(
            (text, TODAY, f"{text[:40]!r} is not a valid day")
            for text in ("", "yesterday", "2026-02-30", "7")
        ),
        *(
            (text, TODAY, "is not a valid day")
            for text in ("2026-3-1", "20260301", "-1d", "1.5d", "99999999d")
        ),
        ("٧d", TODAY, "is not a valid day"),
        ("99999d", date(100, 1, 1), "'99999d' is not a valid day"),  # before the calendar
        ("2026-03-11", TODAY, "future"),
    ],
)
def test_invalid_since_is_an_error_that_says_what_is_valid(text: str, today: date, why: str) -> None:
    with pytest.raises(UsageInvalid, match=why) as caught:
        read_since(text, today)
    assert str(today) in caught.value.remedy or why == "future"


def test_report_has_a_sorted_row_for_each_group() -> None:
    shown = report(ROWS, ("model",), None, file="/f", problem=None)
    assert shown == {
        "by": ["model"],
        "since": None,
        "file": "/f",
        "problem": None,
        "rows": [
            {"model": "a", **dict(zip(COLUMNS, (1, 0, 5, 0, 4, 6, 1, 0.5, 2.5), strict=True))},
            {"model": "b", **dict(zip(COLUMNS, (5, 1, 50, 8, 25, 0, 0, 1.75, None), strict=True))},
        ],
    }


def test_report_says_since_when_and_what_is_wrong() -> None:
    shown = report(ROWS[1:], ("day", "key"), TODAY, file=None, problem="disk full")
    assert [(row["day"], row["key"], row["requests"]) for row in shown["rows"]] == [("2026-03-10", "", 4)]
    assert (shown["since"], shown["problem"]) == ("2026-03-10", "disk full")


def test_every_grouping_has_the_same_total() -> None:
    for by in (("model",), ("key",), ("day",), ("day", "model", "key")):
        rows = report(ROWS, by, None, file=None, problem=None)["rows"]
        assert sum(row["slot_s"] for row in rows) == 2.25
        assert sum(row["requests"] for row in rows) == 6


def test_csv_has_a_header_and_a_line_for_each_row() -> None:
    text = csv_text(report(ROWS, ("day", "model"), None, file=None, problem=None))
    assert text.splitlines() == [
        "day,model,requests,errors,tokens_prompt,tokens_cached,tokens_completion,"
        "tokens_estimated,unreported,slot_s,energy_j",
        "2026-03-09,b,2,1,20,8,10,0,0,1.5,",
        "2026-03-10,a,1,0,5,0,4,6,1,0.5,2.5",
        "2026-03-10,b,3,0,30,0,15,0,0,0.25,",
    ]


def test_csv_of_no_rows_is_the_header() -> None:
    assert csv_text(report([], ("key",), None, file=None, problem=None)).count("\r\n") == 1


@pytest.mark.parametrize(
    ("name", "cell"), [("=1+2", "'=1+2"), ("@x", "'@x"), ("a,b", '"a,b"'), ('a"b', '"a""b"')]
)
def test_name_in_csv_is_quoted_and_no_formula(name: str, cell: str) -> None:
    rows = [(Group("2026-03-10", name, ""), Sums(1))]
    text = csv_text(report(rows, ("model",), None, file=None, problem=None))
    assert text.splitlines()[1].startswith(f"{cell},1,")


def test_llamasup_that_counts_nothing_says_so() -> None:
    shown = not_counted("key,day", "7d", TODAY)
    assert (shown["by"], shown["since"], shown["rows"]) == (["key", "day"], "2026-03-03", [])
    assert "--no-usage" in shown["problem"]
    assert not_counted("model", None, TODAY)["since"] is None
    with pytest.raises(UsageInvalid):
        not_counted("week", None, TODAY)
