"""The fake llama-server, as a real child: it behaves like llama-server (b11434), and has faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.system.process.child import Exit
from llamasup.core.system.process.output_pump import LogPump
from llamasup.core.system.process.spawn import Child, spawn
from tests.kit.fake_server import install
from tests.kit.patience import PATIENCE_S

SOON = httpx.Timeout(PATIENCE_S, read=0.3)
"""The timeout for an answer that never comes."""


@dataclass
class Fake:
    """A running fake, its log, and a client for it."""

    child: Child
    log: LogPump
    http: httpx.AsyncClient

    async def log_line(self, words: bytes) -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not found.done():
                found.set_result(line)

        self.log.watch(re.compile(words), on_line)
        return await found

    async def end(self) -> tuple[Exit, tuple[str, ...]]:
        exit = await self.child.wait()
        await self.log.aclose(10)
        return exit, self.log.tail()


@asynccontextmanager
async def fake(
    folder: Path, *fakes: str, args: tuple[str, ...] = (), ready: bool = True
) -> AsyncIterator[Fake]:
    """A fake on a Unix socket with an empty environment, as llamasup would start it."""
    model, link = folder / "m.gguf", folder / "llama-server"
    model.touch()
    install(link, *fakes)
    # Relative to the child's folder, because pytest's paths are too long for a socket.
    argv = (str(link), "--host", "s.sock", "--port", "0", "--model", str(model), "--metrics", *args)
    folder_fd = os.open(folder, os.O_PATH)
    transport = httpx.AsyncHTTPTransport(uds=f"/proc/self/fd/{folder_fd}/s.sock")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
        child = spawn(argv, env={}, cwd=folder)
        log = LogPump(child.output_fd)
        running = Fake(child, log, http)
        try:
            if ready:
                await running.log_line(b"listening on")
            yield running
        finally:
            child.kill_group()
            await child.wait()
            await log.aclose(10)
            os.close(folder_fd)


@pytest.mark.parametrize("flag", ["--help", "--version", "--list-devices"])
def test_fake_prints_help_version_and_devices(tmp_path: Path, flag: str) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, args=(flag,), ready=False) as server:
            exit, lines = await server.end()
        assert exit == Exit(0, None)
        known = ("--sleep-idle-seconds", "version: ", "Available devices:")
        assert any(words in line for line in lines for words in known)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (("--frobnicate",), "flag_unknown"),
        (("--ctx-size",), "flag_invalid"),
        (("--draft-max", "8"), "flag_removed"),
        (("--model", "/nowhere/m.gguf"), "model_missing"),
        (("--host", "/nowhere/s.sock"), "port_in_use"),
    ],
)
def test_fake_fails_with_messages_of_llama_server(tmp_path: Path, args: tuple[str, ...], cause: str) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, args=args, ready=False) as server:
            exit, lines = await server.end()
        assert exit == Exit(1, None)
        assert diagnose(exit, lines, phase="starting").cause == cause

    asyncio.run(scenario())


def test_fake_serves_endpoints_of_llama_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, args=("-np", "2", "--alias", "tiny")) as server:
            http = server.http
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            assert (await http.get("/props")).json()["total_slots"] == 2
            assert [slot["is_processing"] for slot in (await http.get("/slots")).json()] == [False, False]
            assert (await http.post("/tokenize", json={"content": "ab"})).json() == {"tokens": [97, 98]}
            plain = (await http.post("/v1/chat/completions", json={"max_tokens": 2})).json()
            assert plain["choices"][0]["message"]["content"] == " w0 w1"
            assert (await http.post("/completion", json={"n_predict": 3})).json()["content"] == " w0 w1 w2"
            assert "llamacpp:n_decode_total 5\n" in (await http.get("/metrics")).text
            assert (await http.get("/nowhere")).json()["error"]["type"] == "not_found_error"
            assert (await http.post("/v1/embeddings", json={"input": "a"})).status_code == 501
            assert (await http.post("/v1/rerank", json={"documents": []})).status_code == 501
            assert (await http.post("/completion", content=b"{")).status_code == 400

            async def in_chunks() -> AsyncIterator[bytes]:
                yield b'{"content":'
                yield b'"c"}'

            assert (await http.post("/tokenize", content=in_chunks())).json() == {"tokens": [99]}

    asyncio.run(scenario())


def test_stream_has_the_text_of_the_plain_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path) as server:
            for path in ("/v1/chat/completions", "/v1/completions", "/completion"):
                response = await server.http.post(
                    path, json={"stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
                )
                events = response.text.split("\n\n")
                assert response.headers["content-type"] == "text/event-stream"
                assert events[-2:] == ["data: [DONE]", ""]
                assert '" w0"' in events[0]
                assert '"timings"' in events[-3]

    asyncio.run(scenario())


@pytest.mark.parametrize(("flag", "path", "body"), [
    ("--embedding", "/v1/embeddings", {"input": ["a", "b"]}),
    ("--rerank", "/v1/rerank", {"documents": ["a", "b"]}),
])  # fmt: skip
def test_fake_embeds_and_ranks_with_the_flag(
    tmp_path: Path, flag: str, path: str, body: dict[str, object]
) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, args=(flag,)) as server:
            answer = (await server.http.post(path, json=body)).json()
            assert len(answer.get("data") or answer["results"]) == 2

    asyncio.run(scenario())


def test_fake_requires_its_key_except_for_health(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "keys").write_text("sesame\n")
        async with fake(tmp_path, args=("--api-key-file", str(tmp_path / "keys"))) as server:
            assert (await server.http.get("/health")).status_code == 200
            assert (await server.http.get("/props")).status_code == 401
            key = {"Authorization": "Bearer sesame"}
            assert (await server.http.get("/props", headers=key)).status_code == 200

    asyncio.run(scenario())


def test_fake_binds_before_it_loads_and_answers_503_until_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, "load_s=60", ready=False) as server:
            await server.log_line(b"still loading")
            response = await server.http.get("/health")
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "Loading model"
            server.child.terminate()
            assert await server.child.wait() == Exit(None, "SIGTERM")  # as llama-server while loading

    asyncio.run(scenario())


def test_fake_stops_once_idle_and_at_once_after_second_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path) as server:
            server.child.terminate()
            exit, lines = await server.end()
            assert (exit, "cleaning up before exit" in lines[-1]) == (Exit(0, None), True)
        (tmp_path / "s.sock").unlink()
        async with fake(tmp_path, "token_s=0.01") as server:
            request = {"stream": True, "n_predict": 100_000}
            async with server.http.stream("POST", "/completion", json=request) as response:
                events = response.aiter_lines()
                await anext(events)
                server.child.terminate()
                with pytest.raises(TimeoutError):  # an open stream delays the stop
                    await asyncio.wait_for(server.child.wait(), 0.2)
                server.child.terminate()
                assert await server.child.wait() == Exit(1, None)

    asyncio.run(scenario())


def test_disconnect_of_client_frees_its_slot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, "token_s=600", args=("-np", "1")) as server:

            async def busy() -> bool:
                return any(slot["is_processing"] for slot in (await server.http.get("/slots")).json())

            request = asyncio.ensure_future(server.http.post("/completion", json={}))  # noqa: TID251
            while not await busy():
                pass
            request.cancel()
            while await busy():
                pass

    asyncio.run(scenario())


@pytest.mark.parametrize(("fault", "exit"), [
    ("exit=start:3", Exit(3, None)), ("exit=load:4", Exit(4, None)), ("exit=ready:0", Exit(0, None)),
    ("signal=start:SIGSEGV", Exit(None, "SIGSEGV")), ("signal=load:SIGKILL", Exit(None, "SIGKILL")),
    ("signal=ready:SIGABRT", Exit(None, "SIGABRT")),
])  # fmt: skip
def test_fake_exits_in_the_phase_that_its_fault_names(tmp_path: Path, fault: str, exit: Exit) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, fault, ready=False) as server:
            assert await server.child.wait() == exit

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("where", "cause"), [("host", "out_of_memory_host"), ("device", "out_of_memory_device")]
)
def test_fake_runs_out_of_memory_with_messages_of_llama_server(
    tmp_path: Path, where: str, cause: str
) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, f"out_of_memory={where}", ready=False) as server:
            exit, lines = await server.end()
        diagnosis = diagnose(exit, lines, phase="starting")
        assert (diagnosis.cause, diagnosis.deterministic) == (cause, True)

    asyncio.run(scenario())


def test_fault_with_once_happens_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        faults = (f"once={tmp_path / 'done'}", "exit=load:1")
        async with fake(tmp_path, *faults, ready=False) as server:
            assert await server.child.wait() == Exit(1, None)
        (tmp_path / "s.sock").unlink()
        async with fake(tmp_path, *faults) as server:
            assert (await server.http.get("/health")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("end", "exit"), [((), Exit(1, None)), (("signal=stream:SIGKILL",), Exit(None, "SIGKILL"))]
)
def test_fake_dies_during_a_stream(tmp_path: Path, end: tuple[str, ...], exit: Exit) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, "die_in_stream=2", *end) as server:
            got = b""
            with contextlib.suppress(httpx.RemoteProtocolError):
                async with server.http.stream("POST", "/completion", json={"stream": True}) as response:
                    async for chunk in response.aiter_bytes():
                        got += chunk
                pytest.fail("the stream ended as if it were complete")
            assert got.count(b"data:") == 2
            assert await server.child.wait() == exit

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["wedge", "stall_after=2"])
def test_wedged_fake_is_healthy_and_its_counters_stop(tmp_path: Path, fault: str) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, fault) as server:
            with pytest.raises(httpx.ReadTimeout):
                await server.http.post("/completion", json={}, timeout=SOON)
            assert (await server.http.get("/health")).status_code == 200
            expected = f"llamacpp:n_decode_total {0 if fault == 'wedge' else 2}\n"
            async with asyncio.timeout(PATIENCE_S):
                while expected not in (await server.http.get("/metrics")).text:
                    pass

    asyncio.run(scenario())


def test_health_of_fake_can_be_garbage_silence_or_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        for fault, raised, timeout in (
            ("health=garbage", httpx.RemoteProtocolError, httpx.Timeout(PATIENCE_S)),
            ("health=never", httpx.ReadTimeout, SOON),
            ("bind=no_accept", httpx.ReadTimeout, SOON),
        ):
            async with fake(tmp_path, fault) as server:
                with pytest.raises(raised):
                    await server.http.get("/health", timeout=timeout)
            (tmp_path / "s.sock").unlink()
        async with fake(tmp_path, "health=500", "status=503") as server:
            assert (await server.http.get("/health")).status_code == 500
            assert (await server.http.post("/completion", json={})).status_code == 503

    asyncio.run(scenario())


def test_fake_can_ignore_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, "ignore_sigterm") as server:
            server.child.terminate()
            assert (await server.http.get("/health")).status_code == 200
            server.child.kill_group()
            assert await server.child.wait() == Exit(None, "SIGKILL")

    asyncio.run(scenario())


def test_log_of_fake_can_be_long_invalid_or_endless(tmp_path: Path) -> None:
    async def scenario() -> None:
        noise = ("log_bytes=1000000", "log_line_bytes=10000000", "log_invalid_utf8")
        async with fake(tmp_path, *noise) as server:
            assert server.log.bytes_seen > 11_000_000
        (tmp_path / "s.sock").unlink()
        async with fake(tmp_path, "log_forever") as server:
            while server.log.bytes_seen < 5_000_000:
                assert (await server.http.get("/health")).status_code == 200

    asyncio.run(scenario())


def test_fake_can_close_its_output_and_keep_running(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, "close_output") as server:
            await server.log.aclose(30)
            assert "listening on" in server.log.tail()[-1]
            assert (await server.http.get("/health")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["stay", "exit"])
def test_group_kill_finds_grandchild_of_fake(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, f"grandchild={how}", ready=False) as server:
            pid = int((await server.log_line(rb"grandchild \d")).split()[-1])
            if how == "stay":
                os.kill(server.child.pid, 9)
            await server.end()
            with contextlib.suppress(psutil.NoSuchProcess):
                while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_unknown_fault_is_an_error_that_lists_all_faults(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake(tmp_path, "explode=1", ready=False) as server:
            exit, lines = await server.end()
        assert exit == Exit(1, None)
        assert "no such fault: 'explode'; there are load_s" in lines[-1]

    asyncio.run(scenario())
