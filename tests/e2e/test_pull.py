"""``llamasup pull`` and ``rm`` as a person and a program meet them: processes, against a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driver import PATIENCE_S, command, llamasup, run_to_end
from tests.kit import models
from tests.kit.hub import Fault, Hub, running_hub

NAME = "tiny-Q4_K_M.gguf"
MIB = 1 << 20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # Large enough for several requests at a time; what is behind the last tensor no reader looks at.
        running.repos["org/tiny-GGUF"] = {
            NAME: models.tiny_decoder().ljust(40 * MIB, b"\0"),
            "tiny-Q8_0.gguf": b"x",
        }
        yield running


@pytest.fixture
def folder(own_folders: Path) -> Path:
    return own_folders / "data" / "llamasup" / "models"


def pulled(*arguments: str, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = run_to_end("pull", *arguments, **options)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    if code:
        assert "→" in done.stderr
    return done


class OnTerminal:
    """A command whose standard error, and input, is a terminal of ours."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        self.process = subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True
        )
        os.close(theirs)
        self.stderr_text = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._ours, 65_536):
                with self._changed:
                    self.stderr_text += chunk.decode()
                    self._changed.notify()
        except OSError:  # EIO: the other end is gone
            pass

    def wait_for(self, pattern: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: re.search(pattern, self.stderr_text), PATIENCE_S), (
                self.stderr_text
            )

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> tuple[int, str]:
        stdout, _ = self.process.communicate(timeout=PATIENCE_S)
        self._reader.join(PATIENCE_S)
        os.close(self._ours)
        return self.process.returncode, stdout


# --- pull ------------------------------------------------------------------------------------------


def test_pulled_model_is_shown_again_and_inspected(hub: Hub, folder: Path) -> None:
    done = pulled("org/tiny-GGUF")
    path = folder / "org/tiny-GGUF" / NAME
    assert done.stdout == f"{path}\n"
    assert "Q4_K_M, the default of llama.cpp" in done.stderr
    assert "llamasup run org/tiny-GGUF" in done.stderr
    assert path.read_bytes() == hub.repos["org/tiny-GGUF"][NAME]
    hub.asked.clear()
    assert pulled("org/tiny-GGUF:Q4_K_M").stdout == f"{path}\n"
    assert hub.parts() == []
    inspected = run_to_end("inspect", "org/tiny-GGUF", "--json")
    shown = json.loads(inspected.stdout)
    assert shown["path"] == str(path)
    assert shown["class"] == "decoder"


def test_pull_reports_json_events(hub: Hub, tmp_path: Path) -> None:
    done = pulled("org/tiny-GGUF", "--json", "--folder", str(tmp_path / "m"), "--quant", "q4_k_m")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0] == {
        "event": "chosen",
        "protocol": 1,
        "ref": "org/tiny-GGUF",
        "name": "org/tiny-GGUF:Q4_K_M",
        "files": [NAME],
        "total_bytes": 40 * MIB,
        "missing": 1,
        "reason": "the quantization asked for",
        "notes": [],
    }
    progress = [event for event in events if event["event"] == "progress"]
    assert progress
    assert all(path["total_bytes"] == 40 * MIB for path in progress)
    path = str(tmp_path / "m/org/tiny-GGUF" / NAME)
    assert {**events[-1], "seconds": 0} == {
        "event": "done",
        "protocol": 1,
        "ref": "org/tiny-GGUF",
        "path": path,
        "parts": [path],
        "mmproj": None,
        "seconds": 0,
    }


