"""Decides which addresses and URLs a download may use (X11).

The user chooses a URL, but the server chooses a redirect: it must not make this machine send requests into
its own network. The hub that the user configured may have any address; all others must be public.
"""

from __future__ import annotations

import ipaddress

from msgspec import Struct

from llamasup.core.hub.reference import origin_of, shown_url
from llamasup.errors import DownloadRefused

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# The assigned IPv6 addresses. Outside are local translations to IPv4 (64:ff9b:1::/48, ::/96), site-local
# addresses and others, which ``is_global`` does not all know.
_ASSIGNED = ipaddress.IPv6Network("2000::/3")


class UrlPolicy(Struct, frozen=True):
    """The policy of a download. ``endpoint`` is the base URL of the hub. ``private`` allows private
    addresses, ``http`` plain HTTP.
    """

    endpoint: str
    private: bool = False
    http: bool = False

    def check_url(self, url: str) -> None:
        """Raises DownloadRefused if the URL is not allowed."""
        try:
            scheme, host, _ = origin_of(url)
        except ValueError as error:
            raise DownloadRefused(
                f"{shown_url(url)} is refused: {error}.", remedy="Give an https URL."
            ) from None
        if not host:
            raise DownloadRefused(
                f"{shown_url(url)} is refused: it has no host.", remedy="Give the URL of a file."
            )
        if scheme == "https" or self.http or (self.is_endpoint(url) and is_loopback_host(host)):
            return
        raise DownloadRefused(
            f"{shown_url(url)} is refused: plain http does not protect the download from changes.",
            remedy="Use https, or allow http: llamasup pull --allow-http URL "
            "(in a config: downloads.private_addresses).",
        )

    def is_endpoint(self, url: str) -> bool:
        return origin_of(url) == origin_of(self.endpoint)

    def allows_token(self, url: str) -> bool:
        """Whether a request for ``url`` may carry the token: only to the hub, over TLS or loopback."""
        scheme, host, _ = origin_of(url)
        return self.is_endpoint(url) and (scheme == "https" or is_loopback_host(host))

    def allowed(self, url: str, addresses: list[str]) -> list[str]:
        """Return the allowed ``addresses`` of the URL's host. Raises DownloadRefused if there are none."""
        if self.private or self.is_endpoint(url):
            return addresses
        public = [address for address in addresses if is_public(address)]
        if public:
            return public
        raise DownloadRefused(
            f"{shown_url(url)} is refused: its host has the private address {addresses[0]}.",
            remedy="If this is intended, allow it: llamasup pull --allow-private URL "
            "(in a config: downloads.private_addresses).",
        )


def is_public(address: str) -> bool:
    """Whether the address is public. An IPv6 address that contains an IPv4 one counts as that one."""
    try:
        found = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return False
    return (
        found.is_global
        and not found.is_multicast
        and (isinstance(found, ipaddress.IPv4Address) or found in _ASSIGNED)
    )


def _unwrapped(address: _Address) -> _Address:
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def is_loopback_host(host: str) -> bool:
    """Whether the host is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
