"""Downloads from a hub on loopback with all faults that a hub, a CDN or a network can have."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from llamasup.core.gguf.files import read_model
from llamasup.core.hub import remote_file
from llamasup.core.hub.part_file import Busy, Origin, PartFile
from llamasup.core.hub.reference import parse_ref
from llamasup.core.hub.store import FetchedModel, downloaded, hub_endpoint, hub_token
from llamasup.core.models.removal import remove, to_remove
from llamasup.errors import (
    AccessDenied,
    ConfigInvalid,
    DiskFull,
    DownloadFailed,
    DownloadRefused,
    FolderUnusable,
    ModelInvalid,
    ModelMissing,
    UsageInvalid,
)
from llamasup.features.downloads import client, fetch
from llamasup.features.downloads.pull import Choosing, DownloadOptions, pull
from llamasup.features.downloads.retries import RetryPolicy
from tests.kit import models
from tests.kit.hub import Fault, Hub, running_hub
from tests.kit.patience import PATIENCE_S

QUICK = RetryPolicy(attempts=3, first_wait_s=0.01, max_wait_s=0.02, connect_s=PATIENCE_S, stall_s=PATIENCE_S)
KIB = 1024


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads a tiny model in as many requests as a huge one."""
    monkeypatch.setattr(remote_file, "_MIN_PIECE", 64 * KIB)
    monkeypatch.setattr(fetch, "_WRITE_BYTES", 16 * KIB)


@pytest.fixture(scope="module")
def model() -> bytes:
    """A model of 1 MiB. Readers ignore the padding after its last tensor."""
    return models.tiny_decoder().ljust(1024 * KIB, b"\0")


@pytest.fixture(scope="module")
def projector() -> bytes:
    return models.tiny_projector()


class Followed:
    """Records the messages and the progress of a download."""

    def __init__(self) -> None:
        self.choosing: Choosing | None = None
        self.messages: list[str] = []
        self.done: list[int] = []
        self.on_moved: Callable[[int], None] | None = None
        self.heard: Callable[[], None] = lambda: None

    def chosen(self, choosing: Choosing) -> None:
        self.choosing = choosing

    def moved(self, done_bytes: int) -> None:
        self.done.append(done_bytes)
        if self.on_moved is not None:
            self.on_moved(done_bytes)

    def say(self, text: str) -> None:
        self.messages.append(text)
        self.heard()

    @property
    def text(self) -> str:
        return "\n".join(self.messages)


class Puller:
    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.options: dict[str, Any] = {}
        self.followed = Followed()
        self.heard = asyncio.Event()

    async def pulled(self, ref: str) -> FetchedModel:
        self.followed = followed = Followed()
        parsed = parse_ref(ref, self.hub.url)
        assert parsed is not None
        options = {"endpoint": self.hub.url, "retry_policy": QUICK, **self.options}
        followed.heard = self.heard.set
        return await pull(parsed, DownloadOptions(folder=self.folder, **options), followed)

    def __call__(self, ref: str = "org/tiny-GGUF") -> FetchedModel:
        return asyncio.run(self.pulled(ref))

    def left(self) -> list[str]:
        """The names of all files in the models folder."""
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def puller(hub: Hub, tmp_path: Path, model: bytes) -> Puller:
    hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": model, "tiny-Q8_0.gguf": b"other", "README.md": b"#"}
    return Puller(hub, tmp_path / "models")


NAME = "tiny-Q4_K_M.gguf"
FINISHED = [f".{NAME}.origin.json", NAME]

# --- without faults -------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_model_is_downloaded_in_parallel_pieces(puller: Puller, model: bytes) -> None:
    fetched = puller()
    assert fetched.path == puller.folder / "org/tiny-GGUF" / NAME
    assert fetched == FetchedModel(fetched.path, (fetched.path,))
    assert fetched.path.read_bytes() == model
    assert read_model(fetched.path).architecture == "llama"
    assert len(puller.hub.parts()) == 16
    assert puller.left() == FINISHED
    assert puller.followed.done[-1] == len(model)
    assert puller.followed.choosing is not None
    assert puller.followed.choosing.name == "org/tiny-GGUF:Q4_K_M"


def test_present_files_are_not_downloaded_again(puller: Puller) -> None:
    first = puller()
    puller.hub.asked.clear()
    assert puller() == first
    assert puller.hub.paths() == ["/api/models/org/tiny-GGUF/tree/main"]
    assert puller.followed.choosing is not None
    assert puller.followed.choosing.missing == 0


def test_present_file_without_checksum_is_recognized_by_its_etag(puller: Puller, model: bytes) -> None:
    puller.hub.checksums = False
    puller()
    puller.hub.asked.clear()
    puller()
    assert puller.hub.parts() == []
    puller.hub.repos["org/tiny-GGUF"][NAME] = newer = model[:-4] + b"new!"
    assert puller().path.read_bytes() == newer


def test_second_process_downloads_after_the_first_one_failed(puller: Puller, model: bytes) -> None:
    path = puller.folder / "org/tiny-GGUF" / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"an older one")
    other = PartFile(path)

    async def act() -> None:
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(puller.pulled("org/tiny-GGUF"))
            while "downloads" not in puller.followed.text:
                puller.heard.clear()
                await puller.heard.wait()
            other.discard()
            await pulling

    asyncio.run(act())
    assert path.read_bytes() == model


def test_foreign_file_is_hashed_once(puller: Puller, model: bytes) -> None:
    path = puller.folder / "org/tiny-GGUF" / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(model)
    puller()
    assert "checking it" in puller.followed.text
    assert puller.hub.parts() == []
    puller()
    assert "checking" not in puller.followed.text


@pytest.mark.parametrize("other", [b"short", b"x" * 1024 * KIB])
def test_different_file_is_replaced(puller: Puller, model: bytes, other: bytes) -> None:
    path = puller.folder / "org/tiny-GGUF" / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(other)
    assert puller().path.read_bytes() == model
    assert "will be replaced" in puller.followed.text


def test_split_model_and_its_projector_are_downloaded(puller: Puller, tmp_path: Path) -> None:
    parts = {path.name: path.read_bytes() for path in models.write_split_decoder(tmp_path, "m-Q4_K_M")}
    projector = models.tiny_projector()
    puller.hub.repos["org/m-GGUF"] = {
        **{f"Q4_K_M/{name}": content for name, content in parts.items()},
        "mmproj-F16.gguf": projector,
        "mmproj-Q8_0.gguf": b"not this one",
    }
    fetched = puller("org/m-GGUF")
    folder = puller.folder / "org/m-GGUF/Q4_K_M"
    assert [part.read_bytes() for part in fetched.parts] == list(parts.values())
    assert fetched.mmproj == folder / "mmproj-F16.gguf"  # in the folder of the model, where plans look for it
    assert fetched.mmproj.read_bytes() == projector
    assert read_model(fetched.path).file_bytes > 0
    assert downloaded(parse_ref("org/m-GGUF:Q4_K_M"), puller.folder) == fetched  # type: ignore[arg-type]


