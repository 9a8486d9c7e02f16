"""Models that have to be downloaded first, and the end of downloads without a purpose."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.hub.remote_file import Listener, Progress
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.collect import info_of
from llamasup.core.pool.eviction_policy import Phase
from llamasup.errors import Conflict, LlamasupError
from tests.core.pool.pools import async_test, file_of, pooled, spec_of, with_context

REF = "org/far:Q4_K_M"


class FarAway:
    """A source of models. Records each download, and completes it when ``may`` is set."""

    def __init__(self, path: Path) -> None:
        self.begun: list[str] = []
        self.called_off: list[str] = []
        self.brought: list[str] = []
        self.may = asyncio.Event()
        self.path = path
        self.progress = Progress(5 << 30, 10 << 30, 1 << 30)

    async def fetch(self, ref: str, listener: Listener) -> Path:
        self.begun.append(ref)
        listener(self.progress)
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.called_off.append(ref)
            raise
        self.brought.append(ref)
        return self.path


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> dict[str, ModelSpec]:
    return {name: spec_of(file_of(tmp_path, name, tiny_model)) for name in "abc"}


def far(spec: ModelSpec, ref: str = REF) -> ModelSpec:
    return replace(spec, source=ref, identity=())


# --- failed downloads


@async_test
async def test_unexpected_error_of_a_download_does_not_affect_others(
    tmp_path: Path, specs: dict[str, ModelSpec], caplog: pytest.LogCaptureFixture
) -> None:
    """S17."""

    async def fetch(ref: str, listener: Listener) -> Path:
        raise PermissionError(13, "Permission denied")

    async with pooled(tmp_path, specs["b"], far(specs["a"]), fetch=fetch) as models:
        await models.load("b")
        before = models.pids("b")
        with pytest.raises(LlamasupError, match="PermissionError") as raised:
            await models.load("a")
        assert raised.value.exit_code == 70
        assert "Permission denied" in caplog.text
        assert (await models.ask("a").refusal()).status == 503
        assert models.pids("b") == before
        assert await models.ask("b").served_by() == 1


# --- downloads without a purpose


@async_test
async def test_download_ends_with_the_last_waiting_client(
    tmp_path: Path, specs: dict[str, ModelSpec]
) -> None:
    hub = FarAway(Path(specs["b"].source))
    async with pooled(tmp_path, specs["b"], far(specs["a"]), fetch=hub.fetch) as models:
        first, second = models.ask("a"), models.ask("a")
        await models.until(lambda: hub.begun == [REF])
        assert info_of(models["a"]).state == "downloading"
        models["a"].served.queue.leave(first.entry)
        await models.reconciled()
        assert hub.called_off == []
        models["a"].served.queue.leave(second.entry)

        await models.until(lambda: models["a"].sizing is None)
        assert hub.called_off == [REF]
        assert info_of(models["a"]).state == "stopped"
        hub.may.set()
        assert await models.ask("a").served_by() == 1  # the next request continues it
        assert hub.begun == [REF, REF]


@async_test
async def test_download_ends_with_the_last_load_request(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    hub = FarAway(Path(specs["b"].source))
    async with pooled(tmp_path, specs["b"], far(specs["a"]), fetch=hub.fetch) as models:
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await models.until(lambda: hub.begun == [REF])
        loading.cancel()

        await models.until(lambda: hub.called_off == [REF])


@async_test
async def test_download_ends_with_waiters_of_another_name(
    tmp_path: Path, specs: dict[str, ModelSpec]
) -> None:
    hub = FarAway(Path(specs["b"].source))
    async with pooled(tmp_path, far(specs["a"], "org/old"), far(specs["c"]), fetch=hub.fetch) as models:
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await models.until(lambda: hub.begun == ["org/old"])
        models.pool.remove(models["a"], models["c"])
        await models.until(lambda: hub.begun == ["org/old", REF])
        assert hub.called_off == ["org/old"]
        loading.cancel()

        await models.until(lambda: hub.called_off == ["org/old", REF])


@async_test
async def test_unload_ends_the_download(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    hub = FarAway(Path(specs["b"].source))
    async with pooled(tmp_path, specs["b"], far(specs["a"]), fetch=hub.fetch) as models:
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await models.until(lambda: hub.begun == [REF])
        await models.unload("a")
        with pytest.raises(Conflict):
            await loading

        await models.until(lambda: hub.called_off == [REF])


@async_test
async def test_model_is_present_when_the_end_of_its_download_is_reported(
    tmp_path: Path, specs: dict[str, ModelSpec]
) -> None:
    """The request times out with the remaining time, and the download continues until then."""
    hub = FarAway(Path(specs["b"].source))
    hub.progress = Progress(0, 100 << 30, 1 << 30)
    soon = replace(specs["a"], options=replace(specs["a"].options, wait_timeout_s=0.2))
    async with pooled(tmp_path, specs["b"], far(soon), fetch=hub.fetch) as models:
        refused = await models.ask("a").refusal()
        assert (refused.cause, refused.retry_after_s) == ("downloading", 100.0)
        await models.reconciled()
        assert hub.called_off == []
        pending_demand = models["a"].pending_demand
        assert pending_demand is not None
        assert pending_demand.until_s >= asyncio.get_running_loop().time() + 100

        hub.may.set()
        await models.until_phase("a", Phase.RESIDENT)
        assert await models.ask("a").served_by() == 1


@async_test
async def test_download_ends_with_its_purpose(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    """A corrected config does not wait for the download of the old one."""
    hub = FarAway(Path(specs["b"].source))
    async with pooled(tmp_path, specs["b"], far(specs["a"], "org/huge:q8"), fetch=hub.fetch) as models:
        request = models.ask("a")
        await models.until(lambda: hub.begun == ["org/huge:q8"])
        models.apply(specs["a"], specs["b"])
        assert await request.served_by() == 1
        assert hub.called_off == ["org/huge:q8"]

        models.apply(specs["a"], far(specs["b"]))
        gone = models.ask("b")
        await models.until(lambda: REF in hub.begun)
        models.apply(specs["a"])
        assert (await gone.refusal()).status == 404
        await models.until(lambda: hub.called_off == ["org/huge:q8", REF])


# --- deleted files


@async_test
async def test_deleted_model_is_downloaded_again(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    spare = Path(specs["b"].source)
    hub = FarAway(spare.with_name("brought.gguf"))
    hub.may.set()

    async def fetch(ref: str, listener: Listener) -> Path:
        await asyncio.to_thread(shutil.copy, spare, hub.path)
        return await hub.fetch(ref, listener)

    async with pooled(tmp_path, specs["b"], far(specs["a"]), fetch=fetch) as models:
        await models.load("a")
        await models.unload("a")
        await models.until(lambda: models["a"].sizing is None)
        os.remove(hub.path)  # noqa: PTH107 (a test's own)
        with pytest.raises(LlamasupError):
            await models.load("a")
        await models.load("a")
        assert await models.ask("a").served_by() == 1


# --- changes with a download


@async_test
async def test_other_models_change_and_use_idle_memory_during_a_download(
    tmp_path: Path, specs: dict[str, ModelSpec]
) -> None:
    hub = FarAway(Path(specs["c"].source))
    async with pooled(tmp_path, *specs.values(), capacity=2.5, fetch=hub.fetch) as models:
        await models.load("a")
        await models.load("b")
        models.apply(far(specs["a"]), with_context(specs["b"], 520), specs["c"])
        await models.until(lambda: hub.begun == [REF])
        assert models["a"].phase is Phase.RESIDENT
        request = models.ask("a")
        assert await request.served_by() == 1
        request.finish()
        await models.until(lambda: not models["b"].rolling_out)
        assert not models["b"].is_outdated
        assert hub.called_off == []

        busy = models.ask("b")  # so that a is evicted, however long the two loads took
        await busy.served_by()
        request = models.ask("c")
        await request.served_by()
        assert ("a", "memory", "c") in models.unloads()
        await models.until(lambda: hub.called_off == [REF])  # an unloaded model needs no change
        request.finish()
        busy.finish()
        hub.may.set()
        await models.load("a")
        assert not models["a"].is_outdated


@async_test
async def test_download_of_a_change_ends_with_unload_or_the_next_change(
    tmp_path: Path, specs: dict[str, ModelSpec]
) -> None:
    hub = FarAway(Path(specs["c"].source))
    async with pooled(tmp_path, specs["a"], fetch=hub.fetch) as models:
        await models.load("a")
        models.apply(far(specs["a"]))
        await models.until(lambda: len(hub.begun) == 1)
        models.apply(specs["a"])
        await models.until(lambda: not models["a"].rolling_out and bool(hub.called_off))
        assert len(hub.called_off) == 1
        assert models.loads("a") == 1

        models.apply(far(specs["a"]))
        await models.until(lambda: len(hub.begun) == 2)
        await models.unload("a")
        await models.until(lambda: not models["a"].rolling_out)
        assert len(hub.called_off) == 2
        assert models["a"].phase is Phase.ABSENT


@async_test
async def test_finished_download_of_a_change_is_not_reported(
    tmp_path: Path, specs: dict[str, ModelSpec]
) -> None:
    hub = FarAway(Path(specs["c"].source))
    hub.may.set()
    async with pooled(tmp_path, specs["a"], fetch=hub.fetch) as models:
        await models.load("a")
        models.apply(far(specs["a"]))

        def cause() -> str:
            reason = models["a"].served.unavailable_reason
            return "" if reason is None else reason.cause

        await models.until(lambda: not models["a"].rolling_out and cause() == "loading")
        assert not models["a"].is_outdated
