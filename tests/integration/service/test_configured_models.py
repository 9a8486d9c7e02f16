"""How ``serve`` follows its config: what a reload changes and what not (S16)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.config.config_keys import Config
from llamasup.core.observability.observer import Observer
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.supervision.events import Bus, ConfigRejected, ModelsChanged, PublishedEvent, Stopped
from llamasup.core.system.hardware.probe import hardware
from llamasup.errors import ConfigInvalid, ModelInvalid
from llamasup.service import config_source
from llamasup.service.config_source import ConfigSource
from llamasup.service.configured_models import ConfiguredModels
from llamasup.service.hosting import Service
from llamasup.service.serve import ServeOptions
from tests.core.pool.pools import PATIENCE_S, file_of
from tests.kit.async_tests import async_test
from tests.kit.configs import load
from tests.kit.fake_server import install


@dataclass(slots=True)
class ServiceHost:
    hosted: ConfiguredModels
    notices: list[PublishedEvent]

    def pid(self, model: str) -> int | None:
        return self.hosted.runners_of(model)[0].pid

    def phases(self) -> list[Phase]:
        return [each.phase for each in self.hosted.catalog.managed_models()]

    async def load(self, model: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.hosted.control_target.load(model)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - not all of it is told
                await asyncio.sleep(0.01)


@asynccontextmanager
async def hosting(path: Path, *observers: Observer) -> AsyncIterator[ServiceHost]:
    """``serve`` in this process, with this config."""
    bus, notices = Bus(), list[PublishedEvent]()
    bus.listen(notices.append)

    def read() -> Config:
        return load(path, os.environ)

    options = ServeOptions(config=read, config_file=path, port=0, runtime=read().runtime.path)
    service = Service(options, bus)
    service.observe(*observers)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        async with asyncio.timeout(PATIENCE_S):
            while service.hosted_models is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            await service.hosted_models.begun()
        assert isinstance(service.hosted_models, ConfiguredModels)
        try:
            yield ServiceHost(service.hosted_models, notices)
        finally:
            service.ask_stop()
            await running


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    """Two models without further settings."""
    path = tmp_path / "c.yaml"
    write(path, tmp_path, tiny_model)
    return path


def write(path: Path, folder: Path, model: Path, head: str = "", **said: str) -> None:
    lines = [f"runtime: {install(folder / 'llama-server')}", head, "models:"]
    for name in ("a", "b"):
        source = (
            file_of(folder, name, model)
            if not (folder / f"{name}.gguf").exists()
            else folder / f"{name}.gguf"
        )
        more = said.get(name, "")
        lines.append(f"  {name}: {{path: {source}, ctx_size: 512, parallel: 1{more}}}")
    path.write_text("\n".join(lines) + "\n")


def without_a(config: Path) -> None:
    config.write_text("\n".join(line for line in config.read_text().splitlines() if " a:" not in line))


def test_free_memory_is_measured_before_any_load(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this every reload would remove the memory of the loaded models."""
    source = ConfigSource(ServeOptions(config=lambda: load(config, os.environ)), os.environ)
    before = source.read().options.budget
    machine = replace(hardware(), memory_available_bytes=1)
    monkeypatch.setattr(config_source, "hardware", lambda: machine)

    assert source.read().options.budget == before


def test_a_reload_without_changes_touches_nothing(config: Path) -> None:
    async def test() -> None:
        async with hosting(config) as it:
            await it.load("a")
            pid = it.pid("a")
            changes = await it.hosted.reload()

            assert changes.unchanged == ("a", "b")
            assert not changes
            assert it.pid("a") == pid

    asyncio.run(test())


@async_test
async def test_observer_that_cannot_be_closed_affects_no_other_and_not_the_last_event(config: Path) -> None:
    closed = []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    async with hosting(config, Observer(close=fail), Observer(close=lambda: closed.append(True))) as it:
        notices = it.notices
    assert closed == [True]
    assert isinstance(notices[-1], Stopped)


def test_every_process_of_a_model_is_counted(config: Path, tmp_path: Path, tiny_model: Path) -> None:
    write(config, tmp_path, tiny_model, a=", replicas: 2")

    async def test() -> None:
        async with hosting(config) as it:
            assert it.hosted.control_target.gauges() == []
            await it.load("a")
            await it.until(lambda: all(each.pid for each in it.hosted.runners_of("a")))

            assert [each.model for each in it.hosted.control_target.gauges()] == ["a", "a"]

    asyncio.run(test())


def test_rule_applies_to_models_downloaded_on_demand(config: Path, tmp_path: Path, tiny_model: Path) -> None:
    write(config, tmp_path, tiny_model, head="downloads: {on_demand: true}")
    config.write_text(config.read_text() + '  "org/*": {ctx_size: 768}\n')

    async def test() -> None:
        async with hosting(config) as it:
            invited = it.hosted.catalog.find("org/repo:Q8_0", create=True)
            assert invited is not None
            assert invited.spec.settings.ctx_size == 768

    asyncio.run(test())


