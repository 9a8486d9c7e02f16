"""The prober against a mocked transport: what it hears, and when it looks again."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import respx

from llamasup.core.address import TcpAddress
from llamasup.core.gguf import ModelClass
from llamasup.core.warmup import warm_up_request
from llamasup.effects import probe
from llamasup.effects.probe import Health, Prober

ADDRESS = TcpAddress("127.0.0.1", 8080)


def health_of(*answers: httpx.Response | Exception) -> list[Health]:
    async def ask() -> list[Health]:
        async with Prober(ADDRESS) as prober:
            return [await prober.health() for _ in answers]

    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/health").mock(side_effect=list(answers))
        return asyncio.run(ask())


def test_health_is_what_the_server_answers() -> None:
    assert health_of(
        httpx.ConnectError("nobody listens yet"),
        httpx.Response(503, json={"error": {"message": "Loading model"}}),
        httpx.Response(200, json={"status": "ok"}),
    ) == [Health.SILENT, Health.LOADING, Health.OK]


def test_garbage_and_silence_are_no_health() -> None:
    assert (
        health_of(httpx.Response(404), httpx.RemoteProtocolError("garbage"), httpx.ReadTimeout("nothing"))
        == [Health.SILENT] * 3
    )


def test_probing_goes_on_until_the_server_is_healthy_and_tells_of_the_loading() -> None:
    told = []

    async def wait() -> None:
        async with Prober(ADDRESS) as prober:
            await prober.until_healthy(asyncio.Event(), lambda: told.append("loading"))

    with respx.mock(base_url=ADDRESS.url) as server:
        route = server.get("/health").mock(
            side_effect=[httpx.ConnectError("no"), httpx.Response(503), httpx.Response(200)]
        )
        asyncio.run(wait())
        assert route.call_count == 3
    assert told == ["loading"]


def test_the_ready_line_ends_a_sleep_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an hour between probes only the ready line can bring the next one about."""
    monkeypatch.setattr(probe, "FIRST_PROBE_DELAY_S", 3600.0)
    monkeypatch.setattr(probe, "LONGEST_PROBE_DELAY_S", 3600.0)

    async def wait() -> None:
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with Prober(ADDRESS) as prober:

            def on_loading() -> None:
                loop.call_soon(heard.set)

            await prober.until_healthy(heard, on_loading)

    with respx.mock(base_url=ADDRESS.url) as server:
        route = server.get("/health").mock(side_effect=[httpx.Response(503), httpx.Response(200)])
        asyncio.run(wait())
        assert route.call_count == 2


def test_a_ready_line_that_comes_a_moment_too_early_starts_the_backoff_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """503, (ready line), 503, 200: the third look comes after the shortest delay, not the next longer."""
    slept: list[float] = []
    monkeypatch.setattr(probe, "FIRST_PROBE_DELAY_S", 0.001)
    real_timeout = asyncio.timeout

    def noted(seconds: float) -> asyncio.Timeout:
        slept.append(seconds)
        return real_timeout(seconds)

    monkeypatch.setattr(asyncio, "timeout", noted)
    looks = 0

    async def wait() -> None:
        heard = asyncio.Event()

        def on_loading() -> None:
            nonlocal looks
            looks += 1
            if looks == 5:
                heard.set()

        async with Prober(ADDRESS) as prober:
            await prober.until_healthy(heard, on_loading)

    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/health").mock(side_effect=[httpx.Response(503)] * 7 + [httpx.Response(200)])
        asyncio.run(wait())
    ours = [seconds for seconds in slept if seconds < 1]
    assert ours == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.001, 0.002])


def test_the_childs_own_key_goes_with_every_probe() -> None:
    async def ask() -> None:
        async with Prober(ADDRESS, "child-key") as prober:
            await prober.health()
            await prober.ask(warm_up_request(ModelClass.DECODER))

    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/health").respond(200)
        server.post("/completion").respond(200, json={"tokens_predicted": 1})
        asyncio.run(ask())
        assert {call.request.headers["authorization"] for call in server.calls} == {"Bearer child-key"}


def test_metrics_are_none_when_the_server_has_none_to_give() -> None:
    async def ask() -> list[str | None]:
        async with Prober(ADDRESS) as prober:
            return [await prober.metrics() for _ in range(3)]

    with respx.mock(base_url=ADDRESS.url) as server:
        server.get("/metrics").mock(
            side_effect=[httpx.Response(501), httpx.ReadTimeout("slow"), httpx.Response(200, text="a 1\n")]
        )
        assert asyncio.run(ask()) == [None, None, "a 1\n"]
