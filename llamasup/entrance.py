"""Where clients come in: what can be said of it, and what of that is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llamasup.core.address import addresses, why_no_host
from llamasup.core.errors import UsageInvalid
from llamasup.effects.keys import KeyFile
from llamasup.jobs import ServiceOptions, given_front, refuse_outside
from llamasup.proxy.front import Front, listen
from llamasup.proxy.settings import ProxyConfig
from llamasup.proxy.tls import TlsContext, tls_context

__all__ = ["EntranceOptions", "front_of", "proxy_of", "refuse_bad_address", "tls_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntranceOptions(ServiceOptions):
    """``host`` is a name, an address, a path that ends in ``.sock``, or several with commas between them;
    port 0 takes any free one; ``tls_cert`` and ``tls_key`` are PEM files, both or neither.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_keys: tuple[str, ...] = ()
    """Keys that may infer, beside those of ``api_key_file``."""
    api_key_file: Path | None = None
    api_key_file_of: str = ""
    """The key of the config that names it, where one does."""


def refuse_bad_address(options: EntranceOptions) -> None:
    """X1: whoever can reach the port can use the model, so a way in from outside needs a key."""
    if not 0 <= options.port <= 65535:
        raise UsageInvalid(
            f"--port {options.port} is no port.", remedy="Give 1 to 65535, or 0 for any free one."
        )
    if not addresses(options.host):
        raise UsageInvalid(f"--host {options.host!r} names no address.", remedy="Leave it out for 127.0.0.1.")
    for host in addresses(options.host):
        if remedy := why_no_host(host):
            raise UsageInvalid(f"--host {host!r} is no address.", remedy=remedy)
    if options.api_keys or options.api_key_file or options.insecure_no_auth:
        return
    refuse_outside(addresses(options.host), options.sockets)


def front_of(options: EntranceOptions, tls: TlsContext | None) -> Front:
    """Take the addresses. Raises PortInUse and PortNotAllowed."""
    if options.sockets:
        return given_front(options.sockets, tls)
    return listen(addresses(options.host), options.port, tls=tls)


def proxy_of(options: EntranceOptions, *, route_by_model: bool) -> ProxyConfig:
    """Raises UsageInvalid for names that cannot be allowed, ConfigInvalid for a key file that is none."""
    key_file = None
    if options.api_key_file is not None:
        key_file = KeyFile(options.api_key_file, of=options.api_key_file_of)
    return replace(
        options.shared_proxy(), api_keys=options.api_keys, key_file=key_file, route_by_model=route_by_model
    )


def tls_of(options: EntranceOptions) -> TlsContext | None:
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if certificate is None else ("--tls-cert", "--tls-key")
        raise UsageInvalid(f"{given} without {missing}.", remedy="TLS takes both files: give the other one.")
    if any(host.endswith(".sock") for host in addresses(options.host)) and not options.sockets:
        raise UsageInvalid(
            f"TLS on a Unix socket (--host {options.host}) protects nothing: no network is between.",
            remedy="Leave --tls-cert and --tls-key out, or listen on an address.",
        )
    return tls_context(str(key), str(certificate))
