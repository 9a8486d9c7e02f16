"""The options of services, and the listeners and proxy settings that are made from these options."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.auth.key_source import KeyFile
from llamasup.core.control.interface import ServiceOwner
from llamasup.core.http.address import (
    Address,
    TcpAddress,
    UnixAddress,
    addresses,
    allowed_host,
    allowed_media_host,
    allowed_origin,
    invalid_host_remedy,
    is_local,
)
from llamasup.core.llama_server.argv_builder import ignored_variables
from llamasup.core.observability.access_log import check_log_file
from llamasup.core.planning.facts import Launch, prepare
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.estimate import Starter
from llamasup.core.proxy.listeners.listen import ListenerSet, listen
from llamasup.core.proxy.listeners.tls import TlsContext
from llamasup.core.proxy.settings import MIB, STREAM_KEEPALIVE_S, Limits, ProxyConfig, RouterApi
from llamasup.core.settings.model import NO_REPAIRS, Repair, Settings, repairs_of
from llamasup.core.settings.units import Size
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.states import Policy, PolicyOptions
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.process.sweep import sweep
from llamasup.errors import UnsafeBind, UsageInvalid
from llamasup.features import config_key
from llamasup.service.models import HostedEntry, HostedModels, LogListener, OnlyEntry

STANDARD_ERROR: Final = Path("-")

_log = logging.getLogger(__name__)

_NOWHERE = Path("/nonexistent")
BODY_BYTES = 100 * MIB  # llama-server's default (b11434)
UNBOUNDED = 1 << 62  # bytes; a share of it cannot be set
_FORM_BYTES = MIB  # around the file of an upload


def largest_body(memory_bytes: int) -> int:
    """The largest body, if the user sets none: llama-server's limit, or less, so that four such bodies
    take at most 1/16 of the memory.
    """
    return min(BODY_BYTES, max(Limits().body_bytes, memory_bytes // 64))


class GivenProgram(Protocol):
    """A program with a command line of its own."""

    @property
    def shown(self) -> str:
        """Return the program and its version, without its arguments, which may contain a key (X13)."""
        ...


class ServiceSpec(Struct, frozen=True):
    """A service that can be started: its options are checked."""

    models: Callable[[ServiceOwner, Bus, Path, Address, LogListener | None], HostedModels]
    """Makes the models, in the event loop that serves them."""
    listen: Callable[[], ListenerSet]
    """Opens the listening sockets; called once, before any process is started."""
    proxy: ProxyConfig
    listen_ollama: Callable[[], ListenerSet] | None = None
    """Opens the listener for Ollama's API, if there is one."""
    launch: Launch | GivenProgram | None = None
    """The launch of the only model; None for many models."""


class ServiceOptions(PolicyOptions, frozen=True, kw_only=True):
    """The options of all services. Times in seconds."""

    def spec(self, environ: Mapping[str, str]) -> ServiceSpec:
        """Find every error that can be found before a process is started: UsageInvalid, ConfigInvalid,
        UnsafeBind, RuntimeMissing, ModelMissing, ModelInvalid or DoesNotFit.
        """
        raise NotImplementedError

    @property
    def policy(self) -> Policy:
        shared = {name: getattr(self, name) for name in PolicyOptions.__struct_fields__}
        return Policy(**shared, repairs=repairs_of(self.repair))

    insecure_no_auth: bool = False
    hosts: tuple[str, ...] = ()
    """Names accepted in Host, besides loopback names and the listening address."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests, as ``https://name[:port]``."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of reverse proxies, or ``unix``."""
    remote_media: tuple[str, ...] = ()
    """Hosts from which llama-server may fetch media URLs of requests; ``any``: every host."""
    max_body: Size | None = None
    """The largest body of a request; None: ``largest_body``."""
    request_timeout_s: float | None = None
    """From the last byte of the request to the last byte of the answer; None: no limit."""
    stream_keepalive: bool = False
    """Send an SSE comment to a stream after every 10 s without a byte."""
    access_log: Path | None = None
    """File for a line of JSON per finished request; ``-``: standard error."""
    slow_request_s: float | None = None
    """Log requests whose answer takes longer to begin, at a limited rate; None: never."""
    no_usage: bool = False
    """Do not count the usage (``features/usage/``)."""
    features: Mapping[str, Any] = {}
    """``Config.features``: values of the keys of features."""
    batches: Any = None
    """``Batches``: serve the API for batches (``features/batch/api/``)."""
    repair: Repair | None = None
    """Repair requests and answers (``features/repair/``); None: off."""
    ready_file: Path | None = None
    sockets: tuple[socket.socket, ...] = ()
    """Listening sockets to use instead of opening an address; the service closes them."""

    def shared_proxy(self) -> ProxyConfig:
        """Raises UsageInvalid for invalid host names and origins."""
        return ProxyConfig(
            hosts=tuple(map(allowed_host, self.hosts)),
            machine=socket.gethostname(),
            trusted_proxies=self.trusted_proxies,
            origins=tuple(map(allowed_origin, self.origins)),
            remote_media=tuple(map(allowed_media_host, self.remote_media)),
            route_by_model=False,
            holds_bodies=repairs_of(self.repair) is not NO_REPAIRS,
            request_timeout_s=self.request_timeout_s,
            stream_keepalive_s=STREAM_KEEPALIVE_S if self.stream_keepalive else None,
            limits=Limits().for_bodies(
                largest_body(hardware().memory_total_bytes)
                if self.max_body is None
                else self.max_body.of(UNBOUNDED)
            ),
        )


