"""Downloads of a service: concurrent requests share one, and each runs in its own process."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from llamasup.core.hub.remote_file import Progress
from llamasup.core.hub.store import DownloadSettings, FetchedModel
from llamasup.core.system.process.run_folder import run_folder
from llamasup.errors import AccessDenied, DownloadFailed, ModelMissing, Stopping
from llamasup.features.downloads import manager as module
from llamasup.features.downloads.manager import Downloads
from tests.kit import models
from tests.kit.children import NewChildren
from tests.kit.hub import Fault, Hub, running_hub
from tests.kit.patience import PATIENCE_S

NAME = "tiny-Q4_K_M.gguf"
REF = "org/tiny-GGUF"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        running.repos[REF] = {NAME: models.tiny_decoder().ljust(20 << 20, b"\0")}
        yield running


@pytest.fixture
def acting(
    hub: Hub, tmp_path: Path, new_children: NewChildren
) -> Callable[[Callable[[Downloads], Awaitable[None]]], None]:
    """Runs a function with downloads from the hub, and checks that no process and no file of them is left."""

    def act(what: Callable[[Downloads], Awaitable[None]]) -> None:
        async def main() -> None:
            with run_folder() as folder:
                settings = DownloadSettings(
                    folder=tmp_path / "models", others=(tmp_path / "pulled",), endpoint=hub.url
                )
                owned = Downloads(settings, folder.path)
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await what(owned)
                finally:
                    await owned.aclose()
                assert [path.name for path in folder.path.glob("child-*")] == []

        asyncio.run(main())
        assert new_children() == []

    return act


Acting = Callable[[Callable[[Downloads], Awaitable[None]]], None]


def held(hub: Hub) -> Awaitable[bool]:
    return asyncio.to_thread(hub.held.wait, PATIENCE_S)


def test_frozen_application_is_not_started_for_a_download(
    acting: Acting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = tmp_path / "application"
    application.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    application.chmod(0o755)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(application))

    async def act(downloads: Downloads) -> None:
        with pytest.raises(DownloadFailed, match="this application cannot start a download") as caught:
            await downloads.fetch(REF)
        assert "llamasup pull" in caught.value.remedy

    acting(act)
    assert not (tmp_path / "started").exists()


def test_concurrent_requests_share_one_download(hub: Hub, acting: Acting, new_children: NewChildren) -> None:
    hub.faults.append(Fault(NAME, hold_after=1 << 20, only_parts=True))
    reports: list[Progress] = []
    got: list[FetchedModel] = []

    async def act(downloads: Downloads) -> None:
        async def one() -> None:
            got.append(await downloads.fetch(REF, reports.append))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(one())
            await held(hub)
            assert len(new_children()) == 1
            hub.released.set()

    acting(act)
    assert [path for path in hub.paths() if path.startswith("/api/")] == [
        "/api/models/org/tiny-GGUF/tree/main"
    ]
    assert len(set(got)) == 1
    assert got[0].path.read_bytes() == hub.repos[REF][NAME]

    async def again(downloads: Downloads) -> None:
        assert await downloads.fetch(REF) == got[0]

    hub.asked.clear()
    acting(again)
    assert hub.asked == []  # the second download uses the files without a request
    assert {progress.total_bytes for progress in reports} == {20 << 20}
    assert len(reports) % 5 == 0  # every caller gets all progress reports


def test_download_ends_with_its_last_waiter_and_continues_later(
    hub: Hub, acting: Acting, new_children: NewChildren
) -> None:
    hub.faults.append(Fault(NAME, times=9, hold_after=4 << 20, only_parts=True))

    async def act(downloads: Downloads) -> None:
        first = asyncio.ensure_future(downloads.fetch(REF))  # noqa: TID251 - a test's own
        second = asyncio.ensure_future(downloads.fetch(REF))  # noqa: TID251
        await held(hub)
        (process,) = new_children()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert process.is_running()
        assert not second.done()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        hub.released.set()
        hub.faults.clear()
        # Without a pause: the ending process may still have the file locked, and the next one waits for it.
        fetched = await downloads.fetch(REF)
        assert fetched.path.read_bytes() == hub.repos[REF][NAME]

    acting(act)


def test_signature_is_not_in_the_process_arguments(
    hub: Hub, acting: Acting, new_children: NewChildren
) -> None:
    hub.plain["/m.gguf"] = hub.repos[REF][NAME]
    hub.faults.append(Fault("/m.gguf", hold_after=1 << 20, only_parts=True))

    async def act(downloads: Downloads) -> None:
        fetching = asyncio.ensure_future(downloads.fetch(f"{hub.url}/m.gguf?X-Signature=secret"))  # noqa: TID251
        await held(hub)
        (process,) = new_children()
        assert "secret" not in " ".join(process.cmdline())
        hub.released.set()
        assert (await fetching).path.read_bytes() == hub.plain["/m.gguf"]
        assert "X-Signature=secret" in hub.asked[-1].query

    acting(act)


def test_errors_of_the_download_are_raised(hub: Hub, acting: Acting) -> None:
    async def act(downloads: Downloads) -> None:
        with pytest.raises(AccessDenied, match="org/none does not exist") as caught:
            await downloads.fetch("org/none")
        assert "HF_TOKEN" in caught.value.remedy
        with pytest.raises(ModelMissing, match="has no quantization Q8_0") as missing:
            await downloads.fetch(f"{REF}:Q8_0")
        assert "Q4_K_M" in missing.value.details[0]
        assert (await downloads.fetch(REF)).path.exists()  # the error is not kept

    acting(act)


def test_killed_process_is_an_error(hub: Hub, acting: Acting, new_children: NewChildren) -> None:
    hub.faults.append(Fault(NAME, times=9, hold_after=1 << 20, only_parts=True))

    async def act(downloads: Downloads) -> None:
        fetching = asyncio.ensure_future(downloads.fetch(REF))  # noqa: TID251
        await held(hub)
        (process,) = new_children()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(DownloadFailed, match="ended without a result"):
            await fetching

    acting(act)


def test_failed_spawn_is_an_error_of_one_download(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, "spawn", spawn)

    async def act(downloads: Downloads) -> None:
        with pytest.raises(DownloadFailed, match="cannot be started: Too many open files"):
            await downloads.fetch(REF)

    acting(act)


@pytest.mark.check("X13")
def test_error_hides_the_signature_of_a_url(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_command", lambda _: (sys.executable, "-c", ""))

    async def act(downloads: Downloads) -> None:
        with pytest.raises(DownloadFailed, match=r"https://h/m\.gguf ended without a result") as caught:
            await downloads.fetch("https://h/m.gguf?X-Signature=secret")
        assert "secret" not in str(caught.value)

    acting(act)


def test_too_long_line_is_skipped(acting: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    error = '{"event":"error","cause":"model_missing","message":"none","remedy":"","details":[]}'
    lines = f"print('x' * (3 << 20)); print('{error}')"
    monkeypatch.setattr(module, "own_command", lambda _: (sys.executable, "-c", lines))

    async def act(downloads: Downloads) -> None:
        with pytest.raises(ModelMissing, match="none"):
            await downloads.fetch(REF)

    acting(act)


def test_closing_ends_all_downloads(hub: Hub, acting: Acting, new_children: NewChildren) -> None:
    hub.faults.append(Fault(NAME, times=9, hold_after=1 << 20, only_parts=True))

    async def act(downloads: Downloads) -> None:
        fetching = asyncio.ensure_future(downloads.fetch(REF))  # noqa: TID251
        await held(hub)
        await downloads.aclose()
        with pytest.raises(Stopping):  # an error, because the caller was not cancelled
            await fetching
        assert new_children() == []

    acting(act)


def test_number_of_waiting_downloads_is_limited(
    hub: Hub, acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_DOWNLOADS", 1)
    hub.faults.append(Fault(NAME, times=9, hold_after=1 << 20, only_parts=True))

    async def act(downloads: Downloads) -> None:
        fetching = asyncio.ensure_future(downloads.fetch(REF))  # noqa: TID251
        await held(hub)
        with pytest.raises(DownloadFailed, match="Too many downloads are waiting"):
            await downloads.fetch("org/other")
        hub.released.set()
        await fetching

    acting(act)


def test_model_in_another_folder_is_not_downloaded_again(
    hub: Hub, tmp_path: Path, acting: Callable[[Callable[[Downloads], Awaitable[None]]], None]
) -> None:
    path = tmp_path / "pulled" / REF / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(models.tiny_decoder())

    async def fetched(downloads: Downloads) -> None:
        assert await downloads.fetch(f"{REF}:Q4_K_M") == FetchedModel(path, (path,))

    acting(fetched)
    assert hub.asked == []
