"""Imports httpx for llamasup's clients, and has what they share: trusted certificates and Unix sockets.

httpx is imported without its command line, which would import rich, pygments and click. That would take 60 ms
of every start and 6 MB of memory (httpx 0.28, measured). A module that is None in ``sys.modules`` cannot be
imported, and httpx works without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import httpcore

from llamasup.core.http.network import AsyncioBackend

if TYPE_CHECKING:
    import ssl

__all__ = ["TRUST_REMEDY", "UnixTransport", "httpx", "is_untrusted", "trusted"]

_COMMAND_LINE = "httpx._main"

if _COMMAND_LINE in sys.modules:  # the embedding program has imported it already
    import httpx
else:
    sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment]
    try:
        import httpx
    finally:
        del sys.modules[_COMMAND_LINE]

TRUST_REMEDY: Final = "Trust the CA of its certificate: SSL_CERT_FILE=FILE."


def trusted(url: str) -> ssl.SSLContext | bool:
    """Trust the system's certificates, or ``$SSL_CERT_FILE``. Loading them takes 20 ms."""
    if httpx.URL(url).scheme != "https":  # httpx writes the scheme in lower case
        return False
    import ssl

    return ssl.create_default_context()


def is_untrusted(error: Exception) -> bool:
    """Return whether a connection failed because of the certificate of the server."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


class UnixTransport(httpx.AsyncHTTPTransport):
    """A transport over the Unix socket at ``path`` that can be cancelled at any time.

    It makes any number of connections (see ``AsyncioBackend``).
    """

    def __init__(self, path: str) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            uds=path, max_connections=None, max_keepalive_connections=None, network_backend=AsyncioBackend()
        )
