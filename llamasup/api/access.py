"""Makes httpx clients for the program that serves."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from msgspec import Struct

from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.http.httpx_import import httpx
from llamasup.core.http.unix_transport import UnixTransport

# A request may wait for a load, and a long prompt sends nothing for minutes.
_TIMEOUT = httpx.Timeout(None, connect=10.0)


class Access(Struct, frozen=True):
    """The address of the server and what its clients need. ``certificate``: the served chain, with TLS."""

    address: Address
    api_key: str | None = None
    certificate: Path | None = None

    def __repr__(self) -> str:
        return f"Access({self.address!r})"  # without the key

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(**self._transport_options()), **self._options())

    def async_client(self) -> httpx.AsyncClient:
        options = self._transport_options()
        path = options["uds"]
        transport = httpx.AsyncHTTPTransport(**options) if path is None else UnixTransport(path)
        return httpx.AsyncClient(transport=transport, **self._options())

    def _options(self) -> dict[str, Any]:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"base_url": self.address.url, "headers": headers, "timeout": _TIMEOUT, "trust_env": False}

    def _transport_options(self) -> dict[str, Any]:
        path = str(Path(self.address.path).absolute()) if isinstance(self.address, UnixAddress) else None
        return {"uds": path, "verify": self._trust()}

    def _trust(self) -> ssl.SSLContext | bool:
        """Trust exactly this certificate, whatever its name: the address is our own and may not be in it."""
        if self.certificate is None:
            return False  # plain HTTP; loading certificates would take 20 ms
        trust = ssl.create_default_context(cafile=self.certificate)
        trust.check_hostname = False
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return trust
