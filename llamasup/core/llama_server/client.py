"""An HTTP client for the requests of llamasup to its own llama-servers: health, warm-up, progress, slots.

It uses httpcore, the transport of httpx, alone: the server is ready while this is still being imported, and
httpx would add 30 ms to every start (measured).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

import httpcore
import msgspec
from tenacity import AsyncRetrying, RetryError, retry_if_not_result, wait_exponential

from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.http.network import AsyncioBackend
from llamasup.core.llama_server.answers import (
    ContextWindow,
    Health,
    NoAnswer,
    ServerProgress,
    SlotAnswer,
    SlotProgress,
    TokenProbe,
    read_progress,
    read_slot_answer,
    read_slots,
    read_token_count,
    read_window,
)
from llamasup.core.llama_server.warmup import WarmUpRequest, no_response, response_problem
from llamasup.errors import text_of

FIRST_PROBE_DELAY_S = 0.01
LONGEST_PROBE_DELAY_S = 1.0
PROBE_TIMEOUT_S = 2.0
METRICS_TIMEOUT_S = 2.0


class Prober:
    """A client of one generation, as an asynchronous context manager. ``prefix``: that of the server's paths.

    Every request has its own connection. llama-server closes a connection that was idle for 5 s (b11434),
    which is the interval of the liveness checks, so a reused one could fail and the server seem dead.
    """

    may_block = False
    """Whether the program may answer nothing while it works on a request."""

    def __init__(self, address: Address, api_key: str | None = None, *, prefix: str = "") -> None:
        socket_path = address.path if isinstance(address, UnixAddress) else None
        self._pool = httpcore.AsyncConnectionPool(
            uds=socket_path, max_keepalive_connections=0, network_backend=AsyncioBackend()
        )
        self._url = address.url + prefix
        self._headers = [("Authorization", f"Bearer {api_key}")] if api_key else []

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.__aexit__(kind, error, trace)

    async def health(self, timeout_s: float = PROBE_TIMEOUT_S) -> Health:
        """Check ``/health`` once. Never raises for the server's answer."""
        try:
            response = await self._get("/health", timeout_s)
        except NoAnswer:
            return Health.SILENT
        match response.status:
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
        response = await self._post(request.path, request.body)
        return response.status, response.content

    async def metrics(self) -> str | None:
        """Return the server's own Prometheus text, or None if it has none."""
        body = await self._body("/metrics", METRICS_TIMEOUT_S)
        return None if body is None else body.decode(errors="replace")

    async def progress(self, timeout_s: float = PROBE_TIMEOUT_S) -> ServerProgress:
        """Return the server's progress, as far as it reports any."""
        slots = await self._body("/slots", timeout_s)
        return read_progress(slots, await self._body("/metrics", timeout_s))

    async def slots(self) -> tuple[SlotProgress, ...] | None:
        """Return the busy slots, if the server reports them."""
        return read_slots(await self._body("/slots", PROBE_TIMEOUT_S))

    async def context_window(self) -> ContextWindow | None:
        """Return the context of one request, if the server reports it."""
        return read_window(await self._body("/slots", PROBE_TIMEOUT_S))

    async def transfer_slot(self, action: Literal["save", "restore"], number: int, name: str) -> SlotAnswer:
        """Let the server write a slot to the file ``name`` in its folder, or read it from that file.

        Without a timeout; the server finishes even if the caller cancels. Raises NoAnswer.
        """
        response = await self._post(f"/slots/{number}?action={action}", {"filename": name})
        return read_slot_answer(response.status, response.content, f"n_{action}d")

    async def probe_token(self, request: WarmUpRequest) -> TokenProbe:
        """Ask for one token, without a timeout. A rejection (4xx) also shows that the server works."""
        try:
            status, body = await self.send(request)
        except NoAnswer as error:
            return TokenProbe(no_response(request, error))
        return TokenProbe(None if 400 <= status < 500 else response_problem(request, status, body))

    async def count_tokens(self, text: str) -> int | None:
        """Count the tokens that the model makes of a text; None if the server does not tell."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                response = await self._post("/tokenize", {"content": text})
            return read_token_count(response.content)
        except (TimeoutError, NoAnswer):
            return None

    async def _body(self, path: str, timeout_s: float) -> bytes | None:
        try:
            response = await self._get(path, timeout_s)
        except NoAnswer:
            return None
        return response.content if response.status == 200 else None

    async def _get(self, path: str, timeout_s: float) -> httpcore.Response:
        try:
            # httpcore restarts its own timeout with every byte.
            async with asyncio.timeout(timeout_s):
                return await self._send("GET", path)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {timeout_s:g} s") from error

    async def _post(self, path: str, body: Mapping[str, object]) -> httpcore.Response:
        return await self._send("POST", path, msgspec.json.encode(body))

    async def _send(self, method: str, path: str, body: bytes | None = None) -> httpcore.Response:
        """Send a request without a limit for the time of the answer. ``body``: JSON. Raises NoAnswer."""
        kind = [] if body is None else [("Content-Type", "application/json")]
        try:
            return await self._pool.request(
                method,
                self._url + path,
                headers=[*self._headers, *kind],
                content=body,
                extensions={"timeout": {"connect": PROBE_TIMEOUT_S, "write": PROBE_TIMEOUT_S}},
            )
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise NoAnswer(text_of(error)) from error
