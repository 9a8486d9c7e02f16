"""Saved slots with real servers: the second turn of a conversation after its model was unloaded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup.core.llama_server.slots.store import sweep_slots
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import ServerExited, ServerWarned
from llamasup.core.supervision.states import KillRequested, RestartRequested, State, StopRequested
from tests.e2e.driver import PATIENCE_S, started
from tests.e2e.service import Serving, serving
from tests.kit.architectures import tiny_model
from tests.real.remains import folders_of

KEEP = Settings(keep_slots=True, parallel=2, ctx_size=1024)
FIRST = [{"role": "user", "content": "Tell me of the quick brown fox and the lazy dog, please. " * 8}]
OTHER = [{"role": "user", "content": "What was that about seven ships and a stone in the sea? " * 8}]
ASIDE = [{"role": "user", "content": "Another one who only says hello to the very same model. " * 8}]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model, tmp_path / "tiny.gguf"))


class Folder:
    """The folder of the saved slots."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()}

    def modes(self) -> set[int]:
        return {stat.S_IMODE(path.stat().st_mode) for path in self.path.iterdir()}

    def first(self) -> Path:
        return min(self.path.glob("*.kv"))

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.glob("*.kv"))

    def damage_slots(self, how: Callable[[bytes], bytes]) -> None:
        """Change each slot and its recorded checksum, as if the slot had been saved like this."""
        (listed,) = self.path.glob("*.json")
        listing = json.loads(listed.read_text())
        for slot in listing["slots"]:
            content = how((self.path / slot["name"]).read_bytes())
            (self.path / slot["name"]).write_bytes(content)
            slot |= {"size_bytes": len(content), "crc32": zlib.crc32(content)}
        listed.write_text(json.dumps(listing))

    def empty(self) -> None:
        for path in self.path.iterdir():
            path.unlink()


@pytest.fixture
def slots(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A slot folder for this test only."""
    cache = own_folders / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return Folder(cache / "llamasup" / "slots")


async def answer_of(server: Serving, messages: list[dict[str, str]]) -> tuple[str, int]:
    """The answer, and the number of cached prompt tokens."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answer = await server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed["choices"][0]["message"]["content"], parsed["timings"]["cache_n"]


def next_turn(messages: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]


def warnings(server: Serving) -> list[str]:
    return [notice.message for notice in server.notices if isinstance(notice, ServerWarned)]


async def start_conversations(server: Serving) -> list[list[dict[str, str]]]:
    """Start two conversations, each in its own slot. Returns the messages of their second turns."""
    return [next_turn(first, (await answer_of(server, first))[0]) for first in (FIRST, OTHER)]


def timings_in(line: str) -> dict[str, int]:
    timings: dict[str, int] = json.loads(line.removeprefix("data: "))["timings"]
    return timings


async def until(lines: AsyncIterator[str], mark: str) -> AsyncIterator[str]:
    """The lines of a stream that have data, up to the first one with ``mark``."""
    async for line in lines:
        if line.startswith("data: "):
            yield line
        if mark in line:
            return
    raise AssertionError(f"the stream ended without {mark}")


def run(test: Callable[[], Any]) -> Any:
    return asyncio.run(test())


def test_continued_stream_reuses_the_slot_that_the_drain_timeout_interrupted(
    runtime: str, model: Path, slots: Folder
) -> None:
    """The next server computes one token of the prompt and of the text so far, to sample the next one."""
    long = {"n_predict": 30_000, "ignore_eos": True, "timings_per_token": True, "stream": True}
    settings = Settings(keep_slots=True, parallel=1, ctx_size=32_768)

    async def test() -> None:
        options: dict[str, Any] = {"continue_streams": True, "drain_timeout_s": 0.0}
        async with serving(model, runtime=runtime, settings=settings, **options) as server:
            await server.reaches(State.READY, 1)
            body = {"prompt": "Seven ships and a stone in the sea. " * 8, **long}
            async with server.client.stream("POST", "/completion", json=body) as stream:
                lines = stream.aiter_lines()
                first = timings_in(await anext(lines))
                server.runner.post(RestartRequested())
                found = [first, *[timings_in(line) async for line in until(lines, '"prompt_n":0,')]]
            assert found[-1]["cache_n"] == first["cache_n"] + first["prompt_n"]
            assert found[-1]["predicted_n"] == found[-2]["predicted_n"] + 1

    run(test)


@pytest.mark.contract
@pytest.mark.parametrize("changes", [{}, {"profile": "throughput"}], ids=["own slots", "shared cells"])
def test_second_turn_after_a_swap_reuses_the_first_and_answers_the_same(
    changes: dict[str, Any], runtime: str, model: Path, slots: Folder
) -> None:
    settings = Settings(keep_slots=True, parallel=2, ctx_size=1024, **changes)

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=settings) as server:
            seconds = await start_conversations(server)
            unswapped = [await answer_of(server, second) for second in seconds]
        slots.empty()
        async with serving(model, runtime=runtime, settings=settings) as server:
            assert seconds == await start_conversations(server)
        assert slots.modes() == {0o600}
        async with serving(model, runtime=runtime, settings=settings) as server:
            swapped = [await answer_of(server, second) for second in seconds]
            assert slots.names() == set()  # removed after their restore
            assert warnings(server) == []
        print(f"unswapped {unswapped}, swapped {swapped}")
        assert [answer for answer, _ in swapped] == [answer for answer, _ in unswapped]
        assert [known for _, known in swapped] == [known for _, known in unswapped]
        assert min(known for _, known in swapped) > 200

    run(test)


