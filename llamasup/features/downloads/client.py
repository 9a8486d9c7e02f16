"""Sends HTTP requests for files of a model hub or another server: redirects, credentials, retries, errors.

Redirects are followed here and not by httpx: each target is checked before the request, and only the hub gets
the token, never a redirect target. Messages show URLs without their query (signatures).
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import Struct

from llamasup._version import __version__
from llamasup.core.http.httpx_import import httpx
from llamasup.core.hub.reference import Ref, shown_url
from llamasup.core.hub.remote_file import retry_after_s
from llamasup.core.system.text import printable
from llamasup.errors import DownloadFailed, without_errno
from llamasup.features.downloads.hub_api import is_transient, refusal
from llamasup.features.downloads.transport import PinnedTransport
from llamasup.features.downloads.url_policy import UrlPolicy

__all__ = ["Answer", "DownloadClient", "RetryPolicy", "TransientError"]

T = TypeVar("T")

_MAX_REDIRECTS = 8
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Reading the short body of a redirect keeps the connection usable.
_SMALL_BODY = 64 * 1024


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """The limits of retries. ``attempts``: the most failures in a row without a byte of progress. Times are
    in seconds.
    """

    attempts: int = 6
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0
    max_retry_after_s: float = 300.0
    connect_s: float = 15.0
    stall_s: float = 30.0

    def wait_s(self, error: TransientError, failures: int) -> float:
        """The wait before the next attempt: the server's Retry-After, or a backoff."""
        if error.wait_s is not None:
            return error.wait_s
        backoff_s = min(self.first_wait_s * float(1 << (failures - 1)), self.max_wait_s)
        return backoff_s * random.uniform(0.8, 1.2)  # noqa: S311


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


class TransientError(Exception):
    """A retry may help. ``wait_s``: the Retry-After of the server."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


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
    async def ask(self, url: str, *, byte_range: tuple[int, int] | None = None) -> AsyncIterator[Answer]:
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
        """A small document and its Link header. Raises the errors of ``ask``."""
        async with self.ask(url) as answer:
            body = bytearray()
            with _translated_errors(url):
                async for chunk in answer.response.aiter_raw():
                    body += chunk
                    if len(body) > max_bytes:
                        raise DownloadFailed(f"{shown_url(url)} sent more than {max_bytes} bytes.")
            return bytes(body), answer.headers.get("link")

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body in chunks as they arrive. Raises TransientError if the connection breaks or stalls."""
        with _translated_errors(answer.url):
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
        with _translated_errors(url):
            request = self._client.build_request("GET", url, headers=dict(headers))
            response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    def _refuse(self, url: str, response: httpx.Response, *, with_token: bool) -> None:
        status = response.status_code
        if is_transient(status):
            wait_s = retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
            if wait_s is not None and wait_s > self.retry_policy.max_retry_after_s:
                raise DownloadFailed(
                    f"{shown_url(url)} answered {status} and asks to retry after {wait_s:.0f} s.",
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
        with _translated_errors(str(response.url)):
            await response.aread()


@contextmanager
def _translated_errors(url: str) -> Iterator[None]:
    """Turns exceptions of httpx into TransientError, or DownloadFailed if a retry cannot help."""
    where = shown_url(url)
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransientError(f"{where} does not answer") from error
    except httpx.TransportError as error:
        if _is_untrusted(error):
            raise DownloadFailed(
                f"The certificate of {where} is not trusted ({_reason(error)}).",
                remedy="If a proxy of your company decrypts TLS, set SSL_CERT_FILE to its certificates.",
            ) from error
        raise TransientError(f"{where}: {_reason(error)}") from error
    except (httpx.InvalidURL, ValueError) as error:
        raise DownloadFailed(
            f"{where} is not a valid URL: {printable(str(error))}.", remedy="Check its host and its port."
        ) from error


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: Exception) -> str:
    return without_errno(str(error) or "the connection was cut").removesuffix(".")
