"""The llamasup of a node, as a real child with a fake llama-server, without Ray."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from llamasup.errors import ServerFailed
from llamasup.fleet import node_process
from llamasup.fleet.node_config import node_config
from llamasup.fleet.node_process import NodeProcess, NodeSpec
from llamasup.fleet.secret import node_key
from llamasup.fleet.secret_file import VARIABLE
from tests.fleet.test_node_config import tree_of
from tests.kit.async_tests import async_test
from tests.kit.fake_server import install
from tests.kit.patience import PATIENCE_S
from tests.kit.tiny import tiny_decoder

SECRET = "s" * 40


def spec_in(
    folder: Path, *fakes: str, model: str = "tiny.gguf", sleeps_after_s: float | None = None
) -> NodeSpec:
    (folder / "tiny.gguf").write_bytes(tiny_decoder())
    runtime = install(folder / "llama-server", *fakes)
    written = tree_of(f"runtime: {runtime}\nmodels: {{tiny: {{path: {model}}}}}")
    source = str(folder / model)
    config = node_config(
        written,
        folder=str(folder),
        model="tiny",
        source=source,
        aliases=(),
        sleeps_after_s=sleeps_after_s,
    )
    return NodeSpec("tiny", config, SECRET)


@asynccontextmanager
async def node_of(spec: NodeSpec) -> AsyncIterator[NodeProcess]:
    process = NodeProcess(spec, "127.0.0.1", {**os.environ, VARIABLE: SECRET})
    await process.start()
    try:
        yield process
    finally:
        await process.stop(now=True)


@pytest.fixture(autouse=True)
def folder_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nodes"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(node_process, "_ANSWER_S", PATIENCE_S)  # a busy machine answers late
    return folder


@pytest.mark.check("X4", "401 without it")
@async_test
async def test_node_serves_over_tls_with_the_keys_of_the_fleet_and_leaves_nothing(
    tmp_path: Path, folder_of_nodes: Path
) -> None:
    async with node_of(spec_in(tmp_path)) as process:
        assert process.url.startswith("https://127.0.0.1:")
        await process.check()
        load = await process.load()
        assert load.slots >= 1
        assert load.ready
        async with httpx.AsyncClient(verify=False, base_url=process.url) as stranger:  # noqa: S501
            assert (await stranger.get("/v1/models")).status_code == 401
    assert process.exit_code is not None
    assert os.listdir(folder_of_nodes) == []  # noqa: PTH208 - in an async function


@async_test
async def test_idle_node_unloads_its_model_and_wakes(tmp_path: Path) -> None:
    async with node_of(spec_in(tmp_path, sleeps_after_s=1.0)) as process, asyncio.timeout(PATIENCE_S):
        awake = await process.load()
        for is_asleep in (True, False, True):
            while (load := await process.load()).asleep is not is_asleep:  # noqa: ASYNC110 - asks a process
                await asyncio.sleep(0.05)
            assert load.slots == awake.slots, "known from before"
            assert not (load.asleep and load.ready)
            await process.check()
            if is_asleep:
                await process.wake()


@async_test
async def test_stop_now_ends_a_request_that_runs(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, "stall_after=1")
    async with node_of(spec) as process, httpx.AsyncClient(verify=False) as client:  # noqa: S501
        key = node_key(SECRET)
        request = client.build_request(
            "POST",
            process.url + "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True},
            headers={"authorization": f"Bearer {key}"},
        )
        answer = await client.send(request, stream=True)
        assert answer.status_code == 200
        await process.stop(now=True)
        assert process.exit_code is not None
        await answer.aclose()


@async_test
async def test_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed) as error:
        async with node_of(spec_in(tmp_path, model="gone.gguf")):
            pass
    path = tmp_path / "gone.gguf"
    assert error.value.message == (
        f"Node 127.0.0.1: models.tiny.path: {path}: there is no such file. "
        f"Did you mean {tmp_path / 'tiny.gguf'}?"
    )


@async_test
async def test_line_of_any_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "llamasup.py"
    script.write_text(
        """\
import sys
for output in (sys.stderr, sys.stdout):
    print("x" * 3_000_000, file=output, flush=True)
print('{"event": "ready", "url": "https://127.0.0.1:1"}', flush=True)
sys.stdin.read()
"""
    )
    monkeypatch.setattr(node_process, "own_command", lambda _: [sys.executable, str(script)])
    async with asyncio.timeout(PATIENCE_S), node_of(NodeSpec("tiny", "", SECRET)) as process:
        assert process.url == "https://127.0.0.1:1"


@async_test
async def test_late_answer_is_no_failure_but_a_long_silence_and_an_end_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(spec_in(tmp_path)) as process:
        assert process._client is not None
        working = process._client
        process._client = httpx.AsyncClient(
            base_url="http://127.0.0.1:9", trust_env=False
        )  # nothing is there
        await process.check()
        monkeypatch.setattr(node_process, "_SILENT_S", 0.0)
        with pytest.raises(ServerFailed, match="has not answered for"):
            await process.check()
        await process._client.aclose()
        process._client = working
        await process.check()
        await process.stop(now=False)
        with pytest.raises(ServerFailed, match="ended with exit code"):
            await process.check()


def test_folders_of_killed_actors_are_removed_and_those_in_use_stay(folder_of_nodes: Path) -> None:
    left = folder_of_nodes / "llamasup-fleet-left"
    left.mkdir()
    (left / "key.pem").write_text("secret")
    used, lock = node_process._claimed_folder()
    assert lock is not None
    node_process._remove_left_behind()
    assert list(folder_of_nodes.iterdir()) == [used]
    os.close(lock)
    node_process._remove_left_behind()
    assert list(folder_of_nodes.iterdir()) == []


def test_secret_is_not_in_what_logs_show() -> None:
    assert SECRET not in repr(NodeSpec("tiny", f"key: {SECRET}", SECRET))