def inherited_listeners(sockets: Sequence[socket.socket], tls: TlsContext | None = None) -> ListenerSet:
    """Sockets that the service manager has opened; it also removes their files."""
    names = [sock.getsockname() for sock in sockets]
    tcp = [TcpAddress(name[0], name[1], tls=tls is not None) for name in names if isinstance(name, tuple)]
    return ListenerSet(tcp[0] if tcp else UnixAddress(str(names[0])), list(sockets), tls, ours=False)


def require_key_if_reachable(
    hosts: Sequence[str],
    sockets: Sequence[socket.socket],
    *,
    set_key: str = "Set a key with --api-key-file or $LLAMASUP_API_KEY",
    option: str = "--host",
) -> None:
    """X1: every client that can reach the port can use the model, so other machines need a key.

    ``sockets`` are the service manager's; they replace ``hosts``.
    """
    if sockets:
        names = [sock.getsockname() for sock in sockets]
        hosts = [name[0] for name in names if isinstance(name, tuple)]
    outside = [host for host in hosts if not is_local(host)]
    if not outside:
        return
    what = f"The socket on {outside[0]}" if sockets else f"{option} {outside[0]}"
    raise UnsafeBind(
        f"{what} can be reached from other machines, and no API key is set.",
        remedy=f"{set_key}, or accept requests without a key with --insecure-no-auth.",
    )


class ListenOptions(ServiceOptions, frozen=True, kw_only=True):
    """``host`` is a name, an address, a path that ends in ``.sock``, or several of them separated by commas;
    port 0 means any free one; ``tls_cert`` and ``tls_key`` are PEM files, both or neither.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_keys: tuple[str, ...] = ()
    """Keys with inference rights, besides those of ``api_key_file``."""
    api_key_file: Path | None = None
    api_key_file_of: str = ""
    """The key of the config that names the file, if one does."""
    no_ui: bool = False
    """Do not serve the web console."""
    ollama: str | None = None
    """The address of Ollama's API: HOST:PORT, or a path that ends in ``.sock``; None: it is not served."""


class RunOptions(ListenOptions, frozen=True):
    """The options of ``llamasup run``."""

    model: str
    settings: Settings = field(default_factory=Settings)
    runtime: str | None = None

    def spec(self, environ: Mapping[str, str]) -> ServiceSpec:
        proxy = checked_proxy(self, route_by_model=False)
        launch = prepare(self.model, self.settings, runtime=self.runtime, environ=environ)
        Planner(launch, _NOWHERE).check()
        if ignored := ignored_variables(launch.environ, launch.runtime.capabilities):
            _log.warning("%s", ignored)
        starter = Starter(lambda name, number, folder, prefix, share: Planner(launch, folder))
        entry = OnlyEntry(launch.model_id, starter, launch.aliases, launch)
        return listening_spec(self, load_tls(self), proxy, partial(HostedEntry, entry, self.policy), launch)


