"""The ready file: complete or absent, removed with its run, and never replacing another file."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.core.system.process.run_folder import ReadyFile, remove_left_by, remove_stale
from llamasup.errors import FolderUnusable, UsageInvalid

DEAD_PORT = 1


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def ready(pid: int, port: int) -> dict[str, object]:
    url = f"http://127.0.0.1:{port}"
    return {"event": "ready", "protocol": 1, "url": url, "host": "127.0.0.1", "port": port, "pid": pid}


def test_ready_file_is_one_json_line_and_removed_at_the_end(tmp_path: Path) -> None:
    file = ReadyFile(tmp_path / "ready.json")
    file.write({"event": "ready", "port": 43121, "models": ["tïny"]})
    content = (tmp_path / "ready.json").read_bytes()
    assert json.loads(content) == {"event": "ready", "port": 43121, "models": ["tïny"]}
    assert content.count(b"\n") == 1
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_ready_file_of_another_run_is_left_alone(tmp_path: Path) -> None:
    mine, theirs = ReadyFile(tmp_path / "ready"), ReadyFile(tmp_path / "ready")
    mine.write({"pid": 1})
    theirs.write({"pid": 2})
    mine.remove()
    assert json.loads((tmp_path / "ready").read_bytes()) == {"pid": 2}


def test_missing_ready_file_at_the_end_is_no_error(tmp_path: Path) -> None:
    file = ReadyFile(tmp_path / "ready")
    file.write({})
    (tmp_path / "ready").unlink()
    file.remove()


def test_a_ready_file_in_a_missing_folder_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderUnusable, match="gone"):
        ReadyFile(tmp_path / "gone" / "ready").write({})


def test_stale_ready_file_is_removed_at_the_start(tmp_path: Path, port: int) -> None:
    """A dead process; a reused PID with a closed port."""
    path = tmp_path / "ready.json"
    for stale in (ready(2**22 + 1, port), ready(os.getpid(), DEAD_PORT)):
        path.write_text(json.dumps(stale))
        remove_stale(path)
        assert not path.exists()


def test_ready_file_of_a_running_llamasup_is_rejected_with_its_address(tmp_path: Path, port: int) -> None:
    path = tmp_path / "ready.json"
    path.write_text(json.dumps(ready(os.getpid(), port)))
    with pytest.raises(UsageInvalid, match=rf"process {os.getpid()} at http://127.0.0.1:{port}"):
        remove_stale(path)
    assert path.exists()


@pytest.mark.parametrize("content", ["GGUF\0\1", "{}", "[1]", '{"event": "ready", "pid": "4"}', "\xff"])
def test_other_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageInvalid, match="is not a ready file"):
        remove_stale(path)
    assert path.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize("kind", ["folder", "fifo", "symlink"])
def test_non_regular_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ready"
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to(tmp_path)
    with pytest.raises(UsageInvalid, match="is not a ready file"):
        remove_stale(path)
    assert path.is_symlink() or path.exists()


def test_empty_file_is_replaced(tmp_path: Path) -> None:
    """``mktemp`` makes the file."""
    path = tmp_path / "ready"
    path.touch()
    remove_stale(path)
    assert not path.exists()


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageInvalid, match="gone"):
        remove_stale(tmp_path / "gone" / "ready")


def test_after_a_dead_run_only_its_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.write_text(json.dumps(ready(4242, DEAD_PORT)))
    assert not remove_left_by(17, path)
    assert path.exists()
    assert remove_left_by(4242, path)
    assert not path.exists()
    assert not remove_left_by(4242, path)


def test_nested_arrays_are_an_invalid_ready_file(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(UsageInvalid):
        remove_stale(path)
    assert not remove_left_by(1, path)
    assert path.exists()