@pytest.mark.check("X11", "once all are checked")
def test_files_of_a_model_appear_together(puller: Puller, tmp_path: Path) -> None:
    parts = {path.name: path.read_bytes() for path in models.write_split_decoder(tmp_path, "m-Q4_K_M")}
    puller.hub.repos["org/m-GGUF"] = dict(parts)
    last = list(parts)[-1]
    puller.hub.faults.append(Fault(last, times=99, status=503))
    with pytest.raises(DownloadFailed):
        puller("org/m-GGUF")
    assert [name for name in puller.left() if name.endswith(".gguf")] == []
    assert downloaded(parse_ref("org/m-GGUF"), puller.folder) is None  # type: ignore[arg-type]
    puller.hub.faults.clear()
    puller.hub.asked.clear()
    assert len(puller("org/m-GGUF").parts) == 3
    assert [path for path in puller.hub.paths() if path.endswith("00001-of-00003.gguf")] == [
        "/org/m-GGUF/resolve/main/m-Q4_K_M-00001-of-00003.gguf"
    ]  # only its metadata was requested


def test_list_of_a_thousand_files_is_read_in_pages(puller: Puller, model: bytes) -> None:
    many = {f"f{number:04}-Q2_K.gguf": b"x" for number in range(1000)}
    puller.hub.repos["org/many"] = {**many, NAME: model}
    puller.hub.page = 400
    assert puller("org/many").path.name == NAME
    assert len([path for path in puller.hub.paths() if path.startswith("/api/")]) == 3


@pytest.mark.check("X10")
def test_unicode_names_are_accepted_and_unsafe_ones_ignored(puller: Puller, model: bytes) -> None:
    puller.hub.repos["org/odd"] = {"モデル ü-Q4_K_M.gguf": model, "../../evil-Q4_K_M.gguf": model}
    assert puller("org/odd").path == puller.folder / "org/odd/モデル ü-Q4_K_M.gguf"
    with pytest.raises(UsageInvalid):
        puller("org/odd:../../evil-Q4_K_M.gguf")
    assert not (puller.folder.parent / "evil-Q4_K_M.gguf").exists()


@pytest.mark.check("X10")
def test_symlink_out_of_the_models_folder_is_refused(puller: Puller, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    puller.folder.mkdir()
    (puller.folder / "org").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderUnusable, match="out of the models folder"):
        puller()
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- broken connections ---------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_interrupted_pieces_continue_at_their_position(puller: Puller, model: bytes) -> None:
    puller.hub.faults += [Fault(NAME, times=5, cut_after=40 * KIB, only_parts=True)]
    assert puller().path.read_bytes() == model
    starts = [int(part[6:].split("-")[0]) for part in puller.hub.parts()]
    assert any(start % (64 * KIB) for start in starts)
    assert len(starts) == len(set(starts))  # continued after the last byte, not at the start of the piece
    assert "trying again" in puller.followed.text


@pytest.mark.usefixtures("small_pieces")
def test_retries_continue_while_there_is_progress(puller: Puller, model: bytes) -> None:
    puller.options["parallel"] = 1
    puller.hub.faults += [Fault(NAME, times=40, cut_after=32 * KIB, only_parts=True)]
    assert puller().path.read_bytes() == model


def test_stalled_server_is_given_up_and_bytes_are_kept(puller: Puller, model: bytes) -> None:
    puller.hub.faults += [
        Fault(NAME, hold_after=256 * KIB, only_parts=True),
        Fault(NAME, times=99, hold_after=0, only_parts=True),
    ]
    puller.options["retry_policy"] = replace(QUICK, attempts=2, stall_s=1.0)
    with pytest.raises(DownloadFailed, match="does not answer") as caught:
        puller()
    assert "the same command continues the download" in caught.value.remedy
    assert puller.left() == [f"{NAME}.part", f"{NAME}.part.json"]
    puller.hub.released.set()
    puller.hub.faults.clear()
    puller.hub.asked.clear()
    assert puller().path.read_bytes() == model
    assert int(puller.hub.parts()[0][6:].split("-")[0]) >= 256 * KIB
    assert puller.left() == FINISHED


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_server_is_retried(puller: Puller, status: int) -> None:
    for path in ("/tree/main", NAME):
        puller.hub.faults.append(Fault(path, times=2, status=status, headers={"Retry-After": "0"}))
    assert puller().path.exists()
    assert f"answered {status}" in puller.followed.text


