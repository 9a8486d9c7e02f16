"""``llamasup usage``: the usage of the file or of a running llamasup, in four formats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.control.client import ControlAddress
from llamasup.features.usage import command
from llamasup.features.usage.command import usage_table
from llamasup.features.usage.ledger import Group, Sums
from llamasup.features.usage.store import save, usage_file
from tests.core.control.fake import FakeControlTarget, served
from tests.features.usage.records import counting

Captured = pytest.CaptureFixture[str]


def usage(**options: Any) -> int:
    """The exit code of the command with these options."""
    unset = {"by": "model", "since": None, "pid": None, "url": None, "api_key_file": None}
    return int(command.usage(None, **{**unset, **options}))


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMASUP_URL", raising=False)


def saved() -> Path:
    path = usage_file()
    save(
        path,
        [
            (Group("2026-03-01", "tiny", ""), Sums(1234, 5, 90_000, 40_000, 7_000, slot_us=5_400_000_000)),
            (Group("2026-03-02", "tiny", "phone"), Sums(1, 0, 10, 0, 5, 12, 1, 250_000)),
        ],
    )
    return path


def test_table_of_the_file_has_a_row_for_each_group(capfd: Captured) -> None:
    saved()
    assert usage(by="key") == 0
    assert [line.split() for line in capfd.readouterr().out.splitlines()] == [
        ["KEY", "REQUESTS", "ERRORS", "PROMPT", "CACHED", "COMPLETION", "SLOT", "TIME"],
        ["-", "1,234", "5", "90,000", "40,000", "7,000", "1.5", "h"],
        ["phone", "1", "0", "10", "0", "5", "+12", "est.", "0.2", "s"],
    ]


def test_json_is_the_object_of_the_contract(capfd: Captured) -> None:
    path = saved()
    assert usage(since="2026-03-02", json=True) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["by"], shown["since"], shown["file"]) == (["model"], "2026-03-02", str(path))
    [row] = shown["rows"]
    assert (row["model"], row["requests"], row["tokens_completion"]) == ("tiny", 1, 5)


def test_csv_has_a_header(capfd: Captured) -> None:
    saved()
    assert usage(by="day,key", csv=True) == 0
    header, *rows = capfd.readouterr().out.splitlines()
    assert header.startswith("day,key,requests,")
    assert [row[:21] for row in rows] == ["2026-03-01,,1234,5,90", "2026-03-02,phone,1,0,"]


def test_without_a_file_there_is_no_usage_yet(capfd: Captured) -> None:
    assert usage() == 0
    assert "There is no usage yet." in capfd.readouterr().err
    assert usage(since="3d") == 0
    assert "There is no usage." in capfd.readouterr().err
    assert usage(json=True) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == []
    assert not usage_file().exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "week"}, "'week' is not a valid grouping"),
        ({"since": "soon"}, "'soon' is not a valid day"),
        ({"since": "2999-01-01"}, "is in the future"),
        ({"json": True, "csv": True}, "--json and --csv exclude each other."),
    ],
)
def test_invalid_option_is_an_error_with_a_remedy(
    options: dict[str, Any], message: str, capfd: Captured
) -> None:
    assert usage(**options) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert "→" in printed.err
    assert printed.out == ""


def test_key_file_without_an_address_is_an_error(capfd: Captured, tmp_path: Path) -> None:
    assert usage(api_key_file=tmp_path / "key") == 2
    assert "--api-key-file needs --url" in capfd.readouterr().err


def test_corrupt_file_is_an_error_and_stays(capfd: Captured) -> None:
    path = saved()
    path.write_bytes(b"This is not a database." * 100)
    assert usage() == 71
    assert "is damaged" in capfd.readouterr().err
    assert path.read_bytes().startswith(b"This is not")


def while_running(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], int], fake: FakeControlTarget
) -> int:
    """``act`` in a thread, while the command finds the llamasup with this target."""

    async def main() -> int:
        async with served(fake, folder) as (_, path):
            monkeypatch.setattr(command, "find_target", lambda **_: ControlAddress(socket=path))
            return await asyncio.to_thread(act)

    return asyncio.run(main())


def test_chosen_llamasup_is_asked_in_place_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    saved()
    fake = counting("The disk is full.")

    def act() -> int:
        return usage(pid=7, csv=True)

    assert while_running(tmp_path, monkeypatch, act, fake) == 0
    printed = capfd.readouterr()
    assert [line.split(",")[0] for line in printed.out.splitlines()] == ["model", "org/repo:q8_0", "tiny"]
    assert "The disk is full." in printed.err


def test_invalid_group_is_found_before_a_llamasup_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    fake = FakeControlTarget()

    def act() -> int:
        return usage(by="week", url="http://x")

    assert while_running(tmp_path, monkeypatch, act, fake) == 2
    assert fake.requests == []


ROW: dict[str, Any] = {
    "model": "a",
    "requests": 1,
    "errors": 0,
    "tokens_prompt": 2,
    "tokens_cached": 0,
    "tokens_completion": 3,
    "tokens_estimated": 0,
    "unreported": 0,
    "slot_s": 1.0,
    "energy_j": None,
}


def test_energy_has_a_column_if_it_was_measured() -> None:
    rows = [{**ROW, "energy_j": 1234.4}, {**ROW, "model": "b"}, {**ROW, "model": "c", "energy_j": 7.2e6}]
    lines = usage_table({"by": ["model"], "rows": rows}).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == ["ENERGY", "1,234 J", "-", "2.00 kWh"]
    assert "ENERGY" not in usage_table({"by": ["model"], "rows": [ROW]})


def test_estimated_tokens_are_shown_even_if_all_answers_reported_some() -> None:
    """An answer to several prompts may report the first one alone."""
    lines = usage_table({"by": ["model"], "rows": [{**ROW, "tokens_estimated": 9}]}).splitlines()
    assert lines[1].split() == ["a", "1", "0", "2", "0", "3", "+9", "est.", "1.0", "s"]


def test_narrow_terminal_shows_the_tokens_and_leaves_out_the_rest() -> None:
    rows = [{**ROW, "energy_j": 1.0}]
    headings = usage_table({"by": ["model"], "rows": rows}, 40).splitlines()[0].split()
    assert headings == ["MODEL", "REQUESTS", "PROMPT", "COMPLETION"]


def test_control_characters_of_a_name_are_not_printed() -> None:
    assert "\x1b" not in usage_table({"by": ["model"], "rows": [{**ROW, "model": "a\x1b[31m"}]})