def test_pull_of_several_models_continues_after_an_error(hub: Hub, folder: Path) -> None:
    done = pulled("org/tiny-GGUF:Q2_K", "org/tiny-GGUF", "./path", code=66)
    assert "has no quantization Q2_K" in done.stderr
    assert "Q8_0" in done.stderr  # what there is
    assert "is not a model reference" in done.stderr
    assert done.stdout == f"{folder / 'org/tiny-GGUF' / NAME}\n"
    events = run_to_end("pull", "--json", "org/none").stdout.splitlines()
    error = json.loads(events[-1])
    assert (error["event"], error["cause"], error["exit_code"]) == ("error", "access_denied", 66)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["./m.gguf"], 2),
        (["org/repo:Q4_0", "--quant", "Q8_0"], 2),
        (["https://h/m.gguf", "--quant", "Q8_0"], 2),
        (["org/repo", "--endpoint", "nowhere"], 2),
        (["org/repo", "--token-file", "MISSING"], 78),
        (["http://example.com/m.gguf"], 78),
        (["https://127.0.0.1:1/m.gguf"], 78),
    ],
)
def test_invalid_or_forbidden_references_are_refused(
    hub: Hub, arguments: list[str], code: int, tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    pulled(*(missing if word == "MISSING" else word for word in arguments), code=code)
    assert hub.asked == []


def test_token_from_the_environment_is_used_and_never_printed(hub: Hub) -> None:
    hub.gated.add("org/tiny-GGUF")
    hub.token = "hf_verysecret"
    assert "is gated" in pulled("org/tiny-GGUF", code=66).stderr
    done = pulled("org/tiny-GGUF", env={**os.environ, "HF_TOKEN": hub.token})
    assert "verysecret" not in done.stdout + done.stderr


def test_terminal_shows_a_progress_bar_with_speed_and_time_left(hub: Hub) -> None:
    hub.faults.append(Fault(NAME, hold_after=4 * MIB, only_parts=True))
    running = OnTerminal("pull", "org/tiny-GGUF")
    running.wait_for(r"/40\.0 MiB")
    running.wait_for(r"\x1b\[")
    hub.released.set()
    code, stdout = running.end()
    assert code == 0
    assert stdout.endswith(f"{NAME}\n")
    assert "━" in running.stderr_text
    assert "llamasup run" in running.stderr_text


def test_ctrl_c_keeps_the_partial_file_and_the_same_command_resumes(hub: Hub, folder: Path) -> None:
    hub.faults.append(Fault(NAME, times=9, hold_after=4 * MIB, only_parts=True))
    running = OnTerminal("pull", "org/tiny-GGUF")
    hub.held.wait(PATIENCE_S)
    running.wait_for(r"[1-9][\d.]*/40\.0 MiB")  # something has come
    running.process.send_signal(signal.SIGINT)
    code, _ = running.end()
    assert code == 130
    assert re.search(r"Stopped; .* are kept. Run the same command to continue", running.stderr_text)
    assert "Traceback" not in running.stderr_text
    left = sorted(path.name for path in (folder / "org/tiny-GGUF").iterdir())
    assert left == [f"{NAME}.part", f"{NAME}.part.json"]
    hub.released.set()
    hub.faults.clear()
    hub.asked.clear()
    pulled("org/tiny-GGUF")
    ranges = [re.findall(r"\d+", part) for part in hub.parts()]
    assert sum(int(end) + 1 - int(start) for start, end in ranges) < 40 * MIB
    assert (folder / "org/tiny-GGUF" / NAME).read_bytes() == hub.repos["org/tiny-GGUF"][NAME]


def test_killed_download_resumes(hub: Hub, folder: Path) -> None:
    hub.faults.append(Fault(NAME, times=9, hold_after=8 * MIB, only_parts=True))
    process = subprocess.Popen(command("pull", "org/tiny-GGUF"), stderr=subprocess.DEVNULL)
    record = folder / "org/tiny-GGUF" / f"{NAME}.part.json"
    pause = threading.Event()
    while not (record.exists() and json.loads(record.read_bytes())["done"]):
        assert process.poll() is None
        pause.wait(0.05)
    process.kill()
    process.wait()
    kept = sum(end - start for start, end in json.loads(record.read_bytes())["done"])
    assert kept > 0
    hub.released.set()
    hub.faults.clear()
    hub.asked.clear()
    pulled("org/tiny-GGUF")
    ranges = [re.findall(r"\d+", part) for part in hub.parts()]
    assert sum(int(end) + 1 - int(start) for start, end in ranges) == 40 * MIB - kept
    assert (folder / "org/tiny-GGUF" / NAME).read_bytes() == hub.repos["org/tiny-GGUF"][NAME]


def test_file_size_limit_is_reported_as_such(hub: Hub, folder: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MIB, 10 * MIB))

    # One request: of several, one behind the limit may fail before any byte has come.
    done = pulled("org/tiny-GGUF", "--parallel", "1", code=71, preexec_fn=limit)
    assert "File too large" in done.stderr
    assert (folder / "org/tiny-GGUF" / f"{NAME}.part").exists()
    pulled("org/tiny-GGUF")