def test_retry_after_is_respected_up_to_a_limit(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, status=429, headers={"Retry-After": "1"}))
    puller()
    assert "trying again in 1.0 s" in puller.followed.text
    puller.hub.faults.append(Fault("/tree/main", status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(DownloadFailed, match="requests a retry after 3600 s"):
        puller()


def test_broken_server_is_given_up(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, times=99, status=502))
    with pytest.raises(DownloadFailed, match=r"answered 502 \(3 times in a row\)"):
        puller()
    assert puller.left() == []


def test_refused_connection_is_an_error(puller: Puller) -> None:
    puller.hub.close()
    with pytest.raises(DownloadFailed, match=r"All connection attempts failed|refused"):
        puller()


def test_unknown_host_is_an_error(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOENT, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(DownloadFailed, match=r"cannot be resolved: .*Name or service not known") as caught:
        puller("https://nowhere.invalid/m.gguf")
    assert caught.value.message.count("https://") == 1


def test_hanging_lookup_times_out(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    began, released = threading.Event(), threading.Event()

    def hangs(*_: Any, **__: Any) -> Any:
        began.set()
        released.wait(PATIENCE_S)
        return []

    async def cancelled() -> None:
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(puller.pulled("https://slow.invalid/m.gguf"))
            await asyncio.to_thread(began.wait, 30)
            pulling.cancel()

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    asyncio.run(cancelled())  # waits for the threads of the loop's executor
    assert not released.is_set()
    monkeypatch.setattr(client, "_RESOLVE_TIMEOUT_S", 0.01)
    with pytest.raises(DownloadFailed, match="does not answer"):
        puller("https://slow.invalid/m.gguf")
    released.set()


# --- wrong bytes ----------------------------------------------------------------------------------


@pytest.mark.check("X11", "exit code 65")
def test_wrong_checksum_is_refused_and_deleted(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, times=99, change=lambda content: content[:-1] + b"x"))
    with pytest.raises(ModelInvalid, match="checksum") as caught:
        puller()
    assert caught.value.exit_code == 65
    assert puller.left() == []


@pytest.mark.check("X11")
def test_length_other_than_announced_is_refused(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, times=99, change=lambda content: content + b"more"))
    with pytest.raises(DownloadFailed, match="were announced"):
        puller()
    assert "reading the list of files again" in puller.followed.text


def test_list_is_read_again_if_the_repository_changes(puller: Puller, model: bytes) -> None:
    newer = model[:-4] + b"new!"
    shown = puller.hub.repos["org/tiny-GGUF"]

    def change(_: bytes) -> bytes:
        shown[NAME] = newer
        return newer + b"1"

    puller.hub.faults.append(Fault(NAME, change=change))
    assert puller().path.read_bytes() == newer


@pytest.mark.check("X11")
@pytest.mark.usefixtures("small_pieces")
def test_file_that_changes_between_pieces_starts_over(puller: Puller, model: bytes) -> None:
    puller.hub.checksums = False
    newer = bytes(reversed(model[-KIB:])) + b"n"
    changed = model[: -len(newer)] + newer
    shown = puller.hub.repos["org/tiny-GGUF"]
    puller.options["parallel"] = 1

    def change(content: bytes) -> bytes:
        shown[NAME] = changed
        return content

    puller.hub.faults.append(Fault(NAME, change=change, only_parts=True))
    assert puller().path.read_bytes() == changed
    assert "changed on the server; the download starts over" in puller.followed.text
    assert "no checksum" in (puller.followed.choosing or Choosing("", (), 0, 0, "")).notes[0]


@pytest.mark.usefixtures("small_pieces")
def test_file_that_keeps_changing_is_given_up(puller: Puller) -> None:
    puller.hub.checksums = False
    numbers = iter(range(1000))
    puller.hub.faults.append(
        Fault(NAME, times=999, change=lambda content: content[:-8] + b"%8d" % next(numbers))
    )
    with pytest.raises(DownloadFailed, match="changed during two downloads in a row"):
        puller()


@pytest.mark.check("X11", "exit code 65")
def test_complete_file_that_is_not_a_model_is_refused(puller: Puller) -> None:
    puller.hub.repos["org/tiny-GGUF"][NAME] = b"<html>" * 1000
    with pytest.raises(ModelInvalid):
        puller()
    assert puller.left() == []


def test_complete_file_with_a_truncated_model_is_refused(puller: Puller) -> None:
    puller.hub.repos["org/tiny-GGUF"][NAME] = models.truncated_decoder()
    with pytest.raises(ModelInvalid):
        puller()
    assert puller.left() == []


def test_invalid_projector_is_refused_before_the_model_is_downloaded(puller: Puller, model: bytes) -> None:
    puller.hub.repos["org/m"] = {"m-Q4_K_M.gguf": model, "mmproj-F16.gguf": b"<html>" * 1000}
    with pytest.raises(ModelInvalid):
        puller("org/m")
    assert [path for path in puller.hub.paths() if path.endswith("m-Q4_K_M.gguf")] == []
    assert puller.left() == []


def test_invalid_first_part_is_refused_before_the_others(puller: Puller, tmp_path: Path) -> None:
    parts = {path.name: path.read_bytes() for path in models.write_split_decoder(tmp_path, "m-Q4_K_M")}
    first, *others = parts
    shown = puller.hub.repos["org/m"] = {
        **parts,
        first: b"<html>" * 1000,
        "mmproj-F16.gguf": models.tiny_projector(),
    }
    with pytest.raises(ModelInvalid):
        puller("org/m")
    assert not any(path.endswith(tuple(others)) for path in puller.hub.paths())
    assert puller.left() == ["mmproj-F16.gguf.part", "mmproj-F16.gguf.part.json"]
    shown[first] = parts[first]
    puller.hub.asked.clear()
    assert puller("org/m").mmproj is not None
    fetched = [request.path for request in puller.hub.asked if request.range not in (None, "bytes=0-0")]
    assert not any(path.endswith("mmproj-F16.gguf") for path in fetched)


def test_parts_of_two_models_are_refused(puller: Puller, tmp_path: Path) -> None:
    first, second, third = models.write_split_decoder(tmp_path, "m-Q4_K_M")
    puller.hub.repos["org/m"] = {
        first.name: first.read_bytes(),
        second.name: third.read_bytes(),
        third.name: second.read_bytes(),
    }
    with pytest.raises(ModelInvalid, match="the header says part 3 of 3, but the name says part 2 of 3"):
        puller("org/m")
    assert puller.left() == []


def test_compressed_response_is_refused(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, times=9, status=200, headers={"Content-Encoding": "gzip"}))
    with pytest.raises(DownloadFailed, match="content encoding 'gzip'"):
        puller()


# --- servers without ranges -----------------------------------------------------------------------


def test_server_without_ranges_sends_the_whole_file(puller: Puller, model: bytes) -> None:
    puller.hub.ranges = False
    assert puller().path.read_bytes() == model
    assert puller.hub.parts() == []


@pytest.mark.usefixtures("small_pieces")
def test_long_answer_is_written_while_it_arrives(puller: Puller) -> None:
    puller.hub.ranges = False
    puller()
    steps = [after - before for before, after in itertools.pairwise(puller.followed.done)]
    assert max(steps) < 128 * KIB  # of 1 MiB: _WRITE_BYTES, and what one read of the socket adds


def test_interrupted_download_without_ranges_starts_over(puller: Puller, model: bytes) -> None:
    puller.hub.ranges = False
    puller.hub.faults.append(Fault(NAME, times=0))
    cut = Fault(NAME, cut_after=700 * KIB, times=2)  # the first one is the request for its metadata
    puller.hub.faults.append(cut)
    assert puller().path.read_bytes() == model
    assert puller.left() == FINISHED


def test_unknown_length_is_that_of_the_body(puller: Puller, model: bytes) -> None:
    puller.hub.ranges = puller.hub.lengths = False
    puller.hub.plain["/files/m.gguf"] = model
    puller.options |= {"private_addresses": True, "allow_http": True}
    fetched = puller(f"{puller.hub.cdn}/files/m.gguf")
    assert fetched.path.read_bytes() == model
    port = puller.hub.cdn.rsplit(":", 1)[1]
    assert fetched.path == puller.folder / f"@127.0.0.1_{port}" / "files" / "m.gguf"


# --- continued downloads --------------------------------------------------------------------------


