"""Asks a model hub and other servers for files: redirects, credentials, retries; every failure in our words.

Redirects are followed here and not by httpx: each target is checked before it is asked, and the token goes to
the hub alone, never to where it redirects to. URLs are shown without their query (signatures).
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from llamasup._version import __version__
from llamasup.downloads.hub_api import is_transient, refusal
from llamasup.downloads.reference import Ref, shown_url
from llamasup.downloads.remote_file import retry_after_s
from llamasup.downloads.transport import PinnedTransport
from llamasup.downloads.url_policy import UrlPolicy
from llamasup.errors import DownloadFailed
from llamasup.http.httpx_import import httpx
from llamasup.system.text import printable

__all__ = ["Answer", "DownloadClient", "RetryPolicy", "TransientError"]

T = TypeVar("T")

_MAX_REDIRECTS = 8
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# A redirect's body is a sentence; reading it keeps the connection.
_SMALL_BODY = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Times in seconds. ``attempts``: in a row without a byte of progress."""

    attempts: int = 6
    first_wait_s: float = 0.5
    most_wait_s: float = 30.0
    longest_retry_after_s: float = 300.0
    connect_s: float = 15.0
    stall_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """``url`` is the last of the redirects; ``headers`` are its own; ``hub`` those of the first answer."""

    url: str
    response: httpx.Response
    hub: Mapping[str, str] = field(repr=False)

    @property
    def headers(self) -> httpx.Headers:
        return self.response.headers


