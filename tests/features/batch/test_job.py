"""The files of a batch: who runs it, and what ``list``, ``status`` and ``cancel`` find."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import llamasup.features.batch.job as job_module
from llamasup.errors import Conflict, FolderUnusable, OutputFailed, UsageInvalid
from llamasup.features.batch.index import Index
from llamasup.features.batch.job import (
    Job,
    cancel,
    job_of,
    jobs,
    locked,
    prepare,
    register,
    runner_of,
    status_of,
)

# Holds the lock of a batch until SIGTERM.
_HOLDER = """
import signal, sys, threading
import msgspec
from llamasup.features.batch.job import Job, locked
job = msgspec.json.decode(sys.argv[1], type=Job)
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, lambda *_: None)
with locked(job):
    print("locked", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def job(tmp_path: Path, own_folders: Path) -> Job:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}')
    return job_of(source, tmp_path / "out.jsonl")


@contextmanager
def held(job: Job, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Another process runs the batch."""
    text = msgspec.json.encode(job).decode()
    words = [sys.executable, "-c", _HOLDER, text, *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_only_one_process_runs_a_batch(job: Job) -> None:
    with held(job) as process:
        assert runner_of(job) == process.pid
        with pytest.raises(Conflict, match="Another process already runs"), locked(job):
            pass
        assert runner_of(job) == process.pid
        process.kill()
        process.wait()
        assert runner_of(job) is None
    with locked(job):
        assert runner_of(job) == os.getpid()
    assert runner_of(job) is None


def test_process_counts_where_files_cannot_be_locked(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, and on NFS."""
    monkeypatch.setattr(job_module, "claim_file", lambda _: None)
    with held(job), pytest.raises(Conflict), locked(job):
        pass
    with locked(job):
        assert runner_of(job) == os.getpid()


def test_lock_file_that_cannot_be_written_is_an_error(job: Job) -> None:
    job.lock_path.mkdir()
    with pytest.raises(OutputFailed, match="cannot be written"), locked(job):
        pass
    assert runner_of(job) is None


def test_cancel_ends_the_process_and_waits_for_its_end(job: Job) -> None:
    with prepare(job):
        pass
    with held(job) as process:
        assert status_of(job)["state"] == "running"
        assert cancel(job)
        assert process.wait() == -signal.SIGTERM
        assert status_of(job)["state"] == "cancelled"
        assert not cancel(job)


def test_cancel_says_that_a_process_does_not_end(job: Job) -> None:
    with prepare(job):
        pass
    with held(job, "deaf") as process, pytest.raises(Conflict, match=f"The process {process.pid}"):
        cancel(job, wait_s=0.2)
    assert status_of(job)["state"] == "stopped"


def test_looking_at_a_batch_changes_nothing(job: Job) -> None:
    register(job)
    job.index_path.touch()
    assert [one.id for one in jobs()] == [job.id]
    assert status_of(job)["state"] == "unreadable"
    assert job.index_path.stat().st_size == 0
    with held(job):
        assert status_of(job)["state"] == "running"
    job.index_path.unlink()
    with prepare(job):
        pass
    before = job.index_path.read_bytes()
    assert status_of(job)["total"] == 1
    assert job.index_path.read_bytes() == before
    with pytest.raises(OutputFailed), Index(job.index_path, readonly=True) as index:
        index.set_fact("cancelled", 1)


def test_batch_without_lines_is_not_completed(job: Job) -> None:
    Index(job.index_path).close()
    assert status_of(job)["state"] == "stopped"


def test_list_that_cannot_be_written_is_an_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_module, "atomic_write", full)
    with pytest.raises(FolderUnusable, match="No space left"):
        register(job)


def test_options_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.touch()
    with pytest.raises(UsageInvalid, match="'night' is not a time range"):
        job_of(source, tmp_path / "out", only_between="night")
    with pytest.raises(UsageInvalid, match="invalid JSON"):
        job_of(source, tmp_path / "out", template="{")
    assert job_of(source, tmp_path / "out", only_between="22:00-07:00").window is not None