async def cancelled_when(puller: Puller, ref: str, done_bytes: int) -> None:
    """Pull, and cancel the download after ``done_bytes``."""
    task = asyncio.ensure_future(puller.pulled(ref))  # noqa: TID251 - a test's own
    await asyncio.sleep(0)

    def moved(now: int) -> None:
        if now >= done_bytes:
            task.cancel()

    puller.followed.on_moved = moved
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.check("X11")
@pytest.mark.usefixtures("small_pieces")
def test_cancelled_download_continues(puller: Puller, model: bytes) -> None:
    asyncio.run(cancelled_when(puller, "org/tiny-GGUF", 500 * KIB))
    assert puller.left() == [f"{NAME}.part", f"{NAME}.part.json"]
    record = json.loads((puller.folder / f"org/tiny-GGUF/{NAME}.part.json").read_bytes())
    kept = remote_file.total(tuple((start, end) for start, end in record["done"]))
    assert kept >= 500 * KIB
    puller.hub.asked.clear()
    assert puller().path.read_bytes() == model
    asked_bytes = sum(
        int(part[6:].split("-")[1]) - int(part[6:].split("-")[0]) + 1 for part in puller.hub.parts()
    )
    assert asked_bytes == len(model) - kept
    assert puller.left() == FINISHED


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("checksums", [True, False])
def test_kept_bytes_of_a_changed_file_are_dropped_with_a_message(
    puller: Puller, model: bytes, checksums: bool
) -> None:
    puller.hub.checksums = checksums
    asyncio.run(cancelled_when(puller, "org/tiny-GGUF", 500 * KIB))
    newer = model[:-4] + b"new!"
    puller.hub.repos["org/tiny-GGUF"][NAME] = newer
    assert puller().path.read_bytes() == newer
    assert "; the download starts over" in puller.followed.text


@pytest.mark.usefixtures("small_pieces")
def test_without_checksum_and_etag_the_download_starts_over(puller: Puller, model: bytes) -> None:
    puller.hub.checksums = puller.hub.etags = False
    asyncio.run(cancelled_when(puller, "org/tiny-GGUF", 500 * KIB))
    assert puller().path.read_bytes() == model
    assert "gives no checksum or ETag to compare" in puller.followed.text


@pytest.mark.check("X11")
@pytest.mark.usefixtures("small_pieces")
def test_two_versions_of_a_file_are_never_mixed(puller: Puller, model: bytes) -> None:
    puller.hub.checksums = puller.hub.etags = False
    newer = model[: 64 * KIB] + b"1" * (len(model) - 64 * KIB)

    reads = itertools.count()
    puller.hub.faults.append(Fault(NAME, times=99, change=lambda old: old if next(reads) < 5 else newer))
    assert puller().path.read_bytes() in (model, newer)


@pytest.mark.usefixtures("small_pieces")
def test_damaged_bytes_are_downloaded_again(puller: Puller, model: bytes) -> None:
    asyncio.run(cancelled_when(puller, "org/tiny-GGUF", 500 * KIB))
    part = puller.folder / f"org/tiny-GGUF/{NAME}.part"
    with part.open("r+b") as file:
        file.write(b"damaged")
    assert puller().path.read_bytes() == model
    assert "are damaged; the download starts over" in puller.followed.text


@pytest.mark.parametrize("record", [b"", b"{", b'{"done":[[5,1]]}', b'{"size":1048576,"done":[[0,9999999]]}'])
def test_invalid_record_is_ignored(puller: Puller, model: bytes, record: bytes) -> None:
    folder = puller.folder / "org/tiny-GGUF"
    folder.mkdir(parents=True)
    (folder / f"{NAME}.part").write_bytes(b"leftover")
    (folder / f"{NAME}.part.json").write_bytes(record)
    assert puller().path.read_bytes() == model


@pytest.mark.check("X11")
@pytest.mark.parametrize("record", [b"", b'{"size":8,"done":[[0,8]]}'])
def test_symlink_in_place_of_the_part_file_is_refused(puller: Puller, tmp_path: Path, record: bytes) -> None:
    folder = puller.folder / "org/tiny-GGUF"
    folder.mkdir(parents=True)
    (tmp_path / "victim").write_bytes(b"precious")
    (folder / f"{NAME}.part").symlink_to(tmp_path / "victim")
    (folder / f"{NAME}.part.json").write_bytes(record)
    with pytest.raises(FolderUnusable):
        puller()
    assert (tmp_path / "victim").read_bytes() == b"precious"


# --- concurrent downloads -------------------------------------------------------------------------


def test_second_process_waits_and_uses_the_download_of_the_first(puller: Puller, model: bytes) -> None:
    first, second = Puller(puller.hub, puller.folder), Puller(puller.hub, puller.folder)
    puller.hub.faults.append(Fault(NAME, hold_after=100 * KIB, only_parts=True))

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first.pulled("org/tiny-GGUF"))
            await asyncio.to_thread(puller.hub.held.wait)
            waiting = tasks.create_task(second.pulled("org/tiny-GGUF"))
            await asyncio.wait_for(second.heard.wait(), PATIENCE_S)
            assert not waiting.done()
            puller.hub.released.set()

    asyncio.run(both())
    assert f"process {os.getpid()} already downloads {NAME}" in second.followed.text
    assert (puller.folder / "org/tiny-GGUF" / NAME).read_bytes() == model
    assert len(puller.hub.parts()) == 1
    assert puller.left() == FINISHED


def test_second_process_uses_all_files_of_the_first(puller: Puller, model: bytes) -> None:
    puller.hub.repos["org/m"] = {"m-Q4_K_M.gguf": model, "mmproj-F16.gguf": models.tiny_projector()}
    first, second = Puller(puller.hub, puller.folder), Puller(puller.hub, puller.folder)
    puller.hub.faults.append(Fault("mmproj-F16.gguf", hold_after=100, only_parts=True))

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first.pulled("org/m"))
            await asyncio.to_thread(puller.hub.held.wait)
            tasks.create_task(second.pulled("org/m"))
            await asyncio.wait_for(second.heard.wait(), PATIENCE_S)
            puller.hub.released.set()

    asyncio.run(both())
    assert "waiting for it" in second.followed.text
    assert len(puller.hub.parts()) == 2
    assert len(puller.left()) == 4  # two files, each with a record of its origin


def test_part_file_is_locked(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "m.gguf")
    with pytest.raises(Busy) as caught:
        PartFile(tmp_path / "m.gguf")
    assert caught.value.pid == os.getpid()
    part.keep()
    PartFile(tmp_path / "m.gguf").discard()
    assert list(tmp_path.iterdir()) == []


