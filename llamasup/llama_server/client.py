"""An HTTP client for the requests of llamasup to its own llama-servers: health, warm-up, progress, slots."""

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
from llamasup.llama_server.answers import (
    Health,
    NoAnswer,
    ServerProgress,
    SlotAnswer,
    TokenProbe,
    read_progress,
    read_slot_answer,
)
from llamasup.llama_server.warmup import WarmUpRequest, no_response, response_problem

__all__ = ["Health", "Prober"]

FIRST_PROBE_DELAY_S = 0.01
LONGEST_PROBE_DELAY_S = 1.0
PROBE_TIMEOUT_S = 2.0


class Prober:
    """A client of one generation, as an asynchronous context manager. ``prefix``: that of the server's paths.

    Every request has its own connection. llama-server closes a connection that was idle for 5 s (b11434),
    which is the interval of the liveness checks, so a reused one could fail and the server seem dead.
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
        """Check ``/health`` once. Never raises for the server's answer."""
        try:
            # httpx restarts its own timeout with every byte.
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

    async def until_healthy(self, log_ready: asyncio.Event, on_loading: Callable[[], None]) -> None:
        """Probe with exponential backoff until ``/health`` answers 200.

        ``log_ready`` is set when the log says that the server is ready; the next probe then follows at once.
        ``on_loading`` is called for every answer "loading". There is no timeout here: the table ends a start
        without progress.
        """

        async def check() -> Health:
            health = await self.health()
            if health is Health.LOADING:
                on_loading()
            return health

        async def sleep_until_ready(seconds: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await log_ready.wait()

        while True:
            log_ready.clear()
            # The ready line ends the sleep. If the next check comes too early, the backoff starts again.
            retrying = AsyncRetrying(
                retry=retry_if_not_result(lambda health: health is Health.OK),
                wait=wait_exponential(multiplier=FIRST_PROBE_DELAY_S, max=LONGEST_PROBE_DELAY_S),
                stop=lambda attempt: log_ready.is_set(),
                sleep=sleep_until_ready,
            )
            with suppress(RetryError):
                await retrying(check)
                return

    async def send(self, request: WarmUpRequest) -> tuple[int, bytes]:
        """Send the warm-up request; returns status and body. Raises NoAnswer.

        There is no read timeout: a token of a huge model on a slow disk may take minutes, and the caller has
        a deadline that follows progress.
        """
        response = await self._post(request.path, dict(request.body))
        return response.status_code, response.content

    async def metrics(self) -> str | None:
        """The server's own Prometheus text, or None if it has none."""
        body = await self._get("/metrics", PROBE_TIMEOUT_S)
        return None if body is None else body.decode(errors="replace")

    async def progress(self, timeout_s: float = PROBE_TIMEOUT_S) -> ServerProgress:
        """The server's progress, as far as it reports any."""
        slots = await self._get("/slots", timeout_s)
        return read_progress(slots, await self._get("/metrics", timeout_s))

    async def context_window(self) -> ContextWindow | None:
        """The context of one request, if the server reports it."""
        return read_window(await self._get("/slots", PROBE_TIMEOUT_S))

    async def transfer_slot(self, action: Literal["save", "restore"], number: int, name: str) -> SlotAnswer:
        """Let the server write a slot to the file ``name`` in its folder, or read it from there.

        Without a timeout; the server finishes even if the caller cancels. Raises NoAnswer.
        """
        response = await self._post(f"/slots/{number}?action={action}", {"filename": name})
        return read_slot_answer(response.status_code, response.content, f"n_{action}d")

    async def probe_token(self, request: WarmUpRequest) -> TokenProbe:
        """Ask for one token, without a timeout. A rejection (4xx) also shows that the server works."""
        try:
            status, body = await self.send(request)
        except NoAnswer as error:
            return TokenProbe(no_response(request, error))
        return TokenProbe(None if 400 <= status < 500 else response_problem(request, status, body))

    async def _post(self, path: str, body: object) -> httpx.Response:
        timeout = httpx.Timeout(PROBE_TIMEOUT_S, read=None)
        try:
            return await self._client.post(path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise NoAnswer(str(error) or type(error).__name__) from error

    async def _get(self, path: str, timeout_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.get(path, timeout=None)
        except (httpx.HTTPError, TimeoutError):
            return None
        return response.content if response.status_code == 200 else None