class TransientError(Exception):
    """It may work a little later. ``wait_s``: what the server asked for."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class DownloadClient:
    """One download's connections. An asynchronous context manager."""

    def __init__(
        self, ref: Ref, reach: UrlPolicy, token: str | None, *, parallel: int, retry_policy: RetryPolicy
    ) -> None:
        self.ref = ref
        self.retry_policy = retry_policy
        self._reach = reach
        self._token = token
        self._client = httpx.AsyncClient(
            transport=PinnedTransport(reach, connections=parallel),
            timeout=httpx.Timeout(retry_policy.stall_s, connect=retry_policy.connect_s),
            trust_env=False,  # proxies are the transport's; no .netrc: the token is all that is sent
            follow_redirects=False,
        )

    async def __aenter__(self) -> DownloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def ask(self, url: str, *, bytes_from: tuple[int, int] | None = None) -> AsyncIterator[Answer]:
        """GET ``url``, or of it the bytes from first to before second. The answer's body is not read yet.

        Raises TransientError if a retry may help; else AccessDenied, ModelMissing, DownloadFailed or
        DownloadRefused.
        """
        headers = {"User-Agent": f"llamasup/{__version__}", "Accept-Encoding": "identity"}
        if bytes_from is not None:
            headers["Range"] = f"bytes={bytes_from[0]}-{bytes_from[1] - 1}"
        hub: Mapping[str, str] | None = None
        for _ in range(_MAX_REDIRECTS):
            self._reach.check_url(url)
            with_token = self._token is not None and self._reach.allows_token(url)
            authorized = {**headers, "Authorization": f"Bearer {self._token}"} if with_token else headers
            async with self._sent(url, authorized) as response:
                hub = response.headers if hub is None else hub
                target = response.headers.get("location")
                if response.status_code in _REDIRECTS and target:
                    await _read_small(response)
                    url = _joined(url, target)
                    continue
                if not response.is_success:
                    self._refuse(url, response, with_token=with_token)
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise DownloadFailed(
                        f"{shown_url(url)} is sent in another encoding than it has.",
                        remedy="Something on the way changes what is sent: try another network or mirror.",
                    )
                yield Answer(url, response, hub)
                return
        raise DownloadFailed(
            f"{shown_url(url)}: redirected {_MAX_REDIRECTS} times, and still no file.",
            remedy="Check the URL, in a browser for example.",
        )

    async def text(self, url: str, *, most_bytes: int) -> tuple[bytes, str | None]:
        """A small document and its Link header. Raises as ``ask`` does."""
        async with self.ask(url) as answer:
            body = bytearray()
            with _our_words(url):
                async for chunk in answer.response.aiter_raw():
                    body += chunk
                    if len(body) > most_bytes:
                        raise DownloadFailed(f"{shown_url(url)} answers more than {most_bytes} bytes.")
            return bytes(body), answer.headers.get("link")

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TransientError where it breaks off or stands still."""
        with _our_words(answer.url):
            async for chunk in answer.response.aiter_raw():
                yield chunk

    async def retry(
        self, act: Callable[[], Awaitable[T]], moved: Callable[[], int], say: Callable[[str], None]
    ) -> T:
        """Let ``act`` try again as long as ``moved`` (bytes so far) grows, or a few times without.

        Raises DownloadFailed when it is no use.
        """
        tries = _Tries(self.retry_policy, moved, say)

        async def counted() -> T:
            try:
                return await act()
            except TransientError:
                tries.failed()
                raise

        try:
            return await AsyncRetrying(
                retry=retry_if_exception_type(TransientError),
                stop=tries.stop,
                wait=tries.wait,
                before_sleep=tries.before_sleep,
                reraise=True,
            )(counted)
        except TransientError as error:
            where = "" if str(error).startswith(str(self.ref)) else f"{self.ref}: "  # the same, of a URL
            raise DownloadFailed(
                f"{where}{error}, {tries.without_progress} times in a row."
                if tries.without_progress > 1
                else f"{where}{error}.",
                remedy="Try again later; what has come is kept, and the same command goes on from there.",
            ) from None

    @asynccontextmanager
    async def _sent(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        with _our_words(url):
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
            if wait_s is not None and wait_s > self.retry_policy.longest_retry_after_s:
                raise DownloadFailed(
                    f"{shown_url(url)} answered {status}, and asks to come back in {wait_s:.0f} s.",
                    remedy="Try again then; what has come is kept.",
                )
            raise TransientError(f"{shown_url(url)} answered {status}", wait_s)
        raise refusal(
            self.ref, url, status, response.headers, endpoint=self._reach.endpoint, with_token=with_token
        )


class _Tries:
    """How often ``act`` has failed since the last byte came."""

    def __init__(
        self, retry_policy: RetryPolicy, moved: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._patience = retry_policy
        self._moved = moved
        self._say = say
        self._seen = moved()
        self.without_progress = 0

    def failed(self) -> None:
        now = self._moved()
        self.without_progress = 1 if now > self._seen else self.without_progress + 1
        self._seen = now

    def stop(self, _: RetryCallState) -> bool:
        return self.without_progress >= self._patience.attempts

    def wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, TransientError) and error.wait_s is not None:
            return error.wait_s
        longest_s = self._patience.first_wait_s * float(1 << (self.without_progress - 1))
        return min(longest_s, self._patience.most_wait_s) * random.uniform(0.8, 1.2)  # noqa: S311

    def before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._say(f"{error}; trying again in {state.upcoming_sleep:.1f} s")


def _joined(url: str, target: str) -> str:
    try:
        return str(httpx.URL(url).join(target))
    except (httpx.InvalidURL, ValueError) as error:  # the second: a host that is none, by its port or letters
        raise DownloadFailed(
            f"{shown_url(url)} redirects to what is no URL: {printable(str(error))}.",
            remedy="Check the URL, in a browser for example.",
        ) from None


async def _read_small(response: httpx.Response) -> None:
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= _SMALL_BODY:
        with _our_words(str(response.url)):
            await response.aread()


@contextmanager
def _our_words(url: str) -> Iterator[None]:
    """What httpx raises becomes an TransientError, or what no waiting helps against."""
    where = shown_url(url)
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransientError(f"{where} does not answer or stands still") from error
    except httpx.TransportError as error:
        if _is_untrusted(error):
            raise DownloadFailed(
                f"{where}: its certificate is not trusted here ({_plain(error)}).",
                remedy="Where a company's proxy reads along, set SSL_CERT_FILE to its certificates.",
            ) from error
        raise TransientError(f"{where}: {_plain(error)}") from error
    except (httpx.InvalidURL, ValueError) as error:
        raise DownloadFailed(
            f"{where} is no URL: {printable(str(error))}.", remedy="Check its host and its port."
        ) from error


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _plain(error: Exception) -> str:
    return (str(error) or "the connection was cut").removesuffix(".")
