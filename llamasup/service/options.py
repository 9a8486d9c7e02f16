"""What to serve and where to listen: the checked options of ``run``, ``wrap`` and ``serve``.

A service is a model that llamasup plans for, or a llama-server command line that it runs unchanged.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamasup.auth.key_source import KeyFile
from llamasup.errors import UnsafeBind, UsageInvalid
from llamasup.gguf.facts import ModelFacts
from llamasup.http.address import (
    TcpAddress,
    UnixAddress,
    addresses,
    allowed_host,
    allowed_media_host,
    allowed_origin,
    invalid_host_remedy,
    is_local,
)
from llamasup.http.heads import HeadRules
from llamasup.llama_server.client import Prober
from llamasup.llama_server.slots.policy import MAX_BYTES
from llamasup.proxy.listen import ListenerSet, listen
from llamasup.proxy.settings import MIB, STREAM_KEEPALIVE_S, Limits, ProxyConfig
from llamasup.proxy.tls import TlsContext, tls_context
from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.liveness import LivenessPolicy
from llamasup.supervision.plan_protocol import AnyPlanMaker, ChildPlan
from llamasup.supervision.runner import prober_of
from llamasup.supervision.states import Policy
from llamasup.supervision.wrap.planner import WrappedPlanner, Wrapping, prober_for

__all__ = [
    "EntranceOptions",
    "ServiceOptions",
    "ServiceSpec",
    "WrapOptions",
    "front_of",
    "given_front",
    "proxy_of",
    "refuse_bad_address",
    "refuse_outside",
    "tls_of",
    "wrap_job",
]


# As llama-server has it unless it is told otherwise (b11434).
_TIMEOUT_S = 3600.0
_BODY_BYTES = 100 * MIB


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What sets one kind of service apart from another."""

    name: str
    aliases: tuple[str, ...]
    planner: Callable[[Path], AnyPlanMaker]
    listen: Callable[[], ListenerSet]
    proxy: ProxyConfig
    cwd: Path | None = None
    prober: Callable[[ChildPlan], Prober] = prober_of
    facts: ModelFacts | None = None
    """Of the model's file, where they are known."""
    passes_exit_code: bool = False
    """End with the exit code that llama-server ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What every kind of service can be told. Times in seconds."""

    insecure_no_auth: bool = False
    hosts: tuple[str, ...] = ()
    """Names accepted in Host, besides the loopback ones and the address that is listened on."""
    origins: tuple[str, ...] = ()
    """Web pages that may call, as ``https://name[:port]``."""
    remote_media: tuple[str, ...] = ()
    """Hosts from which llama-server may fetch media URLs of requests; ``any``: every host."""
    max_concurrent: int | None = None
    """Requests that run at once; None: as many as the model has slots."""
    max_queued: int = 256
    """Requests that may wait for a slot or a generation."""
    request_timeout_s: float | None = None
    """From a request's last byte to its answer's; None: no limit."""
    stream_keepalive: bool = False
    """Send SSE comments to a stream that waits for 10 s without a byte, and every 10 s from then on."""
    access_log: Path | None = None
    """Where each finished request is a line of JSON; ``-``: standard error."""
    slow_request_s: float | None = None
    """Requests whose answer takes longer to begin are told, some of many; None: none are."""
    warm_up: bool = True
    wait_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    stall_timeout_s: float = 120.0
    """A start that shows no progress for this long is given up as hung."""
    slots_disk_bytes: int = MAX_BYTES
    """What conversations that outlive their server (``Settings.keep_slots``) may take on the disk."""
    slots_timeout_s: float = 10.0
    """How long they may be saved before it ends, and restored before it serves."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)
    ready_file: Path | None = None
    sockets: tuple[socket.socket, ...] = ()
    """Listening sockets to serve on instead of the address asked for; the service closes them."""

    def shared_proxy(self) -> ProxyConfig:
        """Raises UsageInvalid for names that cannot be allowed."""
        return ProxyConfig(
            hosts=tuple(map(allowed_host, self.hosts)),
            origins=tuple(map(allowed_origin, self.origins)),
            remote_media=tuple(map(allowed_media_host, self.remote_media)),
            route_by_model=False,
            request_timeout_s=self.request_timeout_s,
            stream_keepalive_s=STREAM_KEEPALIVE_S if self.stream_keepalive else None,
        )

    def shared_policy(self) -> Policy:
        return Policy(
            warm_up=self.warm_up,
            wait_timeout_s=self.wait_timeout_s,
            max_concurrent=self.max_concurrent,
            max_queued=self.max_queued,
            drain_timeout_s=self.drain_timeout_s,
            stop_timeout_s=self.stop_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            slots_disk_bytes=self.slots_disk_bytes,
            slots_timeout_s=self.slots_timeout_s,
            restart=self.restart,
            liveness=self.liveness,
        )


@dataclass(frozen=True, slots=True)
class WrapOptions(ServiceOptions):
    """What ``llamasup wrap`` can be told. ``wrapping`` is what ``understand`` makes."""

    wrapping: Wrapping
    strict: bool = False
    """Judge Host, Origin and paths as for ``RunOptions``, where llama-server would let them pass."""
    waits_for_first_load: bool = False
    """Let requests wait for the first load too, where llama-server would answer 503."""

    @property
    def policy(self) -> Policy:
        # The connection that made systemd start the service waits for it.
        waits = self.waits_for_first_load or bool(self.sockets)
        return replace(
            self.shared_policy(),
            # Where nobody knows what to ask, /health has to do.
            warm_up=self.warm_up and self.wrapping.probe_class is not None,
            knows_all_keys=False,  # a script may set one
            limits_to_slots=self.strict,
            waits_for_first_load=self.wait_timeout_s > 0 and waits,
        )


def wrap_job(options: WrapOptions) -> ServiceSpec:
    """The command line as it is. ``strict`` closes on top of that what llamasup closes elsewhere.

    Raises UnsafeBind, UsageInvalid and ConfigInvalid.
    """
    wrapping = options.wrapping
    line = wrapping.line
    if not options.strict and (options.hosts or options.origins or options.remote_media):
        raise UsageInvalid(
            "Without --strict, wrap accepts every Host, Origin and URL, as llama-server does;"
            " allowing single ones has no effect.",
            remedy="Add --strict, or remove --allow-host, --allow-origin and --remote-media.",
        )
    if options.strict and not line.has_plain_prefix:
        raise UsageInvalid(
            f"--api-prefix {line.api_prefix!r} cannot be used with --strict: llama-server reads it as a"
            " regular expression, so it also serves closed paths below other prefixes.",
            remedy="Use a prefix of /, letters, digits, _, ~ and -, such as /llm/v2, or remove --strict.",
        )
    if options.strict and not (wrapping.has_keys or options.insecure_no_auth):
        refuse_outside(line.hosts, options.sockets, set_key="Give llama-server a key with --api-key-file")
    tls = tls_context(line.tls.key_file, line.tls.cert_file) if line.tls else None
    patience_s = line.timeout_s or _TIMEOUT_S
    limits = Limits(
        body_bytes=_BODY_BYTES,
        head_s=patience_s,
        body_idle_s=patience_s,
        body_rate_bytes=1,
        bodies_bytes=8 * _BODY_BYTES,
        bodies_per_client_bytes=8 * _BODY_BYTES,
        send_stall_s=patience_s,
        connections_per_client=Limits().connections,  # as it would be of llama-server itself
    )
    return ServiceSpec(
        name=line.name,
        aliases=(),
        planner=lambda folder: WrappedPlanner(wrapping, folder),
        listen=lambda: (
            given_front(options.sockets, tls)
            if options.sockets
            else listen(line.hosts, line.port, reuse_port=line.reuse_port, dual_stack=True, tls=tls)
        ),
        proxy=replace(
            options.shared_proxy(),
            api_keys=wrapping.api_keys if options.strict else (),
            rules=HeadRules(
                transparent=not options.strict,
                credentials=not wrapping.needs_own_key,
                prefix=line.api_prefix.encode(),
            ),
            limits=Limits() if options.strict else limits,
        ),
        cwd=wrapping.cwd,
        prober=lambda plan: prober_for(wrapping, plan),
        passes_exit_code=True,
    )


def given_front(sockets: Sequence[socket.socket], tls: TlsContext | None = None) -> ListenerSet:
    """Sockets that somebody else has bound: the service manager, who also removes their files."""
    names = [sock.getsockname() for sock in sockets]
    tcp = [TcpAddress(name[0], name[1], tls=tls is not None) for name in names if isinstance(name, tuple)]
    return ListenerSet(tcp[0] if tcp else UnixAddress(str(names[0])), list(sockets), tls, ours=False)


def refuse_outside(
    hosts: Sequence[str],
    sockets: Sequence[socket.socket],
    *,
    set_key: str = "Set a key with --api-key-file or $LLAMASUP_API_KEY",
) -> None:
    """X1: whoever can reach the port can use the model, so a way in from outside needs a key.

    ``sockets`` are the service manager's; with them ``hosts`` say nothing.
    """
    if sockets:
        names = [sock.getsockname() for sock in sockets]
        hosts = [name[0] for name in names if isinstance(name, tuple)]
    outside = [host for host in hosts if not is_local(host)]
    if not outside:
        return
    what = f"The socket on {outside[0]}" if sockets else f"--host {outside[0]}"
    raise UnsafeBind(
        f"{what} can be reached from other machines, and no API key is set.",
        remedy=f"{set_key}, or accept requests from anybody with --insecure-no-auth.",
    )


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
        if remedy := invalid_host_remedy(host):
            raise UsageInvalid(f"--host {host!r} is no address.", remedy=remedy)
    if options.api_keys or options.api_key_file or options.insecure_no_auth:
        return
    refuse_outside(addresses(options.host), options.sockets)


def front_of(options: EntranceOptions, tls: TlsContext | None) -> ListenerSet:
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
