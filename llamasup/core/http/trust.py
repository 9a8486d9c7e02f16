"""Decides which certificates the clients in llamasup trust, and what users can do about the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llamasup.core.http.httpx_import import httpx

if TYPE_CHECKING:
    import ssl

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
