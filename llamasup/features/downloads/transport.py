"""An httpx transport that connects only to addresses that were checked, without a second DNS lookup.

Each origin has its own pool, since a pool finds connections by address: a second host at the same address
would use a connection whose certificate was checked for the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.request
from types import TracebackType

from llamasup.core.http.httpx_import import httpx
from llamasup.core.hub.reference import origin_of
from llamasup.errors import DownloadFailed
from llamasup.features.downloads.url_policy import UrlPolicy, is_loopback_host

__all__ = ["PinnedTransport"]

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self.aclose()

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

    def ask() -> None:
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

    threading.Thread(target=ask, name="look-up", daemon=True).start()
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
