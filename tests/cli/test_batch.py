"""``llamasup batch run``: in which order it does what, and how it reports what goes wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import llamasup.features.batch.job as job_module
from llamasup.cli.commands import batch as command
from llamasup.cli.output import batch_view
from llamasup.features.batch.index import BatchInvalid
from llamasup.features.batch.job import find_job, runner_of, status_of

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LLAMASUP_URL", raising=False)
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}')
    return path


def run(source: Path, **options: Any) -> int:
    """The exit code of the command with these options."""
    output = source.with_name("out.jsonl")
    unset = {"template": None, "pid": None, "url": None, "only_between": None}
    return int(command.run(source, None, output=output, **{**unset, **options}))


def test_batch_is_listed_and_can_be_cancelled_while_its_input_is_read(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(job: job_module.Job, *_: Any) -> Any:
        job.index_path.touch()
        seen.append((status_of(find_job(job.id))["state"], runner_of(job)))
        raise BatchInvalid("The input has mistakes.")

    seen: list[tuple[str, int | None]] = []
    monkeypatch.setattr(job_module, "prepare", prepare)
    assert run(source) == 65
    assert seen == [("running", os.getpid())]


@pytest.mark.parametrize(
    "options",
    [
        {"only_between": "night"},
        {"template": "none"},
        {"endpoint": "/x"},
        {"url": "http://[::1"},
        {"url": "ftp://x"},
        {"url": "h:65536"},
        {"url": "h:port"},
        {"url": "ann:secret@h"},
        {"url": "h", "pid": 1},
    ],
)
def test_each_error_is_an_event_for_programs(source: Path, options: dict[str, Any], capfd: Captured) -> None:
    assert run(source, json=True, **options) == 2
    [event] = map(json.loads, capfd.readouterr().out.splitlines())
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert "secret" not in event["message"]


def test_bar_ends_with_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(batch_view.BatchBar, "close", lambda self: ended.append(self._bar.stop() is None))
    assert run(source, only_between="night") == 2
    assert ended == [True]
