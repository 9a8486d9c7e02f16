"""Sends HTTP requests for files of a model hub or another server: addresses, redirects, credentials.

Redirects are followed here and not by httpx: each target is checked before the request, and only the hub gets
the token, never a redirect target. Messages show URLs without their query (signatures).

The transport connects only to addresses that were checked, without a second DNS lookup. Each origin has its
own pool, since a pool finds connections by address: a second host at the same address would use a connection
whose certificate was checked for the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import Struct

from llamasup._version import __version__
from llamasup.core.http.httpx_client import httpx
from llamasup.core.hub.reference import Ref, origin_of, shown_url
from llamasup.core.hub.remote_file import parse_retry_after
from llamasup.core.system.text import printable
from llamasup.errors import DownloadFailed
from llamasup.features.downloads.hub_responses import is_transient, refusal
from llamasup.features.downloads.retries import RetryPolicy, TransientError, translated_errors
from llamasup.features.downloads.url_policy import UrlPolicy, is_loopback_host

T = TypeVar("T")

_MAX_REDIRECTS = 8
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Reading the short body of a redirect keeps the connection usable.
_SMALL_BODY = 64 * 1024


class Answer(Struct, frozen=True):
    """An answer. ``url`` and ``headers`` are those after redirects; ``hub`` are the headers of the first
    response.
    """

    url: str
    response: httpx.Response
    hub: Mapping[str, str]

    @property
    def headers(self) -> httpx.Headers:
        return self.response.headers


class DownloadClient:
    """The connections of one download. An asynchronous context manager."""

    def __init__(
        self, ref: Ref, policy: UrlPolicy, token: str | None, *, parallel: int, retry_policy: RetryPolicy
    ) -> None:
        self.ref = ref
        self.retry_policy = retry_policy
        self._policy = policy
        self._token = token
        self._client = httpx.AsyncClient(
            transport=PinnedTransport(policy, connections=parallel),
            timeout=httpx.Timeout(retry_policy.stall_s, connect=retry_policy.connect_s),
            trust_env=False,  # the transport handles proxies; no credentials from .netrc
            follow_redirects=False,
        )

    async def __aenter__(self) -> DownloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def get(self, url: str, *, byte_range: tuple[int, int] | None = None) -> AsyncIterator[Answer]:
        """GET ``url``, or its bytes from ``byte_range[0]`` to before ``byte_range[1]``; the body is not read
        yet.

        Raises TransientError if a retry may help; else AccessDenied, ModelMissing, DownloadFailed or
        DownloadRefused.
        """
        headers = {"User-Agent": f"llamasup/{__version__}", "Accept-Encoding": "identity"}
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        hub: Mapping[str, str] | None = None
        for _ in range(_MAX_REDIRECTS):
            self._policy.check_url(url)
            with_token = self._token is not None and self._policy.allows_token(url)
            authorized = {**headers, "Authorization": f"Bearer {self._token}"} if with_token else headers
            async with self._send(url, authorized) as response:
                hub = response.headers if hub is None else hub
                target = response.headers.get("location")
                if response.status_code in _REDIRECTS and target:
                    await _read_small(response)
                    url = _redirect_url(url, target)
                    continue
                if not response.is_success:
                    self._refuse(url, response, with_token=with_token)
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise DownloadFailed(
                        f"{shown_url(url)} was sent with the content encoding "
                        f"{printable(response.headers['content-encoding'])!r}, which was not requested.",
                        remedy="A proxy on the way changes the response: try another network or mirror.",
                    )
                yield Answer(url, response, hub)
                return
        raise DownloadFailed(
            f"{shown_url(url)} was redirected {_MAX_REDIRECTS} times without reaching a file.",
            remedy="Check the URL, for example in a browser.",
        )

    async def text(self, url: str, *, max_bytes: int) -> tuple[bytes, str | None]:
        """Return a small document and its Link header. Raises the errors of ``get``."""
        async with self.get(url) as answer:
            body = bytearray()
            with translated_errors(url):
                async for chunk in answer.response.aiter_raw():
                    body += chunk
                    if len(body) > max_bytes:
                        raise DownloadFailed(f"{shown_url(url)} sent more than {max_bytes} bytes.")
            return bytes(body), answer.headers.get("link")

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """Return the body in chunks as they arrive. Raises TransientError if the connection breaks or
        stalls.
        """
        with translated_errors(answer.url):
            async for chunk in answer.response.aiter_raw():
                yield chunk

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], progress: Callable[[], int], say: Callable[[str], None]
    ) -> T:
        """Repeat ``attempt`` after each TransientError, until it fails several times in a row without
        ``progress`` (bytes so far). Raises DownloadFailed then.
        """
        failures, done_bytes = 0, progress()
        while True:
            try:
                return await attempt()
            except TransientError as error:
                now_bytes = progress()
                failures = 1 if now_bytes > done_bytes else failures + 1
                done_bytes = now_bytes
                if failures >= self.retry_policy.attempts:
                    where = "" if str(error).startswith(str(self.ref)) else f"{self.ref}: "
                    times = f" ({failures} times in a row)" if failures > 1 else ""
                    raise DownloadFailed(
                        f"{where}{error}{times}.",
                        remedy="Try again later: the same command continues the download.",
                    ) from None
                wait_s = self.retry_policy.wait_s(error, failures)
                say(f"{error}; trying again in {wait_s:.1f} s")
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _send(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        with translated_errors(url):
            request = self._client.build_request("GET", url, headers=dict(headers))
            response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    def _refuse(self, url: str, response: httpx.Response, *, with_token: bool) -> None:
        status = response.status_code
        if is_transient(status):
            wait_s = parse_retry_after(response.headers.get("retry-after"), datetime.now(UTC))
            if wait_s is not None and wait_s > self.retry_policy.max_retry_after_s:
                raise DownloadFailed(
                    f"{shown_url(url)} answered {status} and requests a retry after {wait_s:.0f} s.",
                    remedy="Try again then: the same command continues the download.",
                )
            raise TransientError(f"{shown_url(url)} answered {status}", wait_s)
        raise refusal(
            self.ref, url, status, response.headers, endpoint=self._policy.endpoint, with_token=with_token
        )


def _redirect_url(url: str, target: str) -> str:
    try:
        return str(httpx.URL(url).join(target))
    except (httpx.InvalidURL, ValueError) as error:  # ValueError: an invalid host or port
        raise DownloadFailed(
            f"{shown_url(url)} redirects to an invalid URL: {printable(str(error))}.",
            remedy="Check the URL, for example in a browser.",
        ) from None


async def _read_small(response: httpx.Response) -> None:
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= _SMALL_BODY:
        with translated_errors(str(response.url)):
            await response.aread()


# --- the transport

# The addresses of a host that are tried; more would take longer than users wait.
_MAX_ADDRESSES = 4
_RESOLVE_TIMEOUT_S = 15.0


class PinnedTransport(httpx.AsyncBaseTransport):
    """Raises DownloadRefused for addresses that ``policy`` refuses, DownloadFailed for an unusable proxy."""

    def __init__(self, policy: UrlPolicy, *, connections: int) -> None:
        self._policy = policy
        self._limits = httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections)
        self._pools: dict[tuple[str, str, int], httpx.AsyncHTTPTransport] = {}
        self._addresses: dict[tuple[str, str, int], list[str]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = origin_of(str(request.url))
        proxy = _proxy(origin)
        pool = self._pool(origin, proxy)
        if proxy is not None:
            # The proxy resolves names; only an address in the URL can be checked here.
            if _is_literal(request.url.host):
                self._policy.allowed(str(request.url), [request.url.host])
            return await pool.handle_async_request(request)
        last_error: httpx.TransportError = httpx.ConnectError(f"{request.url.host} has no address")
        for address in (await self._checked(request.url, origin))[:_MAX_ADDRESSES]:
            pinned = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,  # with the Host header of the name
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": request.url.host},
            )
            try:
                return await pool.handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                last_error = error
        raise last_error

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    def _pool(self, origin: tuple[str, str, int], proxy: str | None) -> httpx.AsyncHTTPTransport:
        if origin not in self._pools:
            # A TLS context takes 20 ms to build.
            with_tls = origin[0] == "https"
            try:
                self._pools[origin] = httpx.AsyncHTTPTransport(
                    verify=with_tls, limits=self._limits, proxy=proxy
                )
            except (ImportError, ValueError, httpx.InvalidURL):  # SOCKS; unknown scheme; invalid URL
                # The proxy is not shown: it may contain a password.
                raise DownloadFailed(
                    f"The proxy that the environment sets for {origin[0]} cannot be used.",
                    remedy=f"Set {origin[0]}_proxy to a URL such as http://proxy.example:3128.",
                ) from None
        return self._pools[origin]

    async def _checked(self, url: httpx.URL, origin: tuple[str, str, int]) -> list[str]:
        """The allowed addresses, resolved once: a later DNS answer cannot change them."""
        known = self._addresses.get(origin)
        if known is None:
            found = await _resolve(origin[1], origin[2])
            known = self._addresses[origin] = self._policy.allowed(str(url), found)
        return known


async def _resolve(host: str, port: int) -> list[str]:
    """Resolve in a daemon thread: a lookup cannot be interrupted, and Ctrl-C must not wait for it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def look_up() -> None:
        found: list[str] = []
        failed: Exception | None = None
        try:
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, found, failed)

    def deliver(found: list[str], failed: Exception | None) -> None:
        if answer.done():
            return
        if failed is None:
            answer.set_result(list(dict.fromkeys(found)))
        else:
            answer.set_exception(failed)

    threading.Thread(target=look_up, name="look-up", daemon=True).start()
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            return await answer
    except TimeoutError:  # TimeoutError is an OSError
        raise httpx.ConnectTimeout(f"resolving {host} took more than {_RESOLVE_TIMEOUT_S:.0f} s") from None
    except (OSError, UnicodeError) as error:
        raise httpx.ConnectError(f"the name {host} cannot be resolved: {error}") from error


def _is_literal(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


def _proxy(origin: tuple[str, str, int]) -> str | None:
    """The proxy of the environment (``https_proxy``, ``no_proxy``): a URL, or HOST:PORT."""
    scheme, host, _ = origin
    proxies = urllib.request.getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    # A loopback request may carry a token without TLS, so no proxy may see it.
    if not proxy or is_loopback_host(host) or urllib.request.proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
