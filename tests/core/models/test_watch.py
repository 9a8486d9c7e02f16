"""Watched folders on a real file system, with the events of the operating system."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamasup.core.models import watch
from llamasup.core.models.debounce import DebouncePolicy
from llamasup.core.models.search import Search, search_models
from llamasup.core.models.watch import FolderEvents, ModelWatch
from llamasup.errors import LlamasupError
from tests.kit import models
from tests.kit.async_tests import async_test
from tests.kit.patience import PATIENCE_S

QUICK = DebouncePolicy(sound_s=0.1, broken_s=0.3)
DECODER = models.tiny_decoder()


class Watched:
    """A watched folder, and its reports."""

    def __init__(self, top: Path, watch: ModelWatch, first: Search) -> None:
        self.top = top
        self.reports = [first]
        self._changes = watch.changes()

    async def until(self, holds: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Wait until ``holds``. Returns name → class or error."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(self.served):
                self.reports.append(await anext(self._changes))
        return self.served

    @property
    def served(self) -> dict[str, str]:
        return {
            os.path.relpath(found.path, self.top): found.outcome.message.removeprefix(f"{found.path}: ")
            if isinstance(found.outcome, LlamasupError)
            else found.outcome.model_class
            for found in self.reports[-1].found
        }


@contextlib.asynccontextmanager
async def watching(
    top: Path, *paths: Path, policy: DebouncePolicy = QUICK, tick_s: float = 0.02
) -> AsyncIterator[Watched]:
    first = search_models([top], map(str, paths))
    async with ModelWatch([top], [str(path) for path in paths], first, policy=policy, tick_s=tick_s) as watch:
        yield Watched(top, watch, first)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def put(path: Path, content: bytes = DECODER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@async_test
async def test_new_model_is_reported_also_in_a_new_subfolder(top: Path) -> None:
    async with watching(top) as watched:
        put(top / "a.gguf")
        assert await watched.until(lambda served: "a.gguf" in served) == {"a.gguf": "decoder"}
        put(top / "deep/er/b.gguf", models.tiny_encoder())
        served = await watched.until(lambda served: len(served) == 2)
        assert served["deep/er/b.gguf"] == "encoder"
        put(top / "deep/er/c.gguf")
        await watched.until(lambda served: "deep/er/c.gguf" in served)


@async_test
async def test_removed_model_is_reported(top: Path) -> None:
    put(top / "a.gguf"), put(top / "b.gguf")
    async with watching(top) as watched:
        (top / "a.gguf").unlink()
        assert await watched.until(lambda served: "a.gguf" not in served) == {"b.gguf": "decoder"}


@async_test
async def test_renamed_model_is_never_missing(top: Path) -> None:
    put(top / "a.gguf")
    # A new file would be served after an hour.
    async with watching(top, policy=DebouncePolicy(sound_s=3600, broken_s=3600)) as watched:
        (top / "a.gguf").rename(top / "b.gguf")
        await watched.until(lambda served: "b.gguf" in served)
        assert all(search.found for search in watched.reports)


@async_test
async def test_download_is_reported_once_it_has_its_name(top: Path) -> None:
    async with watching(top) as watched:
        part = put(top / "a.gguf.part", DECODER[:1000])
        put(top / "other.gguf")
        await watched.until(lambda served: "other.gguf" in served)
        part.write_bytes(DECODER)
        part.rename(top / "a.gguf")
        await watched.until(lambda served: served.get("a.gguf") == "decoder")
        assert all("part" not in found.path for search in watched.reports for found in search.found)


@async_test
async def test_growing_copy_is_not_reported(top: Path) -> None:
    """The test writes it in pieces, and between them adds and removes another file many times."""
    policy = DebouncePolicy(sound_s=0.05, broken_s=3600)
    async with watching(top, policy=policy) as watched:
        with (top / "a.gguf").open("wb") as file:
            for number, start in enumerate(range(0, len(DECODER), len(DECODER) // 4)):
                file.write(DECODER[start : start + len(DECODER) // 4])
                file.flush()
                marker = f"marker-{number}.gguf"
                put(top / marker)
                served = await watched.until(lambda served, marker=marker: marker in served)  # type: ignore[misc]
                if file.tell() < len(DECODER):
                    assert "a.gguf" not in served
        await watched.until(lambda served: served.get("a.gguf") == "decoder")


@async_test
async def test_unfinished_aria2_download_is_no_model(top: Path) -> None:
    policy = DebouncePolicy(sound_s=0.05, broken_s=3600)
    async with watching(top, policy=policy) as watched:
        control = put(top / "a.gguf.aria2", b"aria2")
        put(top / "a.gguf", DECODER[:-1000] + bytes(1000))
        put(top / "b.gguf")
        assert "a.gguf" not in await watched.until(lambda served: "b.gguf" in served)
        put(top / "a.gguf")
        control.unlink()
        await watched.until(lambda served: served.get("a.gguf") == "decoder")


@async_test
async def test_interrupted_copy_is_reported_once_it_is_stable(top: Path) -> None:
    async with watching(top) as watched:
        put(top / "a.gguf", DECODER[: len(DECODER) // 2])
        served = await watched.until(lambda served: "a.gguf" in served)
        assert served["a.gguf"].startswith("truncated")


@async_test
async def test_replaced_model_is_reported_once_complete(top: Path) -> None:
    path = put(top / "a.gguf")
    async with watching(top) as watched:
        before = watched.reports[-1].found[0].files
        fresh = put(top / "b.part", models.tiny_encoder())
        fresh.replace(path)
        await watched.until(lambda served: served["a.gguf"] == "encoder")
        assert watched.reports[-1].found[0].files != before


@async_test
async def test_folder_that_disappears_is_watched_again_when_back(
    top: Path,
) -> None:
    put(top / "a.gguf")
    async with watching(top) as watched:
        aside = top.with_name("aside")
        shutil.move(top, aside)
        await watched.until(lambda _: bool(watched.reports[-1].missing))
        assert watched.served == {"a.gguf": "decoder"}
        assert str(top) in watched.reports[-1].missing
        shutil.move(aside, top)
        await watched.until(lambda _: not watched.reports[-1].missing)
        assert watched.served == {"a.gguf": "decoder"}
        put(top / "b.gguf")
        await watched.until(lambda served: "b.gguf" in served)


@async_test
async def test_configured_model_of_a_missing_folder_stays(top: Path) -> None:
    path = put(top / "a.gguf")
    async with watching(top, path, policy=DebouncePolicy(sound_s=0.0, broken_s=0.0)) as watched:
        shutil.move(top, top.with_name("aside"))
        await watched.until(lambda _: bool(watched.reports[-1].missing))
        assert not isinstance(watched.reports[-1].sources[str(path)].outcome, LlamasupError)


@async_test
async def test_recreated_folder_has_its_new_models(top: Path) -> None:
    put(top / "a.gguf")
    async with watching(top) as watched:
        shutil.rmtree(top)
        put(top / "b.gguf")
        assert await watched.until(lambda served: "b.gguf" in served and "a.gguf" not in served)


@async_test
async def test_folder_of_a_configured_model_is_watched(top: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "elsewhere/x.gguf")
    async with watching(top, path) as watched:
        before = watched.reports[-1].sources[str(path)].files
        put(path.with_name("x.part"), models.tiny_encoder()).replace(path)
        await watched.until(lambda _: watched.reports[-1].sources[str(path)].files != before)


@async_test
async def test_change_before_the_watch_is_reported(top: Path) -> None:
    first = search_models([top])
    put(top / "a.gguf")
    async with ModelWatch([top], [], first, policy=QUICK, tick_s=0.02) as watch:
        watched = Watched(top, watch, first)
        await watched.until(lambda served: "a.gguf" in served)


@async_test
async def test_folders_are_polled_without_events(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_watches(self: FolderEvents, folders: list[str], *, recursive: bool) -> None:
        self.reliable = False  # as at the limit fs.inotify.max_user_watches

    monkeypatch.setattr(FolderEvents, "_watch", no_more_watches)
    monkeypatch.setattr("llamasup.core.models.watch._POLL_INTERVAL_WITHOUT_EVENTS_S", 0.05)
    async with watching(top) as watched:
        put(top / "a.gguf")
        await watched.until(lambda served: "a.gguf" in served)


@async_test
async def test_folders_with_a_link_to_a_folder_are_polled(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would watch all folders below the link, for example a whole disk."""
    put(tmp_path / "outside/x.gguf")
    (top / "link").symlink_to(tmp_path / "outside")
    events = FolderEvents([top], [])
    assert events.happened()
    assert not events.reliable
    events.close()
    monkeypatch.setattr("llamasup.core.models.watch._POLL_INTERVAL_WITHOUT_EVENTS_S", 0.05)
    async with watching(top) as watched:
        put(top / "a.gguf")
        await watched.until(lambda served: "a.gguf" in served)


