"""Connects to the very addresses that were checked: no name is looked up again between check and connection.

A transport for httpx. Each origin has a pool of its own, since within one a connection is known by its
address alone: of two hosts behind one address, the second would be asked over a connection whose certificate
was checked for the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.request
from types import TracebackType

from llamasup.downloads.reference import origin_of
from llamasup.downloads.url_policy import UrlPolicy, is_loopback_host
from llamasup.errors import DownloadFailed
from llamasup.http.httpx_import import httpx

__all__ = ["PinnedTransport"]

# Of one host; those behind it are hardly ever reached before somebody loses patience.
_MAX_ADDRESSES = 4
_LOOK_UP_S = 15.0


class PinnedTransport(httpx.AsyncBaseTransport):
    """``reach`` says which addresses may be connected to. Raises its DownloadRefused for the others, and
    DownloadFailed for a proxy of the environment that cannot be used.
    """

    def __init__(self, reach: UrlPolicy, *, connections: int) -> None:
        self._reach = reach
        self._limits = httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections)
        self._pools: dict[tuple[str, str, int], httpx.AsyncHTTPTransport] = {}
        self._addresses: dict[tuple[str, str, int], list[str]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = origin_of(str(request.url))
        proxy = _proxy(origin)
        pool = self._pool(origin, proxy)
        if proxy is not None:
            # It looks names up itself; what is written as an address can be checked here all the same.
            if _is_literal(request.url.host):
                self._reach.allowed(str(request.url), [request.url.host])
            return await pool.handle_async_request(request)
        failed: httpx.TransportError = httpx.ConnectError(f"{request.url.host} has no address")
        for address in (await self._checked(request.url, origin))[:_MAX_ADDRESSES]:
            pinned = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,  # Host among them: that of the name
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": request.url.host},
            )
            try:
                return await pool.handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed = error
        raise failed

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
            # A TLS context, with all the certificates of the world, takes 20 ms to build.
            with_tls = origin[0] == "https"
            try:
                self._pools[origin] = httpx.AsyncHTTPTransport(
                    verify=with_tls, limits=self._limits, proxy=proxy
                )
            except (ImportError, ValueError, httpx.InvalidURL):  # SOCKS; none that httpx knows; no URL
                # It is not shown: it may hold a password.
                raise DownloadFailed(
                    f"The proxy that the environment names for {origin[0]} cannot be used.",
                    remedy=f"Set {origin[0]}_proxy to something like http://proxy.example:3128, or no_proxy.",
                ) from None
        return self._pools[origin]

    async def _checked(self, url: httpx.URL, origin: tuple[str, str, int]) -> list[str]:
        """The addresses that may be connected to, looked up once: a name must not change its mind."""
        known = self._addresses.get(origin)
        if known is None:
            found = await _look_up(origin[1], origin[2])
            known = self._addresses[origin] = self._reach.allowed(str(url), found)
        return known


async def _look_up(host: str, port: int) -> list[str]:
    """In a thread that nobody waits for: a resolver cannot be interrupted, and a Ctrl-C is not to wait."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def ask() -> None:
        found: list[str] = []
        failed: Exception | None = None
        try:
            found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:  # the second: a label of the name is too long
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: whoever asked has gone
            loop.call_soon_threadsafe(tell, found, failed)

    def tell(found: list[str], failed: Exception | None) -> None:
        if answer.done():
            return
        if failed is None:
            answer.set_result(list(dict.fromkeys(found)))
        else:
            answer.set_exception(failed)

    threading.Thread(target=ask, name="look-up", daemon=True).start()
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            return await answer
    except TimeoutError:  # an OSError, too
        raise httpx.ConnectTimeout(f"looking {host} up took more than {_LOOK_UP_S:.0f} s") from None
    except (OSError, UnicodeError) as error:
        raise httpx.ConnectError(f"the name {host} cannot be looked up: {error}") from error


def _is_literal(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


def _proxy(origin: tuple[str, str, int]) -> str | None:
    """That of the environment (``https_proxy``, ``no_proxy``), as every tool takes it: HOST:PORT too."""
    scheme, host, _ = origin
    proxies = urllib.request.getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    # A token may go to this machine itself without TLS: nobody else is to see it.
    if not proxy or is_loopback_host(host) or urllib.request.proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