def test_reload_changes_only_what_changed_in_the_config(
    config: Path, tmp_path: Path, tiny_model: Path
) -> None:
    async def test() -> None:
        async with hosting(config) as it:
            await it.load("a")
            await it.load("b")
            before = it.pid("a"), it.pid("b")
            write(config, tmp_path, tiny_model, a=", ttl: 1h", b=", threads: 1")
            changes = await it.hosted.reload()
            assert (changes.retouched, changes.changed) == (("a",), ("b",))
            async with asyncio.timeout(PATIENCE_S):
                await it.hosted.settled("b")

            assert it.pid("a") == before[0]
            assert it.pid("b") != before[1]

    asyncio.run(test())


@pytest.mark.parametrize("said", ["nonsense: 1", "memory: {ram: 1MiB}"])
def test_rejected_config_changes_nothing(said: str, config: Path, tmp_path: Path, tiny_model: Path) -> None:
    """Also a reload with too little memory for a model whose settings do not change."""

    async def test() -> None:
        async with hosting(config) as it:
            await it.load("a")
            pid, registry, budget = it.pid("a"), it.hosted.registry, it.hosted.budget
            write(config, tmp_path, tiny_model, said)
            with pytest.raises(ConfigInvalid):
                await it.hosted.reload()

            assert [type(each) for each in it.notices][-1] is ConfigRejected
            assert it.hosted.registry is registry
            assert it.pid("a") == pid
            assert it.hosted.budget == budget

    asyncio.run(test())


def test_less_memory_unloads_idle_models_and_more_allows_them(
    config: Path, tmp_path: Path, tiny_model: Path
) -> None:
    async def test() -> None:
        async with hosting(config) as it:
            await it.load("a")
            await it.load("b")
            catalog = it.hosted.catalog
            managed_models = list(catalog.managed_models())
            needs = managed_models[0].needs["ram"]
            write(config, tmp_path, tiny_model, f"memory: {{ram: {int(needs * 1.5) >> 10}KiB}}")
            changes = await it.hosted.reload()
            assert (changes.settings, changes.unchanged) == (("memory",), ("a", "b"))
            await it.until(lambda: sum(each.phase is Phase.RESIDENT for each in managed_models) == 1)
            write(config, tmp_path, tiny_model)
            await it.hosted.reload()
            await it.load("a")
            await it.load("b")

            assert all(each.phase is Phase.RESIDENT for each in managed_models)

    asyncio.run(test())


def test_a_reload_while_models_are_preloaded(config: Path, tmp_path: Path, tiny_model: Path) -> None:
    """One of them is removed from the config."""
    write(config, tmp_path, tiny_model, a=", preload: true", b=", preload: true")
    slow = install(tmp_path / "llama-server", "load_s=0.5")

    async def test() -> None:
        async with hosting(config) as it:
            without_a(config)
            changes = await it.hosted.reload()
            assert changes.removed == ("a",)
            await it.until(lambda: it.hosted.catalog.readiness() is None)

            assert list(it.hosted.registry.specs) == ["b"]
            assert it.pid("b") is not None
            assert any(isinstance(each, ModelsChanged) for each in it.notices)

    config.write_text(config.read_text().replace(str(tmp_path / "llama-server"), str(slow)))
    asyncio.run(test())


@pytest.mark.parametrize("capacity", [1.5, 2.5])
def test_preloaded_models_that_are_evicted_at_once_are_named(
    config: Path, tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture, capacity: float
) -> None:
    async def needs_bytes() -> int:
        async with hosting(config) as it:
            await it.load("a")
            return it.hosted.catalog.known("a").needs["ram"]

    async def test() -> None:
        async with hosting(config) as it:
            await it.until(lambda: it.hosted.catalog.readiness() is None)

    memory = f"memory: {{ram: {int(capacity * asyncio.run(needs_bytes()) / 1000)}kB}}"
    write(config, tmp_path, tiny_model, memory, a=", preload: true", b=", preload: true")
    asyncio.run(test())
    logged = [record.message for record in caplog.records if "do not fit into memory" in record.message]
    assert len(logged) == (capacity < 2)


# --- preloading


def test_new_preload_setting_loads_the_model(config: Path, tmp_path: Path, tiny_model: Path) -> None:
    async def test() -> None:
        async with hosting(config) as it:
            write(config, tmp_path, tiny_model, a=", preload: true", b=", preload: true, threads: 1")
            changes = await it.hosted.reload()

            assert (changes.retouched, changes.changed) == (("a",), ("b",))
            await it.until(lambda: it.phases() == [Phase.RESIDENT] * 2)

    asyncio.run(test())


