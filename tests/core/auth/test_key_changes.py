from __future__ import annotations

import fcntl
import os
import stat
import threading
from functools import partial
from pathlib import Path

import pytest

from llamasup.core.auth import key_source
from llamasup.core.auth.key_source import change_key_file, default_key_file, key_file_text
from llamasup.errors import ConfigInvalid, FolderUnusable, UsageInvalid


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_new_file_is_private(path: Path) -> None:
    change_key_file(path, lambda text: f"{text} one\n")
    assert path.read_text() == "None one\n"
    assert mode(path) == 0o600


def test_default_file_is_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert default_key_file() == tmp_path / "config" / "llamasup" / "keys"
    assert key_file_text(default_key_file()) is None
    change_key_file(default_key_file(), lambda _: "one\n")
    assert mode(default_key_file()) == 0o600
    assert mode(default_key_file().parent) == 0o700
    default_key_file().parent.chmod(0o755)
    change_key_file(default_key_file(), lambda text: f"{text}two\n")
    assert mode(default_key_file().parent) == 0o700
    assert key_file_text(default_key_file()) == "one\ntwo\n"


def test_the_folder_may_be_a_symlink(tmp_path: Path) -> None:
    """Such as /home -> /usr/home."""
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    change_key_file(tmp_path / "linked" / "keys", lambda _: "one\n")
    assert (tmp_path / "real" / "keys").read_text() == "one\n"


def test_existing_file_keeps_its_mode_and_owner(path: Path) -> None:
    path.write_text("one\n")
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12346)
    before = path.stat()
    change_key_file(path, lambda text: f"{text}two\n")
    after = path.stat()
    assert path.read_text() == "one\ntwo\n"
    assert (mode(path), after.st_uid, after.st_gid) == (0o640, before.st_uid, before.st_gid)


def status_without_access_time(path: Path) -> tuple[int, ...]:
    """Reading may change the access time (relatime)."""
    status = path.stat()
    return (*status[:7], status.st_mtime_ns, status.st_ctime_ns)


def test_failed_change_leaves_the_file_unchanged(path: Path) -> None:
    path.write_text("one\n")
    before = status_without_access_time(path)

    def refuse(text: str | None) -> str:
        raise UsageInvalid("no")

    with pytest.raises(UsageInvalid):
        change_key_file(path, refuse)
    assert status_without_access_time(path) == before
    assert path.read_text() == "one\n"
    assert list(path.parent.iterdir()) == [path]


def test_concurrent_changes_lose_nothing(path: Path) -> None:
    """Without the lock, threads would overwrite the lines of others."""
    together = threading.Barrier(8)

    def appended(line: str, text: str | None) -> str:
        return (text or "") + line

    def add(number: int) -> None:
        together.wait()
        for turn in range(5):
            line = f"key-{number}-{turn}\n"
            change_key_file(path, partial(appended, line))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text().split()) == sorted(
        f"key-{number}-{turn}" for number in range(8) for turn in range(5)
    )
    assert list(path.parent.iterdir()) == [path]


def test_symlink_is_refused(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("one\n")
    path.symlink_to(target)
    with pytest.raises(ConfigInvalid, match="is a symlink"):
        change_key_file(path, lambda _: "two\n")
    with pytest.raises(ConfigInvalid, match="is a symlink"):
        key_file_text(path)
    assert target.read_text() == "one\n"
    assert path.is_symlink()


def test_folder_in_place_of_the_file_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigInvalid, match="is not a regular file"):
        change_key_file(path, lambda _: "two\n")


def test_missing_folder_is_not_created(path: Path) -> None:
    with pytest.raises(FolderUnusable, match="the folder does not exist"):
        change_key_file(path.parent / "none" / "keys", lambda _: "one\n")
    assert not (path.parent / "none").exists()


def test_unwritable_folder_is_named() -> None:
    with pytest.raises(FolderUnusable, match="/proc/no-such-keys"):
        change_key_file(Path("/proc/no-such-keys"), lambda _: "one\n")


def test_unusable_default_folder_has_another_file_as_remedy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("")
    default = path / "llamasup/keys"
    monkeypatch.setattr(key_source, "default_key_file", lambda: default)
    with pytest.raises(FolderUnusable) as caught:
        change_key_file(default, lambda _: "one\n")
    assert caught.value.remedy.endswith("Or give another --file.")


def test_lock_that_is_never_released_times_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_source, "_LOCK_TIMEOUT_S", 0.0)
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        with pytest.raises(FolderUnusable, match="another program has held its lock"):
            change_key_file(path, lambda _: "one\n")
    finally:
        os.close(folder)
    change_key_file(path, lambda _: "one\n")
