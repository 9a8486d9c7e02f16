"""All processes of a run are killed, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from llamasup.core.system.native import native
from llamasup.core.system.process.sweep import (
    OwnedProcess,
    end_descendants,
    forget_child,
    kill_owned,
    record_child,
    tag_environment,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="uses sh")

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, each leading a session, as children are spawned."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str = "sleep 600", env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"echo up; {script}"],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"PATH": os.defpath, **(env or {})},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def output_ends(process: subprocess.Popen[bytes]) -> bool:
    """Nobody holds its standard output any more, that is: all of its descendants have ended."""
    assert process.stdout is not None
    return process.stdout.read() == b""


def test_a_recorded_child_that_hides_its_start_is_left_alone(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its PID may have been reused."""
    child = start()
    monkeypatch.setattr(native, "start_of", lambda pid: "")
    record_child(tmp_path, child.pid, "sleep")
    assert kill_owned(tmp_path) == ()
    assert child.poll() is None


def test_a_recorded_child_is_ended_with_its_group(tmp_path: Path, start: Start) -> None:
    child = start("sleep 600 & sleep 600")
    record_child(tmp_path, child.pid, "/bin/server")
    assert kill_owned(tmp_path) == (OwnedProcess(child.pid, "/bin/server"),)
    assert child.wait() == -9
    assert output_ends(child)


def test_a_child_that_was_reaped_is_forgotten(tmp_path: Path, start: Start) -> None:
    child = start()
    record_child(tmp_path, child.pid, "/bin/server")
    forget_child(tmp_path, child.pid)
    forget_child(tmp_path, child.pid)
    assert kill_owned(tmp_path) == ()
    assert child.poll() is None


def test_process_with_a_reused_pid_is_left_alone(tmp_path: Path, start: Start) -> None:
    other = start()
    record_child(tmp_path, other.pid, "/bin/server")
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record | {"start": record["start"] + "0"}))
    assert kill_owned(tmp_path) == ()
    assert other.poll() is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"pid": "x", "start": "1", "executable": ""}'])
def test_unreadable_record_kills_no_process(tmp_path: Path, content: str) -> None:
    (tmp_path / "child-1.json").write_text(content)
    assert kill_owned(tmp_path) == ()


def test_unwritable_record_does_not_stop_a_spawn(tmp_path: Path) -> None:
    record_child(tmp_path / "gone", os.getpid(), "/bin/server")
    forget_child(tmp_path / "gone", os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tagged_descendants_are_killed_outside_the_group(tmp_path: Path, start: Start) -> None:
    env = tag_environment({}, tmp_path)
    child = start("(setsid sleep 600 &) ; (setsid setsid sleep 600 &) ; exit 0", env)
    child.wait()
    assert len(end_descendants(env)) >= 2  # a shell between, or a setsid that has forked, may still run
    assert output_ends(child)
    assert end_descendants(env) == ()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_descendants_of_the_same_child_are_killed(tmp_path: Path, start: Start) -> None:
    one, two = tag_environment({}, tmp_path), tag_environment({}, tmp_path)
    first, second = start(env=one), start(env=two)
    end_descendants(one)
    assert first.wait() == -9
    assert second.poll() is None
    kill_owned(tmp_path)
    assert second.wait() == -9


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_folder_with_the_same_prefix_is_not_matched(tmp_path: Path, start: Start) -> None:
    other = start(env=tag_environment({}, tmp_path / "12-abc"))
    assert kill_owned(tmp_path / "12-ab") == ()
    assert other.poll() is None


def test_untagged_child_has_no_known_descendants() -> None:
    assert end_descendants({"PATH": os.defpath}) == ()