def checked_proxy(options: ListenOptions, *, route_by_model: bool) -> ProxyConfig:
    """Check the addresses, keys and names, and then clean up after earlier runs.

    Raises UsageInvalid, UnsafeBind and ConfigInvalid.
    """
    check_address(options)
    key_file = None
    if options.api_key_file is not None:
        key_file = KeyFile(options.api_key_file, of=options.api_key_file_of)
    shared, batches = options.shared_proxy(), options.batches
    limits, console = shared.limits, not options.no_ui
    if batches is not None:
        limits = replace(limits, file_bytes=batches.max_file.of(UNBOUNDED) + _FORM_BYTES)
    key = config_key("router") if route_by_model else None
    router = None if key is None else options.features.get(key.name, key.default)
    proxy = replace(
        shared,
        api_keys=options.api_keys,
        key_file=key_file,
        route_by_model=route_by_model,
        console=console,
        rules=replace(shared.rules, batches=batches is not None, data_only=route_by_model and console),
        router=None if router is None else RouterApi(router.inference_keys, router.props),
        limits=limits,
    )
    sweep_and_check(options)
    return proxy


def listening_spec(
    options: ListenOptions,
    tls: TlsContext | None,
    proxy: ProxyConfig,
    models: Callable[..., HostedModels],
    launch: Launch | None = None,
) -> ServiceSpec:
    """Make the service at the addresses of ``options``."""
    listen_ollama = ollama_listener(options, tls)
    return ServiceSpec(models, lambda: open_listeners(options, tls), proxy, listen_ollama, launch)


def sweep_and_check(options: ServiceOptions) -> None:
    """Before the start: clean up after earlier runs, whose processes may hold the memory that this one needs.

    Raises ConfigInvalid if the access log cannot be written.
    """
    if options.access_log is not None and options.access_log != STANDARD_ERROR:
        check_log_file(options.access_log)
    for swept in sweep():
        _log.warning("%s", swept)


def check_address(options: ListenOptions) -> None:
    """Raises UsageInvalid for an invalid address, UnsafeBind for one that needs a key (X1)."""
    if not 0 <= options.port <= 65535:
        raise UsageInvalid(
            f"--port {options.port} is not a valid port.", remedy="Use 1 to 65535, or 0 for any free one."
        )
    if not addresses(options.host):
        raise UsageInvalid(f"--host {options.host!r} names no address.", remedy="Omit it for 127.0.0.1.")
    for host in addresses(options.host):
        if remedy := invalid_host_remedy(host):
            raise UsageInvalid(f"--host {host!r} is not a valid address.", remedy=remedy)
    ollama = None if options.ollama is None else _ollama_host(options.ollama)[0]
    if options.api_keys or options.api_key_file or options.insecure_no_auth:
        return
    require_key_if_reachable(addresses(options.host), options.sockets)
    if ollama is not None:
        require_key_if_reachable([ollama], (), option="--ollama")


def open_listeners(options: ListenOptions, tls: TlsContext | None) -> ListenerSet:
    """Open the listening sockets. Raises PortInUse and PortNotAllowed."""
    if options.sockets:
        return inherited_listeners(options.sockets, tls)
    return listen(addresses(options.host), options.port, tls=tls)


def ollama_listener(options: ListenOptions, tls: TlsContext | None) -> Callable[[], ListenerSet] | None:
    """Opens the listener for Ollama's API; None if there is none."""
    if options.ollama is None:
        return None
    host, port = _ollama_host(options.ollama)
    return lambda: listen([host], port, tls=None if host.endswith(".sock") else tls)


def _ollama_host(text: str) -> tuple[str, int]:
    """The host or path, and the port. Raises UsageInvalid."""
    # Here, because few services have one.
    from llamasup.core.settings.kinds import InvalidValue, Listen

    try:
        address = Listen().parse(text)
    except InvalidValue as error:
        raise UsageInvalid(
            f"--ollama {text!r} is not a valid address{f': {error.why}' if error.why else ''}.",
            remedy=f"Use {Listen().allowed}.",
        ) from None
    return (address.path, 0) if isinstance(address, UnixAddress) else (address.host, address.port)


def load_tls(options: ListenOptions) -> TlsContext | None:
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if certificate is None else ("--tls-cert", "--tls-key")
        raise UsageInvalid(f"{given} without {missing}.", remedy="TLS needs both files: add the other one.")
    if any(host.endswith(".sock") for host in addresses(options.host)) and not options.sockets:
        raise UsageInvalid(
            f"TLS on a Unix socket (--host {options.host}) protects nothing, as it uses no network.",
            remedy="Remove --tls-cert and --tls-key, or listen on an address.",
        )
    return TlsContext(str(key), str(certificate))
