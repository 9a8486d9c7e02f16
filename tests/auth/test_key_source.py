from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from llamasup.auth.key_source import PROCESS_SALT, KeyFile, environment_keys
from llamasup.auth.keys import KeyRing, plain_keys
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
    found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return found


# --- the environment


def test_without_the_variable_there_is_no_key() -> None:
    assert environment_keys({}) == ()
    assert environment_keys({"LLAMASUP_API_KEY": ""}) == ()


def test_the_variable_is_a_key_less_the_line_end_that_came_with_it() -> None:
    assert environment_keys({"LLAMASUP_API_KEY": "zero\n"}) == ("zero",)
    assert environment_keys({"LLAMASUP_API_KEY": "two words €"}) == ("two words €",)


def test_a_variable_of_bytes_that_are_no_text_is_a_key() -> None:
    (key,) = environment_keys({"LLAMASUP_API_KEY": os.fsdecode(b"caf\xe9")})
    assert KeyRing(plain_keys((key,), PROCESS_SALT)).find((b"caf\xe9",)) is not None


@pytest.mark.parametrize(
    ("value", "says"), [("   ", "nothing but blanks"), ("se\ncret", "control"), ("\x7fsecret", "control")]
)
def test_a_variable_that_no_client_can_send_is_refused_and_not_shown(value: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says) as caught:
        environment_keys({"LLAMASUP_API_KEY": value})
    assert "cret" not in caught.value.message


# --- the file, for the first time


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key"),
        (b"# none\n", "holds no key"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"k rpm=x", "line 1: rpm='x'"),
        (b"k\n" * (1 << 19) + b"k", "larger than 1048576 bytes"),
    ],
    ids=["empty", "a comment", "UTF-16", "a mistake", "too large"],
)
def test_a_file_that_protects_nothing_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        KeyFile(written(tmp_path / "keys", content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="No such file"):
        KeyFile(tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="directory"):
        KeyFile(tmp_path)


def test_a_folder_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no such user"):
        KeyFile(Path("~nobody-of-this-name/keys"))


def test_a_file_that_others_can_read_is_told_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_credential_of_systemds_is_not_open_to_others(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(0o440)  # as systemd gives it to a user that exists while the service runs
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(path.parent))
    KeyFile(path)
    assert warnings(caplog) == []


# --- the file, again


def test_what_has_not_changed_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(path)
    assert not file.changed()  # read once more, for a second change within one tick of the clock
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was read"))
    assert not file.changed()
    assert not file.changed()


def test_two_changes_within_one_tick_of_the_clock_are_two(path: Path) -> None:
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


def test_a_touched_file_changes_nothing(path: Path) -> None:
    file = KeyFile(path)
    os.utime(path, ns=(1, 1))
    assert not file.changed()


def test_a_link_that_points_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces a secret."""
    first = written(tmp_path / "first", "one name=a\n")
    second = written(tmp_path / "second", "two name=b\n")
    (tmp_path / "keys").symlink_to(first)
    file = KeyFile(tmp_path / "keys")
    (tmp_path / "new").symlink_to(second)
    (tmp_path / "new").replace(tmp_path / "keys")
    assert file.changed()
    assert names(file) == ["b"]


def test_a_mistake_is_told_once_and_another_once_more(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path)
    path.write_text("one name=a\ntwo rpm=x\n")
    for _ in range(3):
        assert not file.changed()
    (warning,) = warnings(caplog)
    assert "line 2: rpm='x'" in warning
    assert "keys before still count" in warning
    assert names(file) == ["a"]
    path.write_text("two rpm=y\n")
    for _ in range(3):
        assert not file.changed()
    assert "line 1: rpm='y'" in warnings(caplog)[0]
    path.write_text("two name=b\n")
    assert file.changed()
    assert "as it should be again" in warnings(caplog)[0]
    assert names(file) == ["b"]


def test_a_file_whose_last_key_goes_has_none_then_and_says_so_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(path)
    path.write_text("# all revoked\n")
    assert file.changed()
    assert file.keys == ()
    for _ in range(3):
        assert not file.changed()
    (warning,) = warnings(caplog)
    assert "holds no key any more" in warning
    path.write_text("two name=b\n")
    assert file.changed()
    assert names(file) == ["b"]
    assert warnings(caplog) == []


def test_an_empty_file_counts_from_the_second_look_on(path: Path) -> None:
    file = KeyFile(path)
    path.write_text("")  # as an editor leaves it while it writes
    assert not file.changed()
    assert names(file) == ["a"]
    assert file.changed()
    assert names(file) == []


def test_a_file_that_goes_and_comes_back_as_it_was_is_told_twice(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(path)
    path.rename(path.with_name("away"))
    for _ in range(3):
        assert not file.changed()
    assert [each for each in warnings(caplog) if "No such file" in each]
    path.with_name("away").rename(path)
    for _ in range(3):
        assert not file.changed()
    (warning,) = warnings(caplog)
    assert "as it should be again" in warning


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_be_read_again_is_read(path: Path) -> None:
    file = KeyFile(path)
    path.write_text("two name=b\n")
    path.chmod(0)
    assert not file.changed()
    path.chmod(0o600)  # no change of time, size or inode
    assert file.changed()
    assert names(file) == ["b"]


def test_a_pipe_in_its_place_is_not_waited_for(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path)
    path.unlink()
    os.mkfifo(path)
    assert not file.changed()
    assert "no file any more" in warnings(caplog)[0]
    assert names(file) == ["a"]


def test_a_pipe_is_read_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one name=a\n")
    os.close(writing)
    file = KeyFile(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    assert names(file) == ["a"]
    assert not file.changed()


def test_a_key_in_the_place_of_its_file_is_not_shown_where_a_config_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        KeyFile(tmp_path / "sk-SECRET", of="auth.api_key_file")
    assert raised.value.message == (
        "The API key file of auth.api_key_file cannot be read: No such file or directory."
    )


def test_a_pipe_that_nothing_writes_to_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamasup.system.storage.folders.PIPE_WAIT_S", 0.05)
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


def test_a_pipe_is_waited_for_and_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_text, args=("one name=a\n" + "# x\n" * 50_000,))
    writing.start()
    assert names(KeyFile(pipe)) == ["a"]
    writing.join()


def test_a_pipe_without_end_is_too_large() -> None:
    with pytest.raises(ConfigInvalid, match="larger than"):
        KeyFile(Path("/dev/zero"))