@pytest.mark.one_runtime
def test_restart_keeps_slots_unless_keep_slots_is_off(runtime: str, model: Path, slots: Folder) -> None:
    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            seconds = await start_conversations(server)
            server.service.ask_reload()
            await server.reaches(State.READY, 2)
            known = [(await answer_of(server, second))[1] for second in seconds]
        assert min(known) > 200
        async with serving(model, runtime=runtime, settings=Settings(parallel=2, ctx_size=1024)) as server:
            assert [(await answer_of(server, second))[1] for second in seconds] == [
                0,
                pytest.approx(0, abs=40),
            ]

    run(test)


@pytest.mark.one_runtime
@pytest.mark.parametrize(
    "changed", [{"kv_type": "q8_0"}, {"ctx_size": 2048}, {"parallel": 3}, {"flash_attn": "off"}], ids=str
)
def test_slots_saved_under_other_settings_are_not_restored(
    changed: dict[str, Any], runtime: str, model: Path, slots: Folder
) -> None:
    other = {"parallel": 2, "ctx_size": 1024, **changed}

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            seconds = await start_conversations(server)
        before = slots.names()
        async with serving(model, runtime=runtime, settings=Settings(keep_slots=True, **other)) as server:
            assert (await answer_of(server, seconds[0]))[1] == 0
            assert warnings(server) == []
            assert slots.names() == before  # the old settings may return

    run(test)


@pytest.mark.one_runtime
def test_slots_saved_with_another_model_file_are_removed(runtime: str, model: Path, slots: Folder) -> None:
    """llama-server would restore them, because the shapes are equal, and answer nonsense."""

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            seconds = await start_conversations(server)
        assert slots.names()
        os.utime(model, (1, 1))
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            assert (await answer_of(server, seconds[0]))[1] == 0
            assert slots.names() == set()
        before = slots.names()
        os.unlink(model)  # noqa: PTH108
        sweep_slots()
        assert before
        assert slots.names() == set()

    run(test)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes(range(200)))


