"""Careless parents: pipes without a reader, closed streams, and signals at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, command, llamasup
from tests.kit.children import NewChildren, catches
from tests.kit.patience import eventually


def url_from(ready_file: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not ready_file.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return str(json.loads(ready_file.read_text())["url"])


@pytest.mark.extended
def test_parent_that_reads_no_output_does_not_block_llamasup(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    """4,000 request lines are several times what a pipe holds (64 KiB)."""
    process = subprocess.Popen(
        command(
            *("run", str(tiny_model), "--runtime", fake_server(), "--port", "0"),
            *("--events", "jsonl", "--ready-file", str(tmp_path / "ready")),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with httpx.Client(base_url=url_from(tmp_path / "ready", process), timeout=20) as client:
            for _ in range(4000):
                assert client.post("/tokenize", json={"content": "x"}).status_code == 200
            assert client.get("/livez").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        _, stderr = process.communicate()
    assert b"is ready at" in stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_nothing(
    closed: str, tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    words = command("run", str(tiny_model), "--runtime", fake_server(), "--port", "0", "--events", "jsonl")
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *words, "--ready-file", str(ready_file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert httpx.get(f"{url_from(ready_file, process)}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


_PYTHON, _LLAMASUP = "python", "llamasup"


@pytest.mark.parametrize(
    ("which", "begun", "delay_s"),
    [
        *(("run", _PYTHON, delay_s) for delay_s in (0.02, 0.06, 0.1)),
        *(("run", _LLAMASUP, delay_s) for delay_s in (0.0, 0.05, 0.1, 0.2, 0.3)),
        *(("serve", _LLAMASUP, delay_s) for delay_s in (0.0, 0.1, 0.2, 0.3)),
    ],
)
def test_sigterm_at_any_moment_of_the_start_is_a_stop(
    which: str,
    begun: str,
    delay_s: float,
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    new_children: NewChildren,
) -> None:
    """Which moment a delay hits depends on the machine; every one must end the same way.

    Before llamasup has begun, a signal ends Python as it ends any program.
    """
    models = [str(tiny_model)] if which == "run" else ["--models-dir", str(tiny_model.parent)]
    process = subprocess.Popen(
        command(which, *models, "--runtime", fake_server("load_s=0.1"), "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if begun == _PYTHON:
        eventually(lambda: b"llamasup" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    else:
        eventually(lambda: catches(process.pid, signal.SIGTERM))
    time.sleep(delay_s)
    caught = catches(process.pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in stderr
    assert process.returncode == 0 or (process.returncode == -signal.SIGTERM and not caught), stderr
    assert new_children() == []


def test_sighup_ignored_by_the_parent_stays_ignored(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """``nohup llamasup run …`` outlives its terminal."""

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with llamasup(tiny_model, "--runtime", fake_server(), preexec_fn=nohup) as running:
        url = running.url
        running.send_signal(signal.SIGHUP)
        assert httpx.get(f"{url}/health").status_code == 200
        assert running.stop() == 0
        assert "SIGHUP" not in running.stderr_text


def test_ready_file_in_a_missing_folder_is_refused_before_the_start(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "none" / "r.json")
    with llamasup(tiny_model, "--runtime", fake_server(), "--ready-file", nowhere) as running:
        assert running.end() == 2
        assert nowhere in running.stderr_text
        assert "starting" not in running.stderr_text


def test_no_log_line_breaks_the_json(
    tiny_model: Path, fake_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/nowhere")
    with llamasup(tiny_model, "--runtime", fake_server(), "--log-format", "json") as running:
        running.wait_for("ready")
        assert running.stop() == 0
        records = [json.loads(line) for line in running.stderr_text.splitlines()]
    (warning,) = [record for record in records if record["event"] == "log"]
    assert warning["level"] == "warning"
    assert "output is not kept" in warning["message"]


def test_plan_handles_a_closed_pipe_and_a_full_disk(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    words = command("plan", str(tiny_model), "--runtime", fake_server())
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 71
    assert "Cannot write the result" in done.stderr
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