# --- run -------------------------------------------------------------------------------------------


def test_run_downloads_a_missing_model_and_sends_no_request_for_a_present_one(
    hub: Hub, fake_server: Callable[..., str]
) -> None:
    for expected in (True, False):
        hub.asked.clear()
        with llamasup("org/tiny-GGUF", "--runtime", fake_server()) as running:
            with urllib.request.urlopen(f"{running.url}/health", timeout=PATIENCE_S) as answer:  # noqa: S310
                assert answer.status == 200
            assert running.stop() == 0
        assert bool(hub.asked) is expected
        assert ("Downloaded" in running.stderr_text) is expected


def test_stop_during_a_download_of_run_is_a_normal_stop(
    hub: Hub, fake_server: Callable[..., str], folder: Path
) -> None:
    hub.faults.append(Fault(NAME, times=9, hold_after=4 * MIB, only_parts=True))
    with llamasup("org/tiny-GGUF", "--runtime", fake_server()) as running:
        hub.held.wait(PATIENCE_S)
        assert running.stop() == 0
    assert "Stopped" in running.stderr_text
    assert "Traceback" not in running.stderr_text
    assert not (folder / "org/tiny-GGUF" / NAME).exists()


def test_url_may_be_longer_than_any_path(hub: Hub, fake_server: Callable[..., str]) -> None:
    hub.plain["/m.gguf"] = models.tiny_decoder()
    url = f"{hub.url}/m.gguf?X-Signature={'s' * 1000}"
    planned = run_to_end("plan", url, "--runtime", fake_server())
    assert planned.returncode == 66
    assert f"llamasup pull {hub.url}/m.gguf" in planned.stderr
    with llamasup(url, "--runtime", fake_server()) as running:
        assert running.wait_for("ready")["models"] == ["m"]
        assert running.stop() == 0
    assert "sss" not in running.stderr_text


def test_commands_that_only_read_a_model_say_how_to_download_it(hub: Hub) -> None:
    done = run_to_end("inspect", "org/tiny-GGUF")
    assert done.returncode == 66
    assert "llamasup pull org/tiny-GGUF" in done.stderr
    assert hub.asked == []


# --- rm --------------------------------------------------------------------------------------------


@pytest.fixture
def model(folder: Path) -> Path:
    path = folder / "org/m-GGUF/m-Q4_K_M.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(models.tiny_decoder())
    (path.parent / "mmproj-F16.gguf").write_bytes(models.tiny_projector())
    return path


def test_model_is_removed_only_after_confirmation(model: Path, folder: Path) -> None:
    refused = run_to_end("rm", "org/m-GGUF")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    for answer, code in (("n\n", 1), ("y\n", 0)):
        assert model.exists()
        running = OnTerminal("rm", "org/m-GGUF")
        running.wait_for(r"Delete\? \[y/N\]")
        running.type(answer)
        assert running.end()[0] == code
    assert list(folder.iterdir()) == []


def test_rm_reports_json(model: Path) -> None:
    done = run_to_end("rm", "--yes", "--json", "org/m-GGUF:Q4_K_M")
    assert done.returncode == 0, done.stderr
    answer: Mapping[str, Any] = json.loads(done.stdout)
    assert answer["removed"] == [str(model), str(model.parent / "mmproj-F16.gguf")]
    assert answer["freed_bytes"] > 0
    assert run_to_end("rm", "--yes", "org/m-GGUF").returncode == 66


def test_loaded_model_is_not_removed(model: Path) -> None:
    loaded = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", "--model", str(model)],
        stdin=subprocess.PIPE,
    )
    try:
        done = run_to_end("rm", "--yes", "org/m-GGUF")
        assert done.returncode == 2
        assert f"process {loaded.pid}" in done.stderr
        assert model.exists()
    finally:
        loaded.communicate()
    assert run_to_end("rm", "--yes", "org/m-GGUF").returncode == 0


def test_rm_removes_nothing_unless_all_models_exist(model: Path) -> None:
    assert run_to_end("rm", "--yes", "org/m-GGUF", "org/none").returncode == 66
    assert model.exists()