def test_late_save_leaves_no_record_of_a_published_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = PartFile(tmp_path / "m.gguf")
    part.write(0, b"content")
    syncing, published = threading.Event(), threading.Event()
    real = os.fsync

    def slow(fd: int) -> None:
        real(fd)
        if threading.current_thread() is not threading.main_thread():
            syncing.set()
            published.wait(PATIENCE_S)

    monkeypatch.setattr(os, "fsync", slow)
    saving = threading.Thread(target=part.save)
    saving.start()
    assert syncing.wait(PATIENCE_S)
    part.publish("https://h/m.gguf")
    published.set()
    saving.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.gguf.origin.json", "m.gguf"]


# --- full disks and permissions -------------------------------------------------------------------


def test_full_disk_is_reported_before_the_download(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 500 * KIB

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(DiskFull, match=r"needs 1\.0 MiB more.*500 KiB free") as caught:
        puller()
    assert caught.value.exit_code == 71
    assert puller.hub.parts() == []


@pytest.mark.usefixtures("small_pieces")
def test_bytes_are_kept_if_the_disk_fills_up(
    puller: Puller, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [300 * KIB]

    def write(fd: int, content: Any) -> int:
        if len(content) >= 16 * KIB:
            if room[0] <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= len(content)
        return real(fd, content)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFull, match="No space left"):
        puller()
    assert puller.left() == [f"{NAME}.part", f"{NAME}.part.json"]
    room[0] = 10**9
    puller.hub.asked.clear()
    assert puller().path.read_bytes() == model
    assert len(puller.hub.parts()) < 16


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder_is_an_error(puller: Puller) -> None:
    puller.folder.mkdir(mode=0o500)
    with pytest.raises(FolderUnusable, match="cannot be written"):
        puller()


def test_file_in_place_of_a_folder_is_an_error(puller: Puller) -> None:
    puller.folder.mkdir()
    (puller.folder / "org").write_text("in the way")
    with pytest.raises((FolderUnusable, DownloadFailed), match="cannot be written"):
        puller()


# --- access ---------------------------------------------------------------------------------------


def test_gated_repository_needs_access_and_a_token(puller: Puller) -> None:
    puller.hub.gated.add("org/tiny-GGUF")
    puller.hub.token = "hf_secret"
    with pytest.raises(AccessDenied, match="gated") as caught:
        puller()
    assert f"{puller.hub.url}/org/tiny-GGUF" in caught.value.remedy
    assert "HF_TOKEN" in caught.value.remedy
    puller.options["token"] = "hf_secret"
    assert puller().path.exists()


def test_missing_repository_revision_or_file_is_an_error(puller: Puller) -> None:
    with pytest.raises(AccessDenied, match="The repository org/none does not exist or is private"):
        puller("org/none")
    with pytest.raises(ModelMissing, match="The revision 'v9'"):
        puller(f"{puller.hub.url}/org/tiny-GGUF/resolve/v9/{NAME}")
    with pytest.raises(ModelMissing, match="has no quantization Q2_K"):
        puller("org/tiny-GGUF:Q2_K")


@pytest.mark.check("X11")
def test_redirect_targets_get_no_token(puller: Puller) -> None:
    puller.hub.gated.add("org/tiny-GGUF")
    puller.hub.token = puller.options["token"] = "hf_secret"
    puller.hub.redirects_to_cdn = True
    puller.options |= {"private_addresses": True, "allow_http": True}
    assert puller().path.exists()
    requests = {
        server: [request for request in puller.hub.asked if request.server == server]
        for server in ("hub", "cdn")
    }
    assert {request.headers.get("authorization") for request in requests["hub"]} == {"Bearer hf_secret"}
    assert requests["cdn"]
    assert all("authorization" not in request.headers for request in requests["cdn"])
    assert "hf_secret" not in repr(DownloadOptions(folder=Path(), token="hf_secret"))


@pytest.mark.check("X13")
def test_messages_have_no_signatures_or_tokens(puller: Puller, caplog: pytest.LogCaptureFixture) -> None:
    puller.hub.redirects_to_cdn = True
    puller.options |= {"private_addresses": True, "allow_http": True, "token": "hf_secret"}
    puller.hub.faults.append(Fault(NAME, times=99, server="cdn", status=503))
    with pytest.raises(DownloadFailed) as caught:
        puller()
    said = f"{puller.followed.text} {caught.value} {caught.value.remedy}"
    assert "/blobs/" in said
    assert "X-Signature" not in said
    assert "hf_secret" not in said


# --- redirects and addresses ----------------------------------------------------------------------


@pytest.mark.check("X11", "exit code 78, no connection")
def test_redirect_to_a_private_address_is_refused(puller: Puller) -> None:
    puller.hub.redirects_to_cdn = True
    puller.options["allow_http"] = True
    with pytest.raises(DownloadRefused, match=r"the private address 127\.0\.0\.1") as caught:
        puller()
    assert caught.value.exit_code == 78
    assert puller.hub.paths("cdn") == []


@pytest.mark.check("X11", "exit code 78, no connection")
@pytest.mark.parametrize("target", ["http://[::1]/x.gguf", "http://0.0.0.0/x", "http://2130706433/x"])
def test_all_notations_of_private_addresses_are_refused(puller: Puller, target: str) -> None:
    puller.hub.faults.append(Fault(NAME, redirect=target))
    puller.options["allow_http"] = True
    with pytest.raises(DownloadRefused, match="the private address"):
        puller()


@pytest.mark.check("X11", "exit code 78, no connection")
def test_redirect_to_plain_http_is_refused(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, redirect="http://example.com/x.gguf?sig=secret"))
    with pytest.raises(DownloadRefused, match="plain http") as caught:
        puller()
    assert "secret" not in caught.value.message


@pytest.mark.check("X11", "exit code 78, no connection")
@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://h/x", "https:///x", "https://xn--a/", "https://h:99999/x"]
)
def test_redirect_to_another_scheme_is_refused(puller: Puller, target: str) -> None:
    puller.hub.faults.append(Fault(NAME, redirect=target))
    with pytest.raises((DownloadRefused, DownloadFailed)):
        puller()


def test_circular_redirects_end(puller: Puller) -> None:
    puller.hub.faults.append(Fault(NAME, times=99, redirect=f"/org/tiny-GGUF/resolve/main/{NAME}"))
    with pytest.raises(DownloadFailed, match="redirected 8 times"):
        puller()


