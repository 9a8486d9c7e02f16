"""Asks a running llama-server how it is, over httpx. Says what it heard; decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from tenacity import AsyncRetrying, RetryError, retry_if_not_result, wait_exponential

from llamasup.http.address import Address, UnixAddress
from llamasup.http.context_end import ContextWindow, read_window
from llamasup.http.httpx_import import httpx
from llamasup.llama_server.health import Health, Proof, SlotAnswer, read_answer
from llamasup.llama_server.progress import ServerWork, read_server_work
from llamasup.llama_server.warmup import WarmUpRequest, not_answered, what_is_missing

__all__ = ["Health", "Prober"]

FIRST_PROBE_DELAY_S = 0.01
LONGEST_PROBE_DELAY_S = 1.0
PROBE_TIMEOUT_S = 2.0


class Prober:
    """Talks to one generation. An asynchronous context manager; ``api_key`` is one that the child takes,
    ``prefix`` what its paths begin with.

    Every question has a connection of its own: llama-server closes one that
    was idle for 5 s (b11434), which is just the time between two looks, and the question that crosses the
    closing would seem to be a dead server.
    """

    def __init__(self, address: Address, api_key: str | None = None, *, prefix: str = "") -> None:
        socket_path = address.path if isinstance(address, UnixAddress) else None
        self._client = httpx.AsyncClient(
            # verify=False: plain HTTP on this machine; building a TLS context takes 20 ms.
            transport=httpx.AsyncHTTPTransport(
                uds=socket_path, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
            ),
            base_url=address.url + prefix,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=PROBE_TIMEOUT_S,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def health(self, timeout_s: float = PROBE_TIMEOUT_S) -> Health:
        """One look. Never raises for what the server does."""
        try:
            # httpx starts its own time-out anew with every byte.
            async with asyncio.timeout(timeout_s):
                response = await self._client.get("/health", timeout=None)
        except (httpx.HTTPError, TimeoutError):
            return Health.SILENT
        match response.status_code:
            case 200:
                return Health.OK
            case 503:
                return Health.LOADING
            case _:
                return Health.SILENT

    async def until_healthy(self, heard: asyncio.Event, on_loading: Callable[[], None]) -> None:
        """Probe with exponential backoff until ``/health`` says 200.

        ``heard`` is set when the server's log says that it is ready: the next probe is then made at once.
        ``on_loading`` is called for every answer that says "loading". There is no time-out here: how
        long a start may take depends on its progress, which is not the prober's to judge.
        """

        async def look() -> Health:
            health = await self.health()
            if health is Health.LOADING:
                on_loading()
            return health

        async def sleep_or_hear(seconds: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await heard.wait()

        while True:
            heard.clear()
            # Hearing the ready line ends the sleep; if the look that follows came a moment too early,
            # the backoff starts again at its shortest.
            patience = AsyncRetrying(
                retry=retry_if_not_result(lambda health: health is Health.OK),
                wait=wait_exponential(multiplier=FIRST_PROBE_DELAY_S, max=LONGEST_PROBE_DELAY_S),
                stop=lambda attempt: heard.is_set(),
                sleep=sleep_or_hear,
            )
            with suppress(RetryError):
                await patience(look)
                return

    async def ask(self, request: WarmUpRequest) -> tuple[int, bytes]:
        """Send the warm-up request; status and body. Raises httpx.HTTPError if no answer comes.

        No read time-out: one token of a huge model on a slow disk may take minutes; the caller's
        deadline follows progress.
        """
        response = await self._client.post(
            request.path, json=dict(request.body), timeout=httpx.Timeout(PROBE_TIMEOUT_S, read=None)
        )
        return response.status_code, response.content

    async def metrics(self) -> str | None:
        """The server's own Prometheus text, or None if it has none to give."""
        body = await self._get("/metrics", PROBE_TIMEOUT_S)
        return None if body is None else body.decode(errors="replace")

    async def work(self, timeout_s: float = PROBE_TIMEOUT_S) -> ServerWork:
        """What it says of its own work, if anything."""
        slots = await self._get("/slots", timeout_s)
        return read_server_work(slots, await self._get("/metrics", timeout_s))

    async def window(self) -> ContextWindow | None:
        """What one request may use, if it says so."""
        return read_window(await self._get("/slots", PROBE_TIMEOUT_S))

    async def move_slot(self, action: Literal["save", "restore"], number: int, name: str) -> SlotAnswer:
        """Have it write a slot to the file ``name`` in its folder, or read it from there.

        As long as the caller lets it; it cannot be called back. Raises httpx.HTTPError if no answer comes.
        """
        response = await self._client.post(
            f"/slots/{number}?action={action}",
            json={"filename": name},
            timeout=httpx.Timeout(PROBE_TIMEOUT_S, read=None),
        )
        return read_answer(response.status_code, response.content, f"n_{action}d")

    async def prove(self, request: WarmUpRequest) -> Proof:
        """Ask for one token, for as long as the caller lets it. A refusal (4xx) proves that it works."""
        try:
            status, body = await self.ask(request)
        except httpx.HTTPError as error:
            return Proof(not_answered(request, error))
        return Proof(None if 400 <= status < 500 else what_is_missing(request, status, body))

    async def _get(self, path: str, timeout_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.get(path, timeout=None)
        except (httpx.HTTPError, TimeoutError):
            return None
        return response.content if response.status_code == 200 else None
