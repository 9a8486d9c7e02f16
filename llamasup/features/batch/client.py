"""Sends the requests of a batch to a running llamasup, in the lane below all other clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from llamasup.core.http.httpx_client import TRUST_REMEDY, UnixTransport, httpx, is_untrusted, trusted
from llamasup.core.http.sse import Lines
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import NotAllowed, NotRunning
from llamasup.features.batch.schedule import UNREACHABLE, Refusal, refusal_of
from llamasup.features.batch.streams import Assembly, streamed

__all__ = ["Answer", "BatchClient", "Tokens", "position_of", "tokens_of"]

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 30.0  # of the list of models
READ_TIMEOUT_S: Final = 3_900.0
"""Without a byte of the answer. The proxy ends requests after an hour: this ends dead connections."""
START_WAIT_S: Final = 60.0  # llamasup may be starting
_START_POLL_S: Final = 0.5
_POSITION: Final = re.compile(r'desc="position (\d+)"')


class Tokens(Struct, frozen=True):
    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Answer(Struct, frozen=True):
    """The answer to a line. An answer with an error status and a broken connection (status 0) have a
    ``refusal``.

    ``position``: where the request waited in the queue of its model; None: it did not wait. ``events``: of a
    stream that did not end in order.
    """

    status: int
    body: bytes
    request_id: str = ""
    refusal: Refusal | None = None
    position: int | None = None
    events: int = 0


class _Cached(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens_details: _Cached | None = None


class _Model(Struct):
    owned_by: str = ""


class _Models(Struct):
    data: list[_Model] = []


class _Answered(Struct):
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answered).decode


def tokens_of(body: bytes) -> Tokens:
    """Return the tokens that an answer reports."""
    try:
        usage = _decode(body).usage
    except INVALID_JSON:
        usage = None
    if usage is None:
        return Tokens()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Cached()
    return Tokens(
        usage.prompt_tokens or usage.input_tokens or 0,
        details.cached_tokens or 0,
        usage.completion_tokens or usage.output_tokens or 0,
    )


def position_of(server_timing: str) -> int | None:
    match = _POSITION.search(server_timing)
    return None if match is None else int(match[1])


class BatchClient:
    """A client of the llamasup at ``url``; with ``socket``, over its Unix socket."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        socket: str | None = None,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        sent = {"content-type": "application/json", "x-llamasup-priority": "batch"}
        if api_key is not None:
            sent["authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(limits=limits, verify=trusted(url))
            if socket is None
            else UnixTransport(socket),
            base_url=url.rstrip("/").removesuffix("/v1"),  # a line names its path from /v1 on
            headers=sent,
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=timeout_s),
            trust_env=False,
        )
        self.shown = url.rstrip("/").removesuffix("/v1")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def send(self, url: str, body: bytes, *, stream: bool = False) -> Answer:
        """Send a line. With ``stream``, request a stream if that can give the same answer. Raises NotRunning
        if the certificate of the server is not trusted.
        """
        as_stream = streamed(url, body) if stream else None
        try:
            if as_stream is not None:
                return await self._send_stream(url, as_stream)
            response = await self._http.post(url, content=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                return Answer(0, b"", refusal=Refusal(0, UNREACHABLE, self._why_unreachable(error)))
            status = 504 if isinstance(error, httpx.ReadTimeout) else 0
            return Answer(status, b"", refusal=Refusal(status, "", reason))
        except OSError as error:  # asyncio's own errors of a connection that is closing
            return Answer(0, b"", refusal=Refusal(0, "", str(error)))
        return self._answer(response, response.content)

    async def _send_stream(self, url: str, body: bytes) -> Answer:
        async with self._http.stream("POST", url, content=body) as response:
            if response.status_code != 200:
                return self._answer(response, await response.aread())
            assembly = Assembly(url)
            refusal = Refusal(0, "", "the stream ended too early")
            try:
                lines = Lines()
                async for data in response.aiter_bytes():
                    for line in lines.add(data):
                        if line.startswith("data:"):
                            assembly.add(line[5:].encode())
            except httpx.HTTPError as error:
                status = 504 if isinstance(error, httpx.ReadTimeout) else 0
                refusal = Refusal(status, "", str(error) or type(error).__name__)
            except ValueError as error:
                refusal = Refusal(500, "", f"the stream has an invalid event: {error}")
            if assembly.error is not None:
                refusal = refusal_of(0, assembly.error)
                return Answer(refusal.status, assembly.error, refusal=refusal, events=assembly.events)
            answer = assembly.answer()
            if answer is None:
                return Answer(refusal.status, b"", refusal=refusal, events=assembly.events)
            return self._answer(response, answer)

    def _answer(self, response: httpx.Response, body: bytes) -> Answer:
        headers = response.headers
        refusal = None
        if not response.is_success:
            refusal = refusal_of(response.status_code, body, headers.get("retry-after"))
        elif not body:
            refusal = Refusal(500, "", "the answer is empty")
        position = position_of(headers.get("server-timing", ""))
        return Answer(response.status_code, body, headers.get("x-request-id", ""), refusal, position)

    async def unknown_models(
        self,
        names: Sequence[str],
        wait_s: float = START_WAIT_S,
        on_wait: Callable[[str], Awaitable[object]] | None = None,
    ) -> Mapping[str, str]:
        """Return which of these models the server does not serve, each with its message.

        A llamasup that serves one model takes every name. ``on_wait`` gets the reason of each wait. Raises
        NotRunning if none answers within ``wait_s`` or its certificate is not trusted, and NotAllowed.
        """
        deadline_s = monotonic() + wait_s
        while True:
            try:
                return await self._unknown_models(names)
            except (httpx.HTTPError, OSError) as error:
                reason = self._why_unreachable(error)
                if monotonic() >= deadline_s:
                    raise NotRunning(
                        f"{reason}.", remedy="Start it, and run the same command again."
                    ) from None
                if on_wait is not None:
                    await on_wait(reason)
            await asyncio.sleep(_START_POLL_S)

    def _why_unreachable(self, error: Exception) -> str:
        """Raises NotRunning if no wait can help."""
        reason = f"No llamasup answers at {self.shown}: {str(error) or 'timed out'}"
        if is_untrusted(error):
            raise NotRunning(f"{reason}.", remedy=TRUST_REMEDY)
        return reason

    async def _unknown_models(self, names: Sequence[str]) -> Mapping[str, str]:
        listed = await self._http.get("/v1/models", timeout=ANSWER_TIMEOUT_S)
        if listed.status_code in (401, 403):
            raise NotAllowed(
                f"llamasup at {self.shown} refuses the API key: {refusal_of(401, listed.content).message}.",
                remedy="Give a key with --api-key-file or $LLAMASUP_API_KEY.",
            )
        if listed.status_code not in (200, 503):  # 503: it is starting
            raise self._not_llamasup(f"answers with the status {listed.status_code}")
        try:
            models = msgspec.json.decode(listed.content, type=_Models).data
        except INVALID_JSON:
            raise self._not_llamasup("does not answer with a list of models") from None
        if not any(model.owned_by == "llamasup" for model in models):
            return {}
        unknown: dict[str, str] = {}
        for name in names:
            answer = await self._http.get(f"/v1/models/{quote(name, safe='')}", timeout=ANSWER_TIMEOUT_S)
            if answer.status_code in (403, 404):
                unknown[name] = refusal_of(answer.status_code, answer.content).message
        return unknown

    def _not_llamasup(self, reason: str) -> NotRunning:
        return NotRunning(f"{self.shown}/v1/models {reason}.", remedy="Give the URL of a llamasup.")
