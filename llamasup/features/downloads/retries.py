"""Decides after which failures of a download another attempt may help, and when.

The failures of connections become errors here; ``hub_responses.py`` reads the responses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from llamasup.core.http.httpx_client import httpx, is_untrusted
from llamasup.core.hub.reference import shown_url
from llamasup.core.system.text import printable
from llamasup.errors import DownloadFailed, without_errno


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
        """Return the wait before the next attempt: the server's Retry-After, or a backoff."""
        if error.wait_s is not None:
            return error.wait_s
        backoff_s = min(self.first_wait_s * float(1 << (failures - 1)), self.max_wait_s)
        return backoff_s * random.uniform(0.8, 1.2)  # noqa: S311


class TransientError(Exception):
    """A retry may help. ``wait_s``: the Retry-After of the server."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Turns exceptions of httpx into TransientError, or DownloadFailed if a retry cannot help."""
    where = shown_url(url)
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransientError(f"{where} does not answer") from error
    except httpx.TransportError as error:
        if is_untrusted(error):
            raise DownloadFailed(
                f"The certificate of {where} is not trusted ({_reason(error)}).",
                remedy="If a proxy of your company decrypts TLS, set SSL_CERT_FILE to its certificates.",
            ) from error
        raise TransientError(f"{where}: {_reason(error)}") from error
    except (httpx.InvalidURL, ValueError) as error:
        raise DownloadFailed(
            f"{where} is not a valid URL: {printable(str(error))}.", remedy="Check its host and its port."
        ) from error


def _reason(error: Exception) -> str:
    return without_errno(str(error) or "the connection was cut").removesuffix(".")
