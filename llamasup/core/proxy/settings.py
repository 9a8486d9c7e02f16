"""The settings of the proxy. The defaults are the promises (X1 to X9)."""

from __future__ import annotations

from typing import Self

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.auth.key_source import KeyFile
from llamasup.core.http.heads import DEFAULT_RULES, HeadRules

__all__ = ["STREAM_KEEPALIVE_S", "Limits", "ProxyConfig"]

MIB = 1 << 20
KIB = 1 << 10
STREAM_KEEPALIVE_S = 10.0  # most proxies and load balancers close a silent connection after 30 s or more


class Limits(Struct, frozen=True):
    """Limits of connections, requests and bodies (X8). A sweep every ``sweep_s`` checks the times."""

    body_bytes: int = 32 * MIB  # with little memory; ``for_bodies``
    head_bytes: int = 64 * KIB
    headers: int = 100
    head_s: float = 10.0  # from the first byte of a head to its end
    body_idle_s: float = 30.0
    # Minimum average rate per second after ``body_idle_s``: 32 MiB may take about half an hour.
    body_rate_bytes: int = 16 * KIB
    # All bodies that are being read, wait, or are kept for a retry: eight of the largest size. Bodies of at
    # most ``small_body_bytes`` do not count, and are always accepted. ``Bodies`` lists the other exceptions.
    bodies_bytes: int = 256 * MIB
    bodies_per_client_bytes: int = 128 * MIB  # by key, else by address
    small_body_bytes: int = 64 * KIB
    keepalive_s: float = 75.0
    # A client that reads its answer too slowly for this time loses its permit: llama-server does not wait
    # for it, and most likely its slot is free.
    lag_s: float = 5.0
    send_stall_s: float = 60.0  # a client that reads nothing for this time counts as disconnected
    write_buffer_bytes: int = 64 * KIB  # above it the upstream is paused
    pipelined_bytes: int = 64 * KIB  # buffered while a request is in flight; above it the client is paused
    linger_s: float = 2.0  # after a refusal during the body, so that the client reads it before the reset
    # A body that need not be decoded is forwarded once this many bytes have arrived. A smaller body is
    # buffered: it takes one write, can be sent again, and no thread of llama-server waits for a slow client.
    # Only received bytes count, because a Content-Length costs a client nothing.
    stream_above_bytes: int = 64 * KIB
    # The part of a forwarded body that is kept for a second attempt (S10); a prompt of 128k tokens has half.
    replay_bytes: int = 1 * MIB
    # Forwarded bodies at one time; further bodies are buffered. Each holds a thread of llama-server, which
    # has four threads more than slots (b11434), so that one stays free for /health.
    uploads: int = 3
    # Of the API for batches: its uploads are forwarded to the disk, and never buffered in memory.
    file_bytes: int = 512 * MIB  # the largest, with the form around the file
    file_uploads: int = 8  # at one time; further ones are refused
    file_uploads_per_client: int = 4  # by key, else by address: one client leaves places to others
    file_upload_s: float = 3600.0  # from the first byte to the answer
    # A response of the model whose body makes no progress for this time is aborted: ten pings of
    # llama-server. Before the first byte there is no such limit, because the server works on the prompt.
    upstream_idle_s: float = 300.0
    # A server that closes a connection has most likely ended. For this time, its clients wait for the cause,
    # which is known once the process is reaped and its log is read to the end (about 0.1 s).
    cause_wait_s: float = 0.5
    connections: int = 16_384  # open at once, or fewer with fewer descriptors; an idle one takes 4 KiB
    connections_per_client: int = 1_024  # by address; a thousand streams of one client (P4), and a few more
    connect_s: float = 5.0
    sweep_s: float = 1.0

    def for_bodies(self, largest_bytes: int) -> Self:
        """Allow bodies of up to this size: two at a time of one client, and four of all clients."""
        return replace(
            self,
            body_bytes=largest_bytes,
            bodies_bytes=max(self.bodies_bytes, 4 * largest_bytes),
            bodies_per_client_bytes=max(self.bodies_per_client_bytes, 2 * largest_bytes),
        )


class RouterApi(Struct, frozen=True):
    """Serve llama.cpp's router API (docs/router.md). ``inference_keys``: to every client that may use a
    model, and not only to keys with the right ``control``. ``props``: /props without a model is about
    llamasup, even if there is a default model.
    """

    inference_keys: bool = False
    props: bool = False


class ProxyConfig(Struct, frozen=True):
    """``hosts``: names that the Host header may have, as well as local names, the bound address, and the name
    of this ``machine``.
    ``trusted_proxies``: the addresses of proxies whose X-Forwarded-For counts (``TrustedProxies``).
    ``origins``: web pages that may call, as ``https://name[:port]``. ``api_keys`` have the right
    ``inference``; ``key_file`` lists keys with their rights, and may change. ``open_paths``: exceptions from
    X7. ``route_by_model``: decode each body for its ``model``; otherwise large bodies are forwarded while
    they arrive. ``rules``: what llama-server checks instead of llamasup; with ``transparent`` it checks
    everything, and of the other settings only the limits apply. ``request_timeout_s``: the time for a
    request, from its last byte (or the start of its forwarding) to its answer's last; None: no limit.
    ``remote_media``: hosts from which llama-server may fetch media URLs (``allowed_media_host``).
    ``stream_keepalive_s``: the interval of SSE comments to a waiting stream; None: no comments.
    ``console``: serve the web console. ``holds_bodies``: forward no body while it arrives, because it may be
    repaired. ``router``: None closes the paths of this API.
    """

    hosts: tuple[str, ...] = ()
    machine: str = ""
    trusted_proxies: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    key_file: KeyFile | None = None
    open_paths: frozenset[str] = frozenset()
    route_by_model: bool = True
    rules: HeadRules = DEFAULT_RULES
    request_timeout_s: float | None = None
    stream_keepalive_s: float | None = None
    remote_media: tuple[str, ...] = ()
    console: bool = False
    holds_bodies: bool = False
    router: RouterApi | None = None
    limits: Limits = field(default_factory=Limits)