def _replace(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.one_runtime
@pytest.mark.parametrize("damage", [_cut, _flip, _replace, Path.unlink])
def test_damaged_slot_is_reported_and_the_others_are_restored(
    damage: Callable[[Path], None], runtime: str, model: Path, slots: Folder
) -> None:
    """Without the check, the first would abort llama-server, and the second would lead to nonsense."""

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            seconds = await start_conversations(server)
            unswapped = sorted([(await answer_of(server, second))[0] for second in seconds])
        damage(slots.first())
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            answers = [await answer_of(server, second) for second in seconds]
            assert server.runner.instance.generation == 1
            assert sorted(answer for answer, _ in answers) == unswapped
            assert [known > 200 for _, known in answers].count(True) == 1
            assert warnings(server) == [
                "Could not restore saved slots: 1 of them was damaged. "
                "The prompts of those conversations are computed again."
            ]

    run(test)


def _refused(content: bytes) -> bytes:
    return content[:8] + b"\xff" * 192 + content[200:]


def _deadly(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("spoil", [_refused, _deadly])
def test_slot_that_crashes_the_server_costs_one_restart_and_no_answer(
    spoil: Callable[[bytes], bytes], runtime: str, model: Path, slots: Folder
) -> None:
    """No checksum shows this: the build writes slots that it rejects, or that crash it."""

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            seconds = await start_conversations(server)
            unswapped = [(await answer_of(server, second))[0] for second in seconds]
        slots.damage_slots(spoil)
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            answers = [await answer_of(server, second) for second in seconds]
            assert (answers[0][1], [answer for answer, _ in answers]) == (0, unswapped)
            assert server.runner.instance.generation == 2
            (message,) = warnings(server)
            assert message.startswith("Could not restore saved slots: ")
            assert message.endswith("llama-server is started again without them.")
            assert slots.names() == set()

    run(test)


@pytest.mark.one_runtime
def test_saved_slots_stay_within_the_disk_limit(runtime: str, model: Path, slots: Folder) -> None:
    """A limit of one and a half sets keeps only the newest set. A limit below one slot keeps none."""

    async def save_slots(bound: int, **settings: Any) -> Serving:
        full_settings = Settings(keep_slots=True, parallel=2, **settings)
        async with serving(model, runtime=runtime, settings=full_settings, slots_disk_bytes=bound) as server:
            await start_conversations(server)
        return server

    async def test() -> None:
        await save_slots(1 << 30, ctx_size=1024)
        whole = slots.size_bytes()
        first = slots.names()
        await save_slots(whole * 3 // 2, ctx_size=2048)
        assert slots.size_bytes() <= whole * 3 // 2
        assert first.isdisjoint(slots.names())
        server = await save_slots(whole // 3, ctx_size=512)
        assert slots.names() == set()
        assert "exceed the disk limit" in warnings(server)[0]

    run(test)


@pytest.mark.one_runtime
def test_server_killed_while_saving_slots_stops_and_restores_none(
    runtime: str, model: Path, slots: Folder
) -> None:
    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            seconds = await start_conversations(server)
            os.kill(server.pid, signal.SIGSTOP)  # it cannot save slots
            server.runner.post(StopRequested())
            await server.runner.until(lambda instance: instance.transferring_slots)
            os.kill(server.pid, signal.SIGKILL)
            await server.reaches(State.STOPPED, 1)
            assert not any(isinstance(notice, ServerExited) for notice in server.notices)
        assert slots.names() == set()
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            assert (await answer_of(server, seconds[0]))[1] == 0

    run(test)


@pytest.mark.one_runtime
def test_second_stop_does_not_wait_for_slots_to_be_saved(runtime: str, model: Path, slots: Folder) -> None:
    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            await start_conversations(server)
            os.kill(server.pid, signal.SIGSTOP)
            server.runner.post(StopRequested())
            await server.runner.until(lambda instance: instance.transferring_slots)
            server.runner.post(KillRequested())
            await server.reaches(State.STOPPED, 1)
        assert slots.names() == set()

    run(test)


@pytest.mark.one_runtime
def test_clients_can_neither_save_nor_restore_slots(runtime: str, model: Path, slots: Folder) -> None:
    """X7. llamasup starts llama-server with the folder, so llama-server itself would accept the request."""

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            await start_conversations(server)
            for action in ("save", "restore", "erase"):
                answer = await server.client.post(f"/slots/0?action={action}", json={"filename": "x"})
                assert answer.status_code == 403, answer.text
            assert slots.names() == set()

    run(test)


@pytest.mark.parametrize("architecture", ["mamba2", "falcon-h1", "qwen35"])
def test_recurrent_model_continues_from_its_saved_state(
    architecture: str, runtime: str, tmp_path: Path, slots: Folder
) -> None:
    """Saved slots lack its checkpoints (b11434), so the next prompt must begin with all previous tokens."""
    model = tmp_path / f"{architecture}.gguf"
    model.write_bytes(tiny_model(architecture))
    words = "The quick brown fox jumps over the lazy dog. " * 8
    body = {"prompt": words, "n_predict": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True}

    async def test() -> None:
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            tokens = (
                await server.client.post("/tokenize", json={"content": words, "add_special": True})
            ).json()
            made = (await server.client.post("/completion", json=body)).json()["tokens"]
            more = {**body, "prompt": [*tokens["tokens"], *made, *tokens["tokens"][-5:]]}
            unswapped = (await server.client.post("/completion", json=more)).json()
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            await server.client.post("/completion", json=body)
        async with serving(model, runtime=runtime, settings=KEEP) as server:
            swapped = (await server.client.post("/completion", json=more)).json()
        assert swapped["content"] == unswapped["content"]
        assert swapped["timings"]["cache_n"] >= len(tokens["tokens"]) - 8

    run(test)


@pytest.mark.parametrize("keep", [True, False])
def test_evicted_model_continues_its_conversations_after_the_reload(
    keep: bool, runtime: str, tiny_model: Path, slots: Folder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("s")  # short, because it will hold sockets
    for name in ("one", "two"):
        shutil.copy(tiny_model, home / f"{name}.gguf")
    config = {
        "listen": "127.0.0.1:0",
        "runtime": runtime,
        "max_loaded": 1,
        "slots": {"keep": keep, "disk": "1GiB"},
        "models": {name: {"path": str(home / f"{name}.gguf"), "ctx_size": 1024} for name in ("one", "two")},
    }
    (home / "config.yaml").write_text(json.dumps(config))  # JSON is valid YAML

    def ask(model: str, messages: list[dict[str, str]]) -> tuple[str, int]:
        body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
        parsed = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        return parsed["choices"][0]["message"]["content"], parsed["timings"]["cache_n"]

    env = {**os.environ, **folders_of(home)}
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        first, _ = ask("one", FIRST)
        ask("two", OTHER)
        ask("one", ASIDE)
        ask("two", ASIDE)
        known = [ask("one", next_turn(FIRST, first))[1], ask("one", next_turn(ASIDE, ""))[1]]
        assert running.stop() == 0
    if keep:
        assert min(known) > 200, known
        assert slots.size_bytes() <= 1 << 30
    else:
        assert known[0] == 0, known
        assert not slots.path.exists()