def test_too_many_folders_are_polled(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(top / "a/b/c/x.gguf")
    monkeypatch.setattr(watch, "_MAX_FOLDERS", 3)
    events = FolderEvents([top], [])
    events.happened()
    events.close()
    assert not events.reliable


@async_test
async def test_ended_watch_leaves_no_thread(top: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(3):
        async with watching(top):
            assert any(thread.name == "model-watch" for thread in threading.enumerate())
    assert not any(thread.name == "model-watch" for thread in threading.enumerate())
    async with asyncio.timeout(PATIENCE_S):  # the thread of the library closes them a moment later
        while descriptors() > before:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


def test_temporary_names_are_no_events() -> None:
    def watched(name: str) -> Any:
        return SimpleNamespace(watch=lambda *_: {(1, f"/models/{name}")})

    concerned = [name for name in ("a.gguf.part", "b.gguf") if watch._has_events(watched(name))]
    assert concerned == ["b.gguf"]


def test_folder_with_an_undecodable_path_is_polled(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    try:
        odd.mkdir()
    except OSError:
        pytest.skip("this file system takes no such name")
    events = FolderEvents([odd], [])
    with contextlib.closing(events):
        assert events.happened()
        assert not events.reliable


@async_test
async def test_failed_search_is_logged_once_and_repeated(
    top: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(top / "a.gguf")
    first, looks = search_models([top]), list[int]()

    def broken(*given: object, **named: object) -> Search:
        looks.append(1)
        if len(looks) < 4:
            raise AttributeError("a bug")
        return search_models([top])

    monkeypatch.setattr("llamasup.core.models.watch._POLL_INTERVAL_WITHOUT_EVENTS_S", 0.01)
    monkeypatch.setattr("llamasup.core.models.watch.search_models", broken)
    async with ModelWatch([top], [], first, policy=QUICK, tick_s=0.01) as watch:
        put(top / "b.gguf")
        watched = Watched(top, watch, first)
        assert await watched.until(lambda served: "b.gguf" in served)
    assert caplog.text.count("trying again") == 1


@async_test
async def test_watch_that_cannot_start_blocks_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: FolderEvents) -> bool:
        raise AttributeError("a bug")

    monkeypatch.setattr(FolderEvents, "happened", broken)
    async with asyncio.timeout(PATIENCE_S), ModelWatch([tmp_path], [], Search()):
        pass
    assert "trying again" in caplog.text


@async_test
async def test_models_of_an_unreadable_subfolder_stay(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(top / "a.gguf")
    put(top / "sub/deep/b.gguf")
    async with watching(top) as watched:
        with unreadable(monkeypatch, top / "sub", errno.EACCES):
            put(top / "c.gguf")
            served = await watched.until(lambda served: "c.gguf" in served)
            assert served["sub/deep/b.gguf"] == "decoder"
            assert watched.reports[-1].closed == (str(top / "sub"),)
        shutil.rmtree(top / "sub")
        await watched.until(lambda served: "sub/deep/b.gguf" not in served)


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE, errno.ENOTCONN, errno.EIO])
@async_test
async def test_dead_network_share_keeps_its_models(
    top: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """The errors of the system for a folder on a dead mount, or below an inaccessible folder."""
    put(top / "a.gguf")
    async with watching(top) as watched:
        with unreadable(monkeypatch, top, error):
            await watched.until(lambda _: bool(watched.reports[-1].missing))
            assert watched.served == {"a.gguf": "decoder"}
            (why,) = watched.reports[-1].missing.values()
            assert os.strerror(error) in why.message
        put(top / "c.gguf")
        served = await watched.until(lambda served: "c.gguf" in served)
        assert "a.gguf" in served


@contextlib.contextmanager
def unreadable(patch: pytest.MonkeyPatch, folder: Path, error: int) -> Iterator[None]:
    """Replaces the system's answers for ``folder`` and its contents, because root may read everything."""

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any = ".", *more: Any, **named: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(folder):
                raise OSError(error, os.strerror(error), str(path))
            return call(path, *more, **named)

        return ask

    with patch.context() as now:
        for name in ("stat", "scandir"):
            now.setattr(os, name, refusing(getattr(os, name)))
        yield


@async_test
async def test_watch_cancelled_during_exit_leaves_no_task(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joins, may_join = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    watch = await ModelWatch([top], [], search_models([top]), policy=QUICK, tick_s=0.02).__aenter__()
    join = watch._thread.join

    def slow_join(timeout: float | None = None) -> None:
        loop.call_soon_threadsafe(joins.set)
        may_join.wait(PATIENCE_S)
        join(timeout)

    monkeypatch.setattr(watch._thread, "join", slow_join)
    ending = asyncio.ensure_future(watch.__aexit__(None, None, None))  # noqa: TID251 (owned right here)
    await joins.wait()
    ending.cancel()
    await asyncio.sleep(0)
    may_join.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert asyncio.all_tasks() == {asyncio.current_task()}
