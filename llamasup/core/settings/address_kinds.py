"""The kinds of values that are addresses, hosts and origins.

Their rules are those of ``http.address``, imported when a value is parsed: most commands parse none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from llamasup.core.settings.kinds import InvalidValue, Names, ValueKind
from llamasup.errors import UsageInvalid

if TYPE_CHECKING:
    from llamasup.core.http.address import Address

_HOST_PORT = r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*):(?P<port>[0-9]{1,5})"


class Listen(ValueKind, frozen=True):
    """An address to listen on. The reader makes the path of a socket absolute."""

    allowed: ClassVar[str] = "HOST:PORT such as 127.0.0.1:8080 or [::1]:8080, or a path that ends in .sock"
    names: ClassVar[Names] = "path"

    def parse(self, text: str) -> Address:
        from llamasup.core.http.address import TcpAddress, UnixAddress

        if text.endswith(".sock"):
            return UnixAddress(text)
        parts = re.fullmatch(_HOST_PORT, text)
        if parts is None:
            raise InvalidValue(_why_not_an_address(text))
        host, port = parts["host"], int(parts["port"])
        if not host:
            raise InvalidValue("the host is missing; use 0.0.0.0 or [::] for all addresses of this machine")
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(letter.isspace() for letter in host) or "/" in host or "," in host:
            raise InvalidValue
        if port > 65535:
            raise InvalidValue("the port is above 65535")
        return TcpAddress(host, port)

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": r"^(?:.+\.sock|(?:\[[^\[\]]+\]|[^:\[\]/\s,]+):[0-9]{1,5})$"}


def _why_not_an_address(text: str) -> str:
    from llamasup.core.http.address import invalid_host_remedy

    if text.count(":") > 1 and "[" not in text and "/" not in text:
        return "an IPv6 address needs brackets"
    bare = text.removeprefix("[").removesuffix("]")
    return "" if not bare or bare.isdigit() or invalid_host_remedy(bare) else "the port is missing"


class HostName(ValueKind, frozen=True):
    allowed: ClassVar[str] = "a host name without a port, such as llm.example.net"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import allowed_host

        return _checked(allowed_host, text)

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "minLength": 1}


class Origin(ValueKind, frozen=True):
    allowed: ClassVar[str] = "an origin such as https://chat.example.net"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import allowed_origin

        return _checked(allowed_origin, text)

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": "^[a-zA-Z][a-zA-Z0-9+.-]*://[^/*]+$"}


class MediaHost(ValueKind, frozen=True):
    """A host of media. ``true`` is every host; ``false`` is none, as an empty string that is dropped."""

    allowed: ClassVar[str] = "false, true for any host, or a host such as cdn.example.net or 10.0.0.5:8000"
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import ANY_HOST, allowed_media_host

        if text.lower() in ("true", "false"):
            return ANY_HOST if text.lower() == "true" else ""
        return _checked(allowed_media_host, text)

    def schema(self) -> Mapping[str, Any]:
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 1}]}


class ProxyAddress(ValueKind, frozen=True):
    allowed: ClassVar[str] = "an address or a network such as 10.0.0.0/8, or unix for Unix sockets"
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import UNIX, proxy_network

        try:
            return text if text == UNIX else str(proxy_network(text))
        except ValueError as error:
            raise InvalidValue(str(error)) from None

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "minLength": 1}


class RpcWorker(ValueKind, frozen=True):
    """The address of an RPC worker, as text. ``http.address`` checks that it is private."""

    allowed: ClassVar[str] = (
        "HOST:PORT of a loopback or private address such as 10.0.0.2:50052, or tls://HOST:PORT"
    )
    names: ClassVar[Names] = "host"

    def parse(self, text: str) -> str:
        from llamasup.core.http.address import parse_worker

        try:
            return str(parse_worker(text))
        except UsageInvalid as error:
            raise InvalidValue(error.message.rstrip(".")) from None

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": r"^(?:tls://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$"}


def worker_identity(text: str) -> object:
    """Return a key that is equal for two valid addresses of one RPC worker."""
    from llamasup.core.http.address import parse_worker

    return parse_worker(text).identity


def _checked(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except UsageInvalid as error:
        raise InvalidValue(f"it {error.message.removeprefix(f'{text!r} ').rstrip('.')}") from None
