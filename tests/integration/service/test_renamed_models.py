"""Models whose ids change while they are served, without errors for waiting requests (S16)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from msgspec import structs
from msgspec.structs import replace

import llamasup
from llamasup.core.config.config_keys import Config
from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_states import ModelState
from llamasup.core.settings.model import ModelEntry
from llamasup.core.supervision.events import StateChanged
from llamasup.features.downloads.settings import Downloads
from tests.core.pool.pools import (
    PATIENCE_S,
    Pooled,
    PoolRequest,
    async_test,
    file_of,
    pooled,
    registry_of,
    server,
    spec_of,
)
from tests.kit.hub import running_hub
from tests.kit.tiny import tiny_decoder


@pytest.fixture
def spec(tmp_path: Path, tiny_model: Path) -> ModelSpec:
    return spec_of(file_of(tmp_path, "x", tiny_model))


@pytest.fixture
def other(tmp_path: Path, tiny_model: Path) -> ModelSpec:
    return spec_of(file_of(tmp_path, "other", tiny_model))


def called(spec: ModelSpec, id_: str, *aliases: str) -> ModelSpec:
    """As the registry makes it where the config gives it this name."""
    return replace(spec, id=id_, aliases=aliases, settings=structs.replace(spec.settings, alias=id_))


def far(spec: ModelSpec, name: str) -> ModelSpec:
    """What a client names that has to be downloaded first."""
    return replace(called(spec, name), source=name, identity=(), listed=None)


def bringing(spec: ModelSpec, may: asyncio.Event | None = None) -> Callable[[str, Listener], object]:
    async def fetch(ref: str, listener: Listener) -> Path:
        if may is not None:
            await may.wait()
        return Path(spec.source)

    return fetch


def inviting(it: Pooled, spec: ModelSpec) -> None:
    """From here on names with a slash may be downloaded."""
    catalog = Catalog(it.catalog.registry, it.pool, lambda name: far(spec, name) if "/" in name else None)
    it.catalog = catalog


def starts(it: Pooled) -> int:
    return sum(isinstance(each, StateChanged) and each.state.value == "starting" for each in it.notices)


# --- its name in the config


@async_test
async def test_a_served_file_may_be_given_a_name(tmp_path: Path, spec: ModelSpec) -> None:
    """And may lose it again."""
    async with pooled(tmp_path, spec) as it:
        in_flight = it.ask("x")
        await in_flight.served_by()
        pid = it.pids("x")["x"]
        waiting = it.ask("x")
        assert waiting.waits
        it.apply(called(spec, "chat", "x"))

        assert waiting.waits
        in_flight.finish()
        assert await waiting.served_by() == 1
        assert waiting.lease is not None
        assert waiting.lease.endpoint.model == "chat"
        assert it.pids("x", "chat") == {"x": pid, "chat": pid}
        assert list(it.pool.managed_models) == ["chat"]
        it.apply(spec)
        assert waiting.lease.endpoint.model == "x"
        assert not waiting.lease.endpoint.closed
        assert it.pids("x")["x"] == pid
        assert it.unloads() == []
        assert starts(it) == 1


@async_test
async def test_old_name_of_a_model_does_not_reach_a_new_file(
    tmp_path: Path, spec: ModelSpec, other: ModelSpec
) -> None:
    async with pooled(tmp_path, called(spec, "a")) as it:
        await it.load("a")
        it.apply(called(spec, "b", "a"))
        pid = it.pids("b")["b"]
        it.apply(called(other, "a"), called(spec, "c", "b"))

        assert it.pids("c")["c"] == pid
        assert it["a"].phase is Phase.ABSENT


@async_test
async def test_request_waiting_for_a_load_survives_a_rename(tmp_path: Path, spec: ModelSpec) -> None:
    runtime = server(tmp_path, {"gguf": ["load_s=0.5"]})
    async with pooled(tmp_path, spec, runtime=runtime) as it:
        waiting = it.ask("x")
        loading = asyncio.ensure_future(it.load("x"))  # noqa: TID251 (owned right here)
        await it.until(lambda: starts(it) == 1)
        it.apply(called(spec, "chat", "x"))

        assert await waiting.served_by() == 1
        await loading
        assert starts(it) == 1
        assert [each.model for each in it.notices if isinstance(each, StateChanged)][-1] == "chat"


@async_test
async def test_new_name_with_new_settings_swaps_the_process_without_errors(
    tmp_path: Path, spec: ModelSpec
) -> None:
    async with pooled(tmp_path, spec) as it:
        in_flight = it.ask("x")
        await in_flight.served_by()
        old = it.pids("x")["x"]
        waiting = it.ask("x")
        named = called(spec, "chat", "x")
        it.apply(replace(named, settings=structs.replace(named.settings, ctx_size=600)))

        assert await waiting.served_by() == 1
        assert waiting.lease is not None
        assert in_flight.lease is not None
        assert waiting.lease.endpoint is not in_flight.lease.endpoint
        assert psutil.pid_exists(old or 0)
        in_flight.finish()
        await it.until(lambda: it["chat"].state is not ModelState.ROLLING_OUT)
        plan = it["chat"].runners[0].plan
        assert plan is not None
        assert plan.argv[plan.argv.index("--alias") + 1] == "chat"


@async_test
async def test_next_start_uses_the_new_name(tmp_path: Path, spec: ModelSpec) -> None:
    async with pooled(tmp_path, spec) as it:
        await it.load("x")
        it.apply(called(spec, "chat", "x"))
        await it.unload("chat")
        await it.load("chat")

        plan = it["chat"].runners[0].plan
        assert plan is not None
        assert plan.argv[plan.argv.index("--alias") + 1] == "chat"


@async_test
async def test_model_that_becomes_an_alias_transfers_its_queue(tmp_path: Path, spec: ModelSpec) -> None:
    """Both were of one file, with settings that did not agree."""
    both = called(spec, "chat"), called(replace(spec, stay=Stay(ttl_s=9.0)), "long")
    runtime = server(tmp_path, {"gguf": ["load_s=0.5"]})
    async with pooled(tmp_path, *both, runtime=runtime) as it:
        waiting = it.ask("long")
        loading = asyncio.ensure_future(it.load("long"))  # noqa: TID251 (owned right here)
        await it.until(lambda: starts(it) == 1)
        it.apply(called(spec, "chat", "long"))
        assert waiting.waits

        assert await waiting.served_by() == 1
        assert waiting.lease is not None
        assert waiting.lease.endpoint.model == "chat"
        await loading
        assert it.unloads() == [("long", "removed", "")]


@async_test
async def test_client_that_leaves_after_a_queue_transfer_is_removed(tmp_path: Path, spec: ModelSpec) -> None:
    both = called(spec, "chat"), called(spec, "long")
    runtime = server(tmp_path, {"gguf": ["load_s=60"]})
    async with pooled(tmp_path, *both, runtime=runtime) as it:
        loading = asyncio.ensure_future(it.load("long"))  # noqa: TID251 (owned right here)
        await it.until(lambda: starts(it) == 1)
        it.apply(called(spec, "chat", "long"))
        assert it["chat"].wanted
        loading.cancel()
        await asyncio.wait({loading})

        assert not it["chat"].wanted


# --- what had to be downloaded


@async_test
async def test_a_model_of_the_config_is_loaded_once_although_it_is_found_where_it_was_downloaded_to(
    tmp_path: Path, spec: ModelSpec, other: ModelSpec
) -> None:
    remote = replace(spec, source="org/x:Q4_K_M", identity=())
    async with pooled(tmp_path, other, remote, fetch=bringing(spec)) as it:  # type: ignore[arg-type]
        await it.load("x")
        before = it.pids("x")
        changes = it.catalog.apply(registry_of(other, spec))

        assert (changes.retouched, changes.changed) == (("x",), ())
        assert it["x"].state is not ModelState.ROLLING_OUT
        assert it.pids("x") == before
        assert (it["x"].spec.source, it["x"].spec.identity) == (spec.source, spec.identity)
        await it.unload("x")
        await it.load("x")
        assert it.loads("x") == 2


@async_test
async def test_different_file_with_the_downloads_name_is_used(
    tmp_path: Path, spec: ModelSpec, other: ModelSpec
) -> None:
    remote = replace(spec, source="org/x:Q4_K_M", identity=())
    async with pooled(tmp_path, other, remote, fetch=bringing(spec)) as it:  # type: ignore[arg-type]
        await it.load("x")
        before = it.pids("x")
        path, size, mtime_ns = spec.identity[0]
        it.apply(other, replace(spec, identity=((path, size, mtime_ns + 1),)))
        async with asyncio.timeout(PATIENCE_S):
            assert it["x"].rollout is not None
            await asyncio.shield(it["x"].rollout)

        assert it.pids("x") != before


@async_test
async def test_on_demand_download_continues_under_its_found_name(tmp_path: Path, spec: ModelSpec) -> None:
    runtime = server(tmp_path, {"gguf": ["load_s=0.5"]})
    async with pooled(tmp_path, runtime=runtime, fetch=bringing(spec)) as it:  # type: ignore[arg-type]
        inviting(it, spec)
        waiting = it.ask("org/x:Q4_K_M")
        await it.until(lambda: starts(it) == 1)
        found = called(spec, "x", "org/x:Q4_K_M")
        changes = it.catalog.apply(registry_of(found))

        assert changes.renamed == (("org/x:Q4_K_M", "x"),)
        assert await waiting.served_by() == 1
        assert it["x"] is it["org/x:Q4_K_M"]
        assert starts(it) == 1
        assert [each.spec.id for each in it.catalog.managed_models()] == ["x"]


@async_test
async def test_two_names_of_one_download_are_one_process(tmp_path: Path, spec: ModelSpec) -> None:
    may = asyncio.Event()
    async with pooled(tmp_path, fetch=bringing(spec, may)) as it:  # type: ignore[arg-type]
        inviting(it, spec)
        both = it.ask("org/x"), it.ask("org/x:Q4_K_M")
        await it.until(lambda: len(list(it.catalog.managed_models())) == 2)
        may.set()

        async def served(request: PoolRequest) -> None:
            """There is one slot, and either request may get it first."""
            assert await request.served_by() == 1
            request.finish()

        await asyncio.gather(*map(served, both))
        (one,) = it.catalog.managed_models()

        assert set(one.spec.names) == {"org/x", "org/x:Q4_K_M"}
        assert it["org/x"] is it["org/x:Q4_K_M"] is one
        assert it.catalog.resolve("org/x:Q4_K_M") == it.catalog.resolve("org/x")
        assert starts(it) == 1


@async_test
async def test_name_of_a_local_model_is_not_downloaded(tmp_path: Path, spec: ModelSpec) -> None:
    """The repository without its quantization."""
    async with pooled(tmp_path, fetch=bringing(spec)) as it:  # type: ignore[arg-type]
        inviting(it, spec)
        await it.ask("org/x").served_by()
        it.apply(called(spec, "x", "org/x:Q4_K_M"))

        assert it["org/x"] is it["x"]
        assert it["x"].phase is Phase.RESIDENT
        assert len(list(it.catalog.managed_models())) == 1
        assert starts(it) == 1


# --- as it comes: downloaded, and found by the watch of the folder while it is loaded


@pytest.mark.parametrize("name", ["org/tiny-GGUF:Q4_K_M", "org/tiny-GGUF", "tiny"])
@async_test
async def test_load_slower_than_the_watch_is_not_restarted(tmp_path: Path, name: str) -> None:
    runtime = server(tmp_path, {"gguf": ["load_s=60"]})
    folder = tmp_path / "models"
    folder.mkdir()
    with running_hub() as hub:
        hub.repos["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": tiny_decoder()}
        downloads = Downloads(
            on_demand=True, folder=folder, endpoint=hub.url, private_addresses=True, parallel=1
        )
        models = {"tiny": ModelEntry(repo="org/tiny-GGUF", ctx_size=512)} if name == "tiny" else {}
        config = Config(models=models, models_dir=(folder,), features={"downloads": downloads})
        async with llamasup.serve(config=config, runtime=str(runtime)) as service:
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            request = asyncio.ensure_future(service.client.post("/v1/completions", json=body))  # noqa: TID251
            events = []
            async with asyncio.timeout(PATIENCE_S):
                async for event in service.events():
                    events.append(event)
                    states = [each["state"] for each in events if each["event"] == "state"]
                    # In this order or the other: the watch finds the file, and the load begins.
                    if "loading" in states and any(each["event"] == "models" for each in events):
                        break
            (model,) = service.status()["models"]
            pid = model["pid"]
            assert not request.done()
            assert name in (model["id"], *model["aliases"], "org/tiny-GGUF")
            assert model["state"] == "loading"
            assert model["queued"] == 1
            assert states == ["starting", "loading"]
            assert not any(each["event"] == "unload" for each in events)
            assert pid is not None
            assert psutil.pid_exists(pid)
            request.cancel()
            await asyncio.wait({request})
            await service.stop(now=True)
