from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from llamasup.core.auth.api_key import KeyRing, plain_keys
from llamasup.core.auth.key_source import PROCESS_SALT, KeyFile, environment_keys
from llamasup.errors import ConfigInvalid


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o600)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "keys", "one name=a\n")


def names(file: KeyFile) -> list[str]:
    return [key.name for key in file.keys]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


# --- the environment


def test_unset_variable_is_no_key() -> None:
    assert environment_keys({}) == ()
    assert environment_keys({"LLAMASUP_API_KEY": ""}) == ()


def test_line_end_of_the_variable_is_removed() -> None:
    assert environment_keys({"LLAMASUP_API_KEY": "zero\n"}) == ("zero",)
    assert environment_keys({"LLAMASUP_API_KEY": "two words €"}) == ("two words €",)


def test_variable_may_have_bytes_that_are_not_utf8() -> None:
    (key,) = environment_keys({"LLAMASUP_API_KEY": os.fsdecode(b"caf\xe9")})
    assert KeyRing(plain_keys((key,), PROCESS_SALT)).find((b"caf\xe9",)) is not None


@pytest.mark.parametrize(
    ("value", "says"),
    [("   ", "3 characters that are all blanks"), ("se\ncret", "control"), ("\x7fsecret", "control")],
)
def test_variable_that_no_client_can_send_is_refused_and_not_shown(value: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says) as caught:
        environment_keys({"LLAMASUP_API_KEY": value})
    assert "cret" not in caught.value.message


# --- the first read of the file


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no keys"),
        (b"# none\n", "has no keys"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"k rpm=x", "line 1: invalid rpm='x'"),
        (b"k\n" * (1 << 19) + b"k", "larger than 1048576 bytes"),
    ],
    ids=["empty", "a comment", "UTF-16", "a mistake", "too large"],
)
def test_file_without_valid_keys_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        KeyFile(written(tmp_path / "keys", content))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="No such file"):
        KeyFile(tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="directory"):
        KeyFile(tmp_path)


def test_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="the user after ~ does not exist"):
        KeyFile(Path("~nobody-of-this-name/keys"))


def test_file_that_others_can_read_is_warned_about_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    KeyFile(path)
    assert warnings(caplog) == []
    path.chmod(0o640)
    file = KeyFile(path)
    (warning,) = warnings(caplog)
    assert "mode 0640" in warning
    assert f"chmod 600 {path}" in warning
    path.write_text("two\n")
    assert file.changed()
    assert warnings(caplog) == []


def test_systemd_credential_is_private(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(0o440)  # as systemd gives it to a user that exists while the service runs
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(path.parent))
    KeyFile(path)
    assert warnings(caplog) == []


# --- changes of the file


def test_unchanged_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(path)
    assert not file.changed()  # read once more, for a second change within one tick of the clock
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("the file was read"))
    assert not file.changed()
    assert not file.changed()


def test_two_changes_within_one_clock_tick_are_both_seen(path: Path) -> None:
    file = KeyFile(path)
    while file.changed() or not file._settled:
        pass
    path.write_text("two name=b\n")
    stamp = path.stat().st_mtime_ns
    assert file.changed()
    path.write_text("six name=c\n")
    os.utime(path, ns=(stamp, stamp))
    assert file.changed()
    assert names(file) == ["c"]


def test_touched_file_changes_nothing(path: Path) -> None:
    file = KeyFile(path)
    os.utime(path, ns=(1, 1))
    assert not file.changed()


def test_changed_symlink_is_a_change(tmp_path: Path) -> None:
    """Kubernetes replaces a secret like this."""
    first = written(tmp_path / "first", "one name=a\n")
    second = written(tmp_path / "second", "two name=b\n")
    (tmp_path / "keys").symlink_to(first)
    file = KeyFile(tmp_path / "keys")
    (tmp_path / "new").symlink_to(second)
    (tmp_path / "new").replace(tmp_path / "keys")
    assert file.changed()
    assert names(file) == ["b"]


def test_each_error_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path)
    path.write_text("one name=a\ntwo rpm=x\n")
    for _ in range(3):
        assert not file.changed()
    (warning,) = warnings(caplog)
    assert "line 2: invalid rpm='x'" in warning
    assert "Keeping the previous keys" in warning
    assert names(file) == ["a"]
    path.write_text("two rpm=y\n")
    for _ in range(3):
        assert not file.changed()
    assert "line 1: invalid rpm='y'" in warnings(caplog)[0]
    path.write_text("two name=b\n")
    assert file.changed()
    assert "is valid again" in warnings(caplog)[0]
    assert names(file) == ["b"]


def test_removal_of_the_last_key_revokes_all_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(path)
    path.write_text("# all revoked\n")
    assert file.changed()
    assert file.keys == ()
    for _ in range(3):
        assert not file.changed()
    (warning,) = warnings(caplog)
    assert "every key from it is revoked" in warning
    path.write_text("two name=b\n")
    assert file.changed()
    assert names(file) == ["b"]
    assert warnings(caplog) == []


def test_empty_file_revokes_keys_at_the_second_read(path: Path) -> None:
    file = KeyFile(path)
    path.write_text("")  # an editor that is writing leaves it empty
    assert not file.changed()
    assert names(file) == ["a"]
    assert file.changed()
    assert names(file) == []


def test_missing_file_is_logged_when_it_goes_and_returns(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(path)
    path.rename(path.with_name("away"))
    for _ in range(3):
        assert not file.changed()
    assert any("No such file" in warning for warning in warnings(caplog))
    path.with_name("away").rename(path)
    for _ in range(3):
        assert not file.changed()
    (warning,) = warnings(caplog)
    assert "is valid again" in warning


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_is_read_after_its_permissions_return(path: Path) -> None:
    file = KeyFile(path)
    path.write_text("two name=b\n")
    path.chmod(0)
    assert not file.changed()
    path.chmod(0o600)  # no change of time, size or inode
    assert file.changed()
    assert names(file) == ["b"]


def test_pipe_in_place_of_the_file_does_not_block(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path)
    path.unlink()
    os.mkfifo(path)
    assert not file.changed()
    assert "not a regular file" in warnings(caplog)[0]
    assert names(file) == ["a"]


def test_pipe_is_read_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one name=a\n")
    os.close(writing)
    file = KeyFile(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    assert names(file) == ["a"]
    assert not file.changed()


def test_key_in_place_of_the_path_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        KeyFile(tmp_path / "sk-SECRET", of="auth.api_key_file")
    assert raised.value.message == (
        "The API key file of auth.api_key_file cannot be read: No such file or directory."
    )


def test_wait_for_a_pipe_without_a_writer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamasup.core.system.storage.folders.PIPE_WAIT_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(
        ConfigInvalid, match=r"cannot be read: it is a pipe that was not closed within 0\.05 s"
    ):
        KeyFile(pipe)
    keeps_open = os.open(pipe, os.O_RDWR)
    os.write(keeps_open, b"one name=a\n")
    with pytest.raises(ConfigInvalid, match="was not closed within"):
        KeyFile(pipe)
    os.close(keeps_open)


def test_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_text, args=("one name=a\n" + "# x\n" * 50_000,))
    writing.start()
    assert names(KeyFile(pipe)) == ["a"]
    writing.join()


def test_endless_file_is_too_large() -> None:
    with pytest.raises(ConfigInvalid, match="larger than"):
        KeyFile(Path("/dev/zero"))
