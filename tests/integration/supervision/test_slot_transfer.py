"""Saving and restoring slots with servers that are slow, reject the request or crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.llama_server.slots.policy import SavedSet
from llamasup.core.llama_server.slots.store import SlotStore
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import ServerExited, ServerWarned
from llamasup.core.supervision.states import State, StopRequested
from tests.e2e.service import Serving, serving
from tests.kit.fake_server import install

KEEP = Settings(keep_slots=True, parallel=2, ctx_size=1024)
SLOW = ("slots_s=600",)
# The stop timeout is so long that a kill does not end the server, which waits for a running request.
SHORT: dict[str, Any] = {"slots_timeout_s": 0.2, "stop_timeout_s": 1000.0}
WORDS = "What is said here has more than thirty-two characters, which are tokens to the fake."


@pytest.fixture
def slots(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A slot folder for this test alone."""
    cache = own_folders / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "llamasup" / "slots"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def sets(folder: Path) -> list[SavedSet]:
    return list(SlotStore(folder)._sets())


def warnings(server: Serving) -> list[str]:
    return [event.message for event in server.notices if isinstance(event, ServerWarned)]


class Stage:
    """One model that several servers with different faults serve in turn."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._program = folder / "llama-server"

    @asynccontextmanager
    async def served(self, *faults: str, generation: int = 1, **options: Any) -> AsyncIterator[Serving]:
        # The same path and a version with a commit: the slots stay usable with every fault.
        install(self._program, *faults)
        async with serving(self._model, runtime=str(self._program), settings=KEEP, **options) as server:
            await server.reaches(State.READY, generation)
            yield server

    async def talk(self, slots: Path) -> None:
        async with self.served() as server:
            assert (await server.complete(prompt=WORDS)).status_code == 200
        assert len(sets(slots)) == 1


@pytest.fixture
def stage(tiny_model: Path, tmp_path: Path) -> Stage:
    return Stage(tiny_model, tmp_path)


def test_only_slots_with_a_conversation_are_saved(stage: Stage, slots: Path) -> None:
    async def test() -> None:
        await stage.talk(slots)
        (saved,) = sets(slots)
        assert [slot.tokens for slot in saved.slots] == [len(WORDS)]  # the warm-up is no conversation
        async with stage.served() as server:
            assert names(slots) == []
            assert warnings(server) == []
        assert [slot.tokens for slot in sets(slots)[0].slots] == [len(WORDS)]  # unused slots are saved again

    asyncio.run(test())


def test_failed_save_does_not_fail_the_stop(stage: Stage, slots: Path) -> None:
    async def test() -> None:
        async with stage.served("slots_fail=save") as server:
            await server.complete(prompt=WORDS)
            server.runner.post(StopRequested())
            await server.reaches(State.STOPPED, 1)
            assert warnings(server) == ["Could not save all slots: Unable to save slot."]
        assert names(slots) == []  # and no partial file

    asyncio.run(test())


def test_rejected_slot_is_a_warning_and_a_new_server_serves(stage: Stage, slots: Path) -> None:
    async def test() -> None:
        await stage.talk(slots)
        async with stage.served("slots_fail=restore", generation=2) as server:
            assert (await server.complete(prompt=WORDS)).status_code == 200
            assert server.runner.instance.generation == 2
            assert server.runner.instance.crashes == ()
            (message,) = warnings(server)
            assert message.startswith("Could not restore saved slots: Unable to restore slot")
            assert message.endswith("llama-server is started again without them.")
            assert names(slots) == []

    asyncio.run(test())


def test_exit_during_restore_is_not_a_crash(stage: Stage, slots: Path) -> None:
    async def test() -> None:
        await stage.talk(slots)
        async with stage.served("slots_fail=die", generation=2) as server:
            assert (await server.complete(prompt=WORDS)).status_code == 200
            assert server.runner.instance.crashes == ()
            assert warnings(server)[0].endswith("llama-server is started again without them.")

    asyncio.run(test())


def test_slow_restore_does_not_delay_serving(stage: Stage, slots: Path) -> None:
    async def test() -> None:
        await stage.talk(slots)
        async with stage.served(*SLOW, **SHORT) as server:
            assert (await server.complete(prompt=WORDS)).status_code == 200
            assert server.runner.instance.generation == 1

    asyncio.run(test())


def test_slow_save_is_cancelled_and_leaves_no_files(stage: Stage, slots: Path) -> None:
    async def test() -> None:
        async with stage.served(*SLOW, **SHORT) as server:
            await server.complete(prompt=WORDS)
            server.runner.post(StopRequested())
            await server.reaches(State.STOPPED, 1)
            assert not any(isinstance(event, ServerExited) for event in server.notices)
        assert names(slots) == []

    asyncio.run(test())


def test_slot_list_contains_no_conversation(stage: Stage, slots: Path) -> None:
    asyncio.run(stage.talk(slots))
    (listed,) = slots.glob("*.json")
    listed_fields = json.loads(listed.read_text())
    assert set(listed_fields) == {"key", "token", "saved_ns", "files", "slots"}
    assert "more than thirty-two" not in listed.read_text()