def test_failed_preload_is_repeated_after_the_config_is_fixed(
    config: Path, tmp_path: Path, tiny_model: Path
) -> None:
    write(config, tmp_path, tiny_model, a=", preload: true, threads: 1")
    usual = install(tmp_path / "usual-server")
    (tmp_path / "llama-server").write_text(
        '#!/bin/sh\ncase "$*" in *a.gguf*) echo "error: invalid argument: --x" >&2; exit 1 ;; esac\n'
        f'exec "{usual}" "$@"\n'
    )

    async def test() -> None:
        async with hosting(config) as it:
            await it.until(lambda: it.hosted.catalog.readiness() is None)
            assert it.phases()[0] is Phase.FAILED
            write(config, tmp_path, tiny_model, a=", preload: true")
            await it.hosted.reload()

            await it.until(lambda: it.phases() == [Phase.RESIDENT, Phase.ABSENT])

    asyncio.run(test())


def test_missing_preloaded_model_is_loaded_when_its_file_appears(
    config: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """For example a disk that is mounted late."""
    folder = tmp_path / "mounted"
    config.write_text(
        f"runtime: {install(tmp_path / 'llama-server')}\nmodels_dir: {folder}\n"
        "models:\n  c: {preload: true, ctx_size: 512, parallel: 1}\n"
    )

    async def test() -> None:
        async with hosting(config) as it:
            await it.until(lambda: it.hosted.catalog.readiness() is None)
            folder.mkdir()
            file_of(folder, "c", tiny_model)
            await it.hosted.reload()

            await it.until(lambda: it.phases() == [Phase.RESIDENT])

    asyncio.run(test())


@async_test
async def test_refused_link_has_its_remedy_before_and_after_a_load(tmp_path: Path, tiny_model: Path) -> None:
    folder, config = tmp_path / "models", tmp_path / "c.yaml"
    folder.mkdir()
    (folder / "link.gguf").symlink_to(tiny_model)
    config.write_text(f"runtime: {install(tmp_path / 'llama-server')}\nmodels_dir: {folder}\n")
    async with hosting(config) as it:
        target = it.hosted.control_target
        (model,) = target.status()["models"]
        assert "set follow_links: true" in model["remedy"]
        assert "set follow_links: true" in " ".join(target.why("link")["change"])
        with pytest.raises(ModelInvalid) as refused:
            await it.load("link")
        assert "set follow_links: true" in refused.value.remedy


def test_model_unloaded_by_hand_stays_unloaded_after_other_changes(
    config: Path, tmp_path: Path, tiny_model: Path
) -> None:
    write(config, tmp_path, tiny_model, a=", preload: true")

    async def test() -> None:
        async with hosting(config) as it:
            await it.until(lambda: it.phases()[0] is Phase.RESIDENT)
            await it.hosted.control_target.unload("a")
            write(config, tmp_path, tiny_model, a=", preload: true, aliases: [x]", b=", preload: true")
            await it.hosted.reload()
            await it.until(lambda: it.phases()[1] is Phase.RESIDENT)

            assert it.phases()[0] is Phase.ABSENT
            assert not it.hosted.catalog.known("a").wanted

    asyncio.run(test())


def name_node(config: Path, name: str, *more: str) -> None:
    """Write ``name`` as the only node of the config, and further lines."""
    kept = [line for line in config.read_text().splitlines() if not line.startswith("peers:")]
    config.write_text("\n".join([*kept, f"peers: {{{name}: {{url: 'http://127.0.0.1:1'}}}}", *more]) + "\n")


@async_test
async def test_reload_changes_the_nodes_if_there_were_any_at_the_start(config: Path) -> None:
    name_node(config, "desk")
    async with hosting(config) as it:
        peers = it.hosted.peers
        assert peers is not None
        assert [known.peer.name for known in peers.nodes] == ["desk"]
        name_node(config, "door")
        changes = await it.hosted.reload()
        assert (changes.settings, changes.next_start) == (("peers",), ())
        await it.until(lambda: [known.peer.name for known in peers.nodes] == ["door"])
        assert it.hosted.in_flight == 0


@async_test
async def test_requests_wait_for_other_nodes_as_long_as_defaults_say(config: Path) -> None:
    name_node(config, "desk", "defaults: {wait_timeout: 7s, max_queued: 3}")
    async with hosting(config) as it:
        assert it.hosted.peers is not None
        assert (it.hosted.peers._timeout_s, it.hosted.peers._max_waiting) == (7.0, 3)


@async_test
async def test_first_node_of_a_config_needs_a_restart(config: Path) -> None:
    async with hosting(config) as it:
        # Nothing of other nodes, or of virtual models, is on the path of a request.
        assert it.hosted.backend.resolve == it.hosted.catalog.resolve
        name_node(config, "desk")
        changes = await it.hosted.reload()
        assert (changes.settings, changes.next_start) == ((), ("peers",))
        assert it.hosted.peers is None
