"""The usage of a whole llamasup: what it saves, when it is killed, and files that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup, run_to_end

ServerMaker = Callable[..., str]
# Root without the capability to write everywhere.
PLAIN = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else ["env"]


def ask(running: Llamasup, count: int = 1) -> None:
    for _ in range(count):
        answer = httpx.post(f"{running.url}/completion", json={"prompt": "x", "n_predict": 4}, timeout=60)
        assert answer.status_code == 200


def usage(*arguments: str) -> Mapping[str, Any]:
    done = run_to_end("usage", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    shown: Mapping[str, Any] = json.loads(done.stdout)
    return shown


def requests_of(shown: Mapping[str, Any]) -> int:
    return sum(row["requests"] for row in shown["rows"])


def warnings(running: Llamasup) -> list[str]:
    lines = [json.loads(line) for line in running.stderr_text.splitlines()]
    return [
        line["message"] for line in lines if line["level"] == "warning" and "usage file" in line["message"]
    ]


@pytest.fixture
def file(own_folders: Path) -> Path:
    return own_folders / "state" / "llamasup" / "usage.sqlite"


def test_command_shows_the_requests_of_running_and_ended_llamasups(
    tiny_model: Path, fake_server: ServerMaker, file: Path
) -> None:
    server = fake_server()
    with llamasup(tiny_model, "--runtime", server) as first:
        ask(first, 2)
        assert requests_of(usage()) == 2
        with llamasup(tiny_model, "--runtime", server, "--alias", "other") as second:
            ask(second, 3)
            shown = usage("--by", "model,day")
            assert [(row["model"], row["requests"]) for row in shown["rows"]] == [("other", 3), ("tiny", 2)]
            assert requests_of(usage("--pid", str(second.pid))) == 5  # one file for both
            assert second.stop() == 0
        ask(first)
        assert first.stop() == 0
    assert shown["file"] == str(file)
    [row] = usage("--by", "key")["rows"]
    assert (row["key"], row["requests"], row["tokens_completion"]) == ("", 6, 24)
    assert row["slot_s"] > 0


def test_llamasup_that_is_killed_keeps_what_it_has_saved(
    tiny_model: Path, fake_server: ServerMaker, file: Path
) -> None:
    server = fake_server()
    with llamasup(tiny_model, "--runtime", server) as running:
        ask(running, 3)
        assert requests_of(usage()) == 3  # saved now, and otherwise within a minute
        ask(running, 2)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(PATIENCE_S)
    assert requests_of(usage()) == 3
    with llamasup(tiny_model, "--runtime", server) as running:
        ask(running)
        assert running.stop() == 0
    assert requests_of(usage()) == 4


def test_read_only_folder_is_said_once_and_disturbs_no_request(
    tiny_model: Path, fake_server: ServerMaker, file: Path
) -> None:
    file.parent.mkdir(mode=0o700, parents=True)
    (file.parent / "logs").mkdir(mode=0o700)
    file.parent.chmod(0o500)
    options = ("--runtime", fake_server(), "--log-format", "json")
    try:
        with llamasup(tiny_model, *options, prefix=PLAIN) as running:
            ask(running, 2)
            for _ in range(3):
                shown = usage("--pid", str(running.pid))
                assert "cannot be used" in shown["problem"]
                assert requests_of(shown) == 2
            assert running.stop() == 0
            [warning] = warnings(running)
        assert "cannot be used" in warning
        assert "the usage is not saved" in warning
    finally:
        file.parent.chmod(0o700)
    assert not file.exists()


def test_full_disk_is_said_once_and_disturbs_no_request(
    tiny_model: Path, fake_server: ServerMaker, file: Path
) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    file.parent.mkdir(mode=0o700, parents=True)
    script = 'mount -t tmpfs -o size=16k,mode=700 tmpfs "$0" && exec "$@"'
    disk = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(file.parent)]
    if subprocess.run([*disk, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no mount")
    options = ("--runtime", fake_server(), "--log-format", "json")
    with llamasup(tiny_model, *options, prefix=disk) as running:
        ask(running, 2)
        for _ in range(3):
            shown = usage("--pid", str(running.pid))
            assert "cannot be used" in shown["problem"]
            assert requests_of(shown) == 2
        assert running.stop() == 0
        assert len(warnings(running)) == 1


def test_corrupt_file_is_moved_aside_and_a_new_one_begins(
    tiny_model: Path, fake_server: ServerMaker, file: Path
) -> None:
    file.parent.mkdir(mode=0o700, parents=True)
    file.write_bytes(b"This is not a database." * 100)
    with llamasup(tiny_model, "--runtime", fake_server(), "--log-format", "json") as running:
        ask(running)
        assert requests_of(usage()) == 1
        assert running.stop() == 0
        [warning] = warnings(running)
    [aside] = file.parent.glob("usage.sqlite.corrupt-*")
    assert str(aside) in warning
    assert aside.read_bytes().startswith(b"This is not")
    assert requests_of(usage()) == 1


def test_usage_that_is_switched_off_writes_no_file(
    tiny_model: Path, fake_server: ServerMaker, file: Path
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server(), "--no-usage") as running:
        ask(running)
        assert usage()["rows"] == []
        shown = usage("--pid", str(running.pid))
        assert (shown["rows"], "--no-usage" in shown["problem"]) == ([], True)
        assert running.stop() == 0
    assert not file.exists()


def test_file_contains_no_prompt_no_answer_and_no_key(
    tiny_model: Path, fake_server: ServerMaker, file: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("SECRET-key name=phone\n")
    keys.chmod(0o600)
    with llamasup(tiny_model, "--runtime", fake_server(), "--api-key-file", str(keys)) as running:
        headers = {"Authorization": "Bearer SECRET-key"}
        body = {"prompt": "SECRET prompt", "n_predict": 4, "model": "SECRET-model"}
        answer = httpx.post(f"{running.url}/completion?SECRET=1", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        refused = httpx.post(f"{running.url}/completion", json=body, headers={"x-api-key": "SECRET-2"})
        assert refused.status_code == 401
        assert running.stop() == 0
    content = b"".join(path.read_bytes() for path in file.parent.glob("usage.sqlite*"))
    assert b"phone" in content
    assert b"SECRET" not in content
