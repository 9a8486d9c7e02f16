"""Which addresses and URLs a download may be led to (X11).

A URL comes from a person, but a redirect comes from whoever answers: it must not make this machine ask its
own network. What the user has named as the hub is asked wherever it is; everything else has to be public.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from llamasup.downloads.reference import origin_of, shown_url
from llamasup.errors import DownloadRefused

__all__ = ["UrlPolicy", "is_loopback_host", "is_public"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# All that is handed out of IPv6. Outside it are networks' own ways to IPv4 addresses (64:ff9b:1::/48, ::/96),
# old site-local ones and others, which ``is_global`` does not all know.
_HANDED_OUT = ipaddress.IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class UrlPolicy:
    """``endpoint`` is the hub's base URL. ``private``: other addresses than public ones are allowed
    everywhere; ``http``: so is plain HTTP.
    """

    endpoint: str
    private: bool = False
    http: bool = False

    def check_url(self, url: str) -> None:
        """Raises DownloadRefused for a URL that must not be asked."""
        try:
            scheme, host, _ = origin_of(url)
        except ValueError as error:
            raise DownloadRefused(
                f"{shown_url(url)} is not asked: {error}.", remedy="Give an https URL."
            ) from None
        if not host:
            raise DownloadRefused(
                f"{shown_url(url)} is not asked: it names no host.", remedy="Give the URL of a file."
            )
        if scheme == "https" or self.http or (self.is_endpoint(url) and is_loopback_host(host)):
            return
        raise DownloadRefused(
            f"{shown_url(url)} is not asked: over plain http anybody on the way can change what comes.",
            remedy="Use https, or allow it with --allow-http.",
        )

    def is_endpoint(self, url: str) -> bool:
        return origin_of(url) == origin_of(self.endpoint)

    def allows_token(self, url: str) -> bool:
        """Whether the user's token may be shown to ``url``: to the hub alone, and where nobody can listen."""
        scheme, host, _ = origin_of(url)
        return self.is_endpoint(url) and (scheme == "https" or is_loopback_host(host))

    def allowed(self, url: str, addresses: list[str]) -> list[str]:
        """Those of the ``addresses`` of the URL's host that may be connected to. Raises DownloadRefused."""
        if self.private or self.is_endpoint(url):
            return addresses
        public = [each for each in addresses if is_public(each)]
        if public:
            return public
        raise DownloadRefused(
            f"{shown_url(url)} is not asked: its host has the address {addresses[0]}, no public one.",
            remedy="If that is meant, allow it with --allow-private (in a config: private_addresses).",
        )


def is_public(address: str) -> bool:
    """Whether the whole Internet can have this address; an IPv4 one within an IPv6 one counts as itself."""
    try:
        found = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return False
    return (
        found.is_global
        and not found.is_multicast
        and (isinstance(found, ipaddress.IPv4Address) or found in _HANDED_OUT)
    )


def _unwrapped(address: _Address) -> _Address:
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def is_loopback_host(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
