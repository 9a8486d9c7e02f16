"""The prober against a mocked transport: the results of its requests, and when it repeats them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TypeVar

import httpcore
import httpx
import pytest
import respx

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import TcpAddress
from llamasup.core.llama_server import client
from llamasup.core.llama_server.answers import Health, ServerProgress
from llamasup.core.llama_server.client import Prober
from llamasup.core.llama_server.warmup import warm_up_request

ADDRESS = TcpAddress("127.0.0.1", 8080)
TOKEN_REQUEST = warm_up_request(ModelClass.DECODER)


Result = TypeVar("Result")


def ask(use: Callable[[Prober], Coroutine[None, None, Result]]) -> Result:
    async def run() -> Result:
        async with Prober(ADDRESS, "child-key") as prober:
            return await use(prober)

    return asyncio.run(run())


def health_of(*answers: httpx.Response | Exception) -> list[Health]:
    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/health").mock(side_effect=list(answers))
        return [ask(Prober.health) for _ in answers]


def test_health_follows_the_answer() -> None:
    assert health_of(
        httpcore.ConnectError("nobody listens yet"),
        httpx.Response(503, json={"error": {"message": "Loading model"}}),
        httpx.Response(200, json={"status": "ok"}),
    ) == [Health.SILENT, Health.LOADING, Health.OK]


def test_invalid_or_no_answer_is_silent() -> None:
    answers = httpx.Response(404), httpcore.RemoteProtocolError("garbage"), httpcore.ReadTimeout("nothing")
    assert health_of(*answers) == [Health.SILENT] * 3


def test_probing_continues_until_healthy_and_reports_loading() -> None:
    reported = []

    with respx.mock(base_url=ADDRESS.url) as server:
        route = server.get("/health").mock(
            side_effect=[httpcore.ConnectError("no"), httpx.Response(503), httpx.Response(200)]
        )
        ask(lambda prober: prober.until_healthy(asyncio.Event(), lambda: reported.append("loading")))
        assert route.call_count == 3
    assert reported == ["loading"]


def test_ready_line_ends_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an hour between probes, only the ready line can lead to the next one."""
    monkeypatch.setattr(client, "FIRST_PROBE_DELAY_S", 3600.0)
    monkeypatch.setattr(client, "LONGEST_PROBE_DELAY_S", 3600.0)

    async def wait() -> None:
        log_ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with Prober(ADDRESS) as prober:

            def on_loading() -> None:
                loop.call_soon(log_ready.set)

            await prober.until_healthy(log_ready, on_loading)

    with respx.mock(base_url=ADDRESS.url) as server:
        route = server.get("/health").mock(side_effect=[httpx.Response(503), httpx.Response(200)])
        asyncio.run(wait())
        assert route.call_count == 2


def test_early_ready_line_restarts_the_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """503, (ready line), 503, 200: the third check comes after the shortest delay, not a longer one."""
    slept: list[float] = []
    monkeypatch.setattr(client, "FIRST_PROBE_DELAY_S", 0.001)
    real_timeout = asyncio.timeout

    def noted(seconds: float) -> asyncio.Timeout:
        slept.append(seconds)
        return real_timeout(seconds)

    monkeypatch.setattr(asyncio, "timeout", noted)
    checks = 0

    async def wait() -> None:
        log_ready = asyncio.Event()

        def on_loading() -> None:
            nonlocal checks
            checks += 1
            if checks == 5:
                log_ready.set()

        async with Prober(ADDRESS) as prober:
            await prober.until_healthy(log_ready, on_loading)

    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/health").mock(side_effect=[httpx.Response(503)] * 7 + [httpx.Response(200)])
        asyncio.run(wait())
    ours = [seconds for seconds in slept if seconds < 1]
    assert ours == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.001, 0.002])


def test_api_key_is_sent_with_every_probe() -> None:
    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/health").respond(200)
        server.post("/completion").respond(200, json={"tokens_predicted": 1})
        ask(Prober.health)
        ask(lambda prober: prober.send(TOKEN_REQUEST))
        assert {call.request.headers["authorization"] for call in server.calls} == {"Bearer child-key"}


def test_metrics_are_none_without_an_answer() -> None:
    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/metrics").mock(
            side_effect=[httpx.Response(501), httpcore.ReadTimeout("slow"), httpx.Response(200, text="a 1\n")]
        )
        assert [ask(Prober.metrics) for _ in range(3)] == [None, None, "a 1\n"]


def test_progress_is_read_from_slots_and_metrics() -> None:
    busy = [{"id": 0, "id_task": 1, "is_processing": True, "next_token": [{"n_decoded": 3}]}]
    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/slots").mock(side_effect=[httpx.Response(200, json=busy), httpx.Response(501)])
        server.get("/metrics").mock(
            side_effect=[
                httpcore.ReadTimeout("slow"),
                httpx.Response(200, text="llamacpp:n_decode_total 7\n"),
            ]
        )
        assert ask(Prober.progress) == ServerProgress({"0/1": 3}, prefilling=False)
        assert ask(Prober.progress) == ServerProgress(total=7.0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (httpx.Response(200, json={"tokens_predicted": 1}), None),
        (httpx.Response(400, json={"error": {"message": "no such thing"}}), None),
        (httpx.Response(200, json={"tokens_predicted": 0}), "answered 200 without one token"),
        (httpx.Response(500, json={"error": {"message": "decode failed"}}), "answered 500: decode failed"),
        (httpcore.ReadError("reset"), "was not answered: reset"),
    ],
)
def test_token_or_rejection_is_a_successful_probe(
    answer: httpx.Response | Exception, problem: str | None
) -> None:
    with respx.mock(base_url=ADDRESS.url) as server:
        server.post("/completion").mock(side_effect=[answer])
        probe = ask(lambda prober: prober.probe_token(TOKEN_REQUEST))
    assert (probe.problem is None) == (problem is None)
    assert problem is None or problem in str(probe.problem)


def test_slow_health_answer_is_silent() -> None:
    """httpcore alone would wait as long as single bytes arrive."""
    over = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b".")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await reader.read(1000)
        writer.close()
        over.set()

    async def check() -> Health:
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Prober(TcpAddress("127.0.0.1", port)) as prober:
                health = await prober.health(0.1)
            await over.wait()
            return health

    assert asyncio.run(check()) is Health.SILENT