@pytest.mark.check("X11", "the checked address is used")
def test_name_is_resolved_once(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the name is public at the check, and would be private at the connect."""
    real = socket.getaddrinfo
    answers = iter([["8.8.8.8"], ["127.0.0.1"]])
    looked_up: list[str] = []
    connected: list[str] = []

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host == "rebinding.example":
            looked_up.append(host)
            return [(0, 0, 0, "", (address, port)) for address in next(answers)]
        connected.append(host)
        if host == "8.8.8.8":
            raise OSError(errno.ENETUNREACH, "no network in a test")
        return real(host, port, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    puller.options["allow_http"] = True
    with pytest.raises(DownloadFailed):
        puller(f"http://rebinding.example:{puller.hub.cdn.rsplit(':', 1)[1]}/m.gguf")
    assert looked_up == ["rebinding.example"]  # three attempts use one lookup
    assert "127.0.0.1" not in connected
    assert puller.hub.paths("cdn") == []


@pytest.mark.check("X11")
def test_certificate_of_another_name_is_refused(
    puller: Puller, certificate: tuple[str, str], model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection uses the checked address, and the certificate must have the name."""
    chain, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    server = puller.hub.servers[1]
    server.socket = context.wrap_socket(server.socket, server_side=True)
    port = server.server_port
    puller.hub.plain["/m.gguf"] = model
    puller.options["private_addresses"] = True
    with pytest.raises(DownloadFailed, match="is not trusted") as caught:
        puller(f"https://localhost:{port}/m.gguf")
    assert "SSL_CERT_FILE" in caught.value.remedy
    monkeypatch.setenv("SSL_CERT_FILE", chain)
    assert puller(f"https://localhost:{port}/m.gguf").path.read_bytes() == model
    real = client._resolve

    async def look_up(host: str, at: int) -> list[str]:
        return await real("localhost" if host == "other.example" else host, at)

    monkeypatch.setattr(client, "_resolve", look_up)
    with pytest.raises(DownloadFailed, match="is not trusted"):
        puller(f"https://other.example:{port}/m.gguf")


@pytest.mark.check("X11")
def test_environment_proxy_does_not_reach_private_addresses(
    puller: Puller, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller.hub.plain["/m.gguf"] = model
    monkeypatch.setenv("http_proxy", puller.hub.cdn)
    puller.options["allow_http"] = True
    assert puller("http://files.example/m.gguf").path.read_bytes() == model
    assert puller.hub.asked[-1].headers["host"] == "files.example"
    with pytest.raises(DownloadRefused, match=r"10\.0\.0\.1"):
        puller("http://10.0.0.1/m.gguf")


@pytest.mark.check("X11")
def test_local_hosts_bypass_the_proxy(puller: Puller, model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert puller().path.read_bytes() == model


def test_proxy_may_be_host_and_port(puller: Puller, model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    puller.hub.plain["/m.gguf"] = model
    monkeypatch.setenv("http_proxy", puller.hub.cdn.removeprefix("http://"))
    puller.options["allow_http"] = True
    assert puller("http://files.example/m.gguf").path.read_bytes() == model


@pytest.mark.parametrize("proxy", ["gopher://u:secret@proxy:1", "http://u:secret@proxy:port"])
def test_unusable_proxy_is_an_error(puller: Puller, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    puller.options["allow_http"] = True
    with pytest.raises(DownloadFailed, match="proxy that the environment sets") as caught:
        puller("http://files.example/m.gguf")
    assert "http_proxy" in caught.value.remedy
    assert "secret" not in str(caught.value)


# --- URLs -----------------------------------------------------------------------------------------


def test_url_with_and_without_a_checksum(puller: Puller, model: bytes) -> None:
    import hashlib

    puller.hub.plain["/a b/m.gguf"] = model
    puller.options |= {"private_addresses": True, "allow_http": True}
    digest = hashlib.sha256(model).hexdigest()
    url = f"{puller.hub.cdn}/a%20b/m.gguf"
    assert puller(f"{url}?X-Signature=secret#sha256={digest}").path.read_bytes() == model
    origin = json.loads((next(puller.folder.rglob(".*.origin.json"))).read_bytes())
    assert origin["url"] == url
    with pytest.raises(ModelInvalid, match="checksum"):
        puller(f"{url}#sha256={'0' * 64}")
    puller.hub.plain["/a b/m.gguf"] = newer = model[:-1] + b"1"
    assert puller(url).path.read_bytes() == newer
    assert any("#sha256" in note for note in (puller.followed.choosing or Choosing("", (), 0, 0, "")).notes)


@pytest.mark.check("X11", "before the first byte")
def test_checksum_in_a_url_of_the_hub_is_compared(puller: Puller, model: bytes) -> None:
    import hashlib

    digest = hashlib.sha256(model).hexdigest()
    url = f"{puller.hub.url}/org/tiny-GGUF/resolve/main/{NAME}"
    with pytest.raises(ModelInvalid, match=f"checksum {digest}") as caught:
        puller(f"{url}#sha256={'0' * 64}")
    assert caught.value.remedy
    assert puller.hub.parts() == []
    puller.hub.checksums = False  # the checksum of the received bytes is compared
    with pytest.raises(ModelInvalid, match="checksum"):
        puller(f"{url}#sha256={'0' * 64}")
    assert puller.left() == []
    assert puller(f"{url}#sha256={digest}").path.read_bytes() == model


def test_checksum_for_a_split_model_is_refused(puller: Puller, tmp_path: Path) -> None:
    parts = models.write_split_decoder(tmp_path, "m-Q4_K_M")
    puller.hub.repos["org/m"] = {path.name: path.read_bytes() for path in parts}
    with pytest.raises(UsageInvalid, match="one of 3 files"):
        puller(f"{puller.hub.url}/org/m/resolve/main/{parts[0].name}#sha256={'0' * 64}")


def found(puller: Puller, ref: str) -> str | None:
    """The file that is used for ``ref`` without a request."""
    parsed = parse_ref(ref, puller.hub.url)
    assert parsed is not None
    model = downloaded(parsed, puller.folder)
    return model.path.relative_to(puller.folder).as_posix() if model else None


def test_similar_name_is_found_after_its_download(puller: Puller, model: bytes) -> None:
    puller.hub.repos["o/u"] = {"m-UD-Q4_K_M.gguf": model}
    puller.hub.repos["o/q"] = {"q4/m.gguf": model, "q8/m.gguf": model + b"8"}
    puller("o/u")
    puller("o/q:q4/m.gguf")
    assert found(puller, "o/u:UD-Q4_K_M") == "o/u/m-UD-Q4_K_M.gguf"
    assert found(puller, "o/u:Q4_K_M") is None  # the repository may have exactly this quantization
    assert found(puller, "o/q:q8/m.gguf") is None
    with pytest.raises(ModelMissing):
        to_remove(["o/q:q8/m.gguf"], puller.folder, puller.hub.url)
    puller("o/u:Q4_K_M")
    assert found(puller, "o/u:Q4_K_M") == "o/u/m-UD-Q4_K_M.gguf"
    assert found(puller, "o/q:q4/m.gguf") == "o/q/q4/m.gguf"
    assert found(puller, "o/q") == "o/q/q4/m.gguf"


def test_named_revision_must_match(puller: Puller, model: bytes) -> None:
    commit = f"{puller.hub.url}/org/tiny-GGUF/resolve/0123456/{NAME}"
    path = puller().path
    assert found(puller, commit) is None
    puller.hub.revisions.add("0123456")
    puller.hub.asked.clear()
    assert puller(commit).path == path
    assert puller.hub.parts() == []  # the same file
    assert found(puller, commit) == found(puller, "org/tiny-GGUF") == f"org/tiny-GGUF/{NAME}"
    path.write_bytes(model[:-4] + b"new!")  # another program changed it
    assert found(puller, commit) is None


def test_query_of_a_url_must_match(puller: Puller, model: bytes) -> None:
    import hashlib

    puller.hub.plain["/m.gguf"] = model
    puller.options |= {"private_addresses": True, "allow_http": True}
    url = f"{puller.hub.cdn}/m.gguf"
    digest = hashlib.sha256(model).hexdigest()
    puller(f"{url}?version=1")
    assert found(puller, f"{url}?version=1") == found(puller, url) is not None
    assert found(puller, f"{url}?version=2") is None
    assert found(puller, f"{url}#sha256={digest}") is None  # no download has compared the checksum
    puller.hub.asked.clear()
    puller(f"{url}#sha256={digest}")
    assert puller.hub.parts() == []
    assert "checking it" in puller.followed.text
    assert found(puller, f"{url}#sha256={digest}") == found(puller, url)
    assert found(puller, f"{url}#sha256={'0' * 64}") is None
    with pytest.raises(ModelInvalid, match="checksum"):
        puller(f"{url}#sha256={'0' * 64}")
    assert found(puller, f"{url}#sha256={digest}")  # the present file stays


def test_etag_does_not_replace_a_checksum(puller: Puller, model: bytes) -> None:
    puller.hub.plain["/m.gguf"] = model
    puller.options |= {"private_addresses": True, "allow_http": True}
    puller(f"{puller.hub.cdn}/m.gguf")
    with pytest.raises(ModelInvalid, match="checksum"):
        puller(f"{puller.hub.cdn}/m.gguf#sha256={'0' * 64}")


def test_without_size_and_checksum_a_file_is_never_up_to_date(puller: Puller, model: bytes) -> None:
    puller.hub.plain["/m.gguf"] = model
    puller.hub.etags = False
    puller.options |= {"private_addresses": True, "allow_http": True}
    for said in ("", "gives no checksum or ETag to compare"):
        puller(f"{puller.hub.cdn}/m.gguf")
        assert said in puller.followed.text


def test_unreadable_model_is_not_found(tmp_path: Path) -> None:
    put(tmp_path / "o/r/m.gguf")
    (tmp_path / "o/r/circle.gguf").symlink_to("circle.gguf")
    (tmp_path / "@h").mkdir()
    (tmp_path / "@h/m.gguf").symlink_to("m.gguf")
    model, nowhere = parse_ref("o/r"), parse_ref("https://h/m.gguf")
    assert model is not None
    assert nowhere is not None
    assert downloaded(model, tmp_path) == FetchedModel(tmp_path / "o/r/m.gguf", (tmp_path / "o/r/m.gguf",))
    assert downloaded(nowhere, tmp_path) is None


def test_all_parts_of_a_url_are_downloaded(puller: Puller, tmp_path: Path) -> None:
    for path in models.write_split_decoder(tmp_path, "m"):
        puller.hub.plain[f"/{path.name}"] = path.read_bytes()
    puller.options |= {"private_addresses": True, "allow_http": True}
    fetched = puller(f"{puller.hub.cdn}/m-00002-of-00003.gguf")
    assert [part.name[2:7] for part in fetched.parts] == ["00001", "00002", "00003"]
    ref = parse_ref(f"{puller.hub.cdn}/m-00001-of-00003.gguf")
    assert ref is not None
    assert downloaded(ref, puller.folder) == fetched


# --- settings of the hub --------------------------------------------------------------------------


def test_sources_of_the_token(tmp_path: Path) -> None:
    home = tmp_path / "hf"
    home.mkdir()
    (home / "token").write_text("hf_usual\n")
    (tmp_path / "named").write_text("hf_named")
    (tmp_path / "given").write_text("hf_given")
    environ = {"HF_HOME": str(home)}
    assert hub_token({"HF_HOME": str(tmp_path)}) is None
    assert hub_token(environ) == "hf_usual"
    environ["HF_TOKEN_PATH"] = str(tmp_path / "named")
    assert hub_token(environ) == "hf_named"
    environ["HF_TOKEN"] = " hf_variable "
    assert hub_token(environ) == "hf_variable"
    assert hub_token(environ, tmp_path / "given") == "hf_given"
    (tmp_path / "given").write_text("two words")
    for wrong in (tmp_path / "given", tmp_path / "none"):
        with pytest.raises(ConfigInvalid) as caught:
            hub_token(environ, wrong)
        assert "two words" not in caught.value.message


def test_sources_of_the_endpoint() -> None:
    assert hub_endpoint({}) == "https://huggingface.co"
    assert hub_endpoint({"HF_ENDPOINT": "https://mirror/"}) == "https://mirror"
    assert hub_endpoint({"HF_ENDPOINT": "https://mirror"}, "https://given/hf") == "https://given/hf"
    for wrong in ("mirror", "https://", "ftp://h", "https://u:secret@h", "https://h?token=secret"):
        with pytest.raises(UsageInvalid) as caught:
            hub_endpoint({}, wrong)
        assert "secret" not in caught.value.message


@pytest.mark.check("X11", "exit code 75")
@pytest.mark.parametrize("depth", [1, 1_100, 100_000])
@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b'[{"path":"m.gguf","x":', b"}]")])
def test_deeply_nested_arrays_are_an_invalid_file_list(
    puller: Puller, depth: int, before: bytes, after: bytes
) -> None:
    puller.hub.list_body = before + b"[" * depth + b"]" * depth + after
    puller.hub.list_body += b"!"  # makes shallow arrays invalid too
    with pytest.raises(DownloadFailed, match="The list of files from the hub is invalid") as caught:
        puller()
    assert caught.value.exit_code == 75


# --- removal --------------------------------------------------------------------------------------


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def gone(folder: Path, name: str) -> list[str]:
    for removal in to_remove([name], folder, "https://huggingface.co"):
        remove(removal, folder)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def unfinished(path: Path) -> Path:
    """Leave the files of an interrupted download of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = PartFile(path)
    part.write(0, b"some")
    part.keep()
    return part.path


def test_removal_includes_parts_and_the_unused_projector(
    tmp_path: Path, model: bytes, projector: bytes
) -> None:
    record = msgspec.json.encode(Origin("https://h/m", 1, 1))
    put(tmp_path / "o/r/m-Q4_K_M.gguf", model)
    put(tmp_path / "o/r/mmproj-F16.gguf", projector)
    for path in models.write_split_decoder(tmp_path / "o/r", "m-Q8_0", 2):
        put(path.with_name(f".{path.name}.origin.json"), record)
    assert gone(tmp_path, "o/r:Q8_0") == ["o/r/m-Q4_K_M.gguf", "o/r/mmproj-F16.gguf"]
    assert gone(tmp_path, "o/r") == []
    assert list(tmp_path.iterdir()) == []  # the folders are removed too
    assert tmp_path.exists()


def test_removal_of_several_models_counts_the_projector_once(
    tmp_path: Path, model: bytes, projector: bytes
) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"):
        put(tmp_path / "o/r" / name, projector if name.startswith("mmproj") else model)
    names = ["o/r:Q4_K_M", "o/r/m-Q4_K_M.gguf", "o/r:Q8_0", "o/r:Q8_0"]
    removals = to_remove(names, tmp_path, "https://huggingface.co")
    assert [[path.name for path in removal.files] for removal in removals] == [
        ["m-Q4_K_M.gguf"],
        ["m-Q8_0.gguf", "mmproj-F16.gguf"],
    ]
    assert sum(removal.size_bytes for removal in removals) == 2 * len(model) + len(projector)
    for removal in removals:
        remove(removal, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_model_is_removed_by_the_path_of_any_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (1, 2):
        put(tmp_path / f"o/r/m-0000{part}-of-00002.gguf")
    assert gone(tmp_path, "o/r/m-00002-of-00002.gguf") == []
    put(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    assert gone(tmp_path, "./m.gguf") == []


def test_unfinished_download_can_be_removed(tmp_path: Path) -> None:
    part = PartFile(put(tmp_path / "o/r/m-Q4_K_M.gguf.x").with_name("m-Q4_K_M.gguf"))
    (tmp_path / "o/r/m-Q4_K_M.gguf.x").unlink()
    part.write(0, b"some")
    with pytest.raises(UsageInvalid, match=f"downloaded by process {os.getpid()}"):
        gone(tmp_path, "o/r")
    part.keep()
    with pytest.raises(ModelMissing):
        gone(tmp_path, "o/r:Q8_0")
    assert gone(tmp_path, "o/r:Q4_K_M") == []
    unfinished(tmp_path / "@h/m.gguf")
    assert gone(tmp_path, "https://h/m.gguf") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.check("X10")
def test_rm_removes_a_part_file_only_with_our_record_of_it(tmp_path: Path) -> None:
    put(tmp_path / "o/r/film.mkv.part", b"a browser's")
    put(tmp_path / "o/r/m-Q4_K_M.gguf")
    put(tmp_path / "o/r/m-Q4_K_M.gguf.part", b"a browser's")
    put(tmp_path / "o/r/m-Q4_K_M.gguf.part.json", b'{"ours": false}')
    put(tmp_path / "o/r/.m-Q4_K_M.gguf.origin.json", b"a note")
    theirs = ["o/r/.m-Q4_K_M.gguf.origin.json", "o/r/film.mkv.part"]
    theirs += ["o/r/m-Q4_K_M.gguf.part", "o/r/m-Q4_K_M.gguf.part.json"]
    assert gone(tmp_path, "o/r") == theirs
    with pytest.raises(ModelMissing):
        gone(tmp_path, "o/r")
    unfinished(tmp_path / "o/r/m-Q8_0.gguf")
    assert gone(tmp_path, "o/r") == theirs


@pytest.mark.check("X10")
def test_pull_does_not_write_to_a_part_file_with_a_second_hard_link(tmp_path: Path) -> None:
    target = tmp_path / "o/r/m.gguf"
    part = unfinished(target)
    (tmp_path / "copy").hardlink_to(part)
    resumed = PartFile(target)
    assert resumed.done_bytes == 0
    resumed.write(0, b"else")
    resumed.keep()
    assert part.read_bytes() == b"else"
    assert (tmp_path / "copy").read_bytes() == b"some"

    (tmp_path / "other").hardlink_to(part)
    assert gone(tmp_path, "o/r") == ["copy", "other"]
    assert (tmp_path / "other").read_bytes() == b"else"


def test_file_system_without_link_counts_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat = os.fstat
    calls = itertools.count()

    def without_links(fd: int) -> os.stat_result:
        assert next(calls) < 100
        status = list(fstat(fd))
        status[stat.ST_NLINK] = 0
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", without_links)
    part = PartFile(tmp_path / "m.gguf")
    part.write(0, b"some")
    part.keep()
    assert (tmp_path / "m.gguf.part").read_bytes() == b"some"


@pytest.mark.check("X10")
def test_nothing_outside_the_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    outside = put(tmp_path / "outside.gguf")
    put(folder / "o/r/m.gguf")
    (folder / "link").symlink_to(tmp_path)
    part = unfinished(tmp_path / "elsewhere/m.gguf")
    (folder / "o/away").symlink_to(part.parent)
    (folder / "o/r/linked.gguf").symlink_to(outside)
    for name in (
        *(str(outside), "../outside.gguf", "link/outside.gguf", f"{folder}/../outside.gguf"),
        "o/away",
    ):
        with pytest.raises((FolderUnusable, ModelMissing)):
            gone(folder, name)
    assert part.exists()
    (folder / "o/away").unlink()
    with pytest.raises(UsageInvalid, match="2 models"):
        gone(folder, "o/r")
    assert gone(folder, "o/r:linked.gguf") == ["o/r/m.gguf"]  # only the link
    assert outside.exists()


def test_missing_model_cannot_be_removed(tmp_path: Path) -> None:
    for name in ("o/r", "m.gguf", "https://h/m.gguf", "demo", "~nobody-here/m.gguf", f"{'x' * 300}.gguf"):
        with pytest.raises(ModelMissing, match="has no model"):
            gone(tmp_path, name)
    with pytest.raises(ModelMissing) as caught:
        gone(tmp_path, "https://h/m.gguf?X-Signature=secret")
    assert "secret" not in caught.value.message
    with contextlib.suppress(FileNotFoundError):
        assert list(tmp_path.iterdir()) == []
