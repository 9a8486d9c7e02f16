"""What the proxy can be told. The defaults are the promises (X1–X9)."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamasup.auth.key_source import KeyFile
from llamasup.http.heads import DEFAULT_RULES, HeadRules

__all__ = ["STREAM_KEEPALIVE_S", "Limits", "ProxyConfig"]

MIB = 1 << 20
KIB = 1 << 10
STREAM_KEEPALIVE_S = 10.0  # what gives up a silent connection does so after half a minute, mostly


@dataclass(frozen=True, slots=True)
class Limits:
    """How much and how long one connection may ask of us (X8). A sweep every ``sweep_s`` keeps the times."""

    body_bytes: int = 32 * MIB
    head_bytes: int = 64 * KIB
    headers: int = 100
    head_s: float = 10.0  # from the first byte of a head to its end
    body_idle_s: float = 30.0
    # Minimum average rate per second after ``body_idle_s``: 32 MiB may take about half an hour.
    body_rate_bytes: int = 16 * KIB
    # All bodies that are being read, wait, or are kept for a retry; eight of the largest size. Bodies of at
    # most ``small_body_bytes`` do not count, and are always accepted. See ``Bodies`` for what else does not.
    bodies_bytes: int = 256 * MIB
    bodies_per_client_bytes: int = 128 * MIB  # by key, else by address
    small_body_bytes: int = 64 * KIB
    keepalive_s: float = 75.0
    # A client that takes its answer too slowly for so long gives its place among the concurrent ones away:
    # llama-server does not wait for it, and most likely its slot is free.
    lag_s: float = 5.0
    send_stall_s: float = 60.0  # a client that takes no byte at all for this long is gone
    write_buffer_bytes: int = 64 * KIB  # above it the upstream is paused
    pipelined_bytes: int = 64 * KIB  # held while a request is in flight; above it the client is paused
    linger_s: float = 2.0  # after a refusal in mid-body, so that the client reads it before the reset
    # A body that need not be read is sent on once this much of it is here. Below, it is read whole: it costs
    # one write, can be sent again, and no thread of llama-server's waits for a slow client. Most bodies come
    # in one read of this size or less. What Content-Length announces starts nothing: saying so costs nothing.
    stream_above_bytes: int = 64 * KIB
    # Of such a body: kept for a second try (S10). A prompt of 128k tokens is half of it.
    replay_bytes: int = 1 * MIB
    # Such bodies at a time; further ones are read whole. Each holds a thread of llama-server's, which has
    # four more than slots (b11434): one is left for /health, whatever clients do.
    uploads: int = 3
    # A response's body that does not go on for so long is broken off, where it is for the model to go on: ten
    # of llama-server's pings. Before its first byte there is no such limit: that is the prompt's time.
    upstream_idle_s: float = 300.0
    connections: int = 16_384  # open at once, and fewer where descriptors are fewer; an idle one takes 4 KiB
    connections_per_client: int = 1_024  # by address; a thousand streams of one client (P4), and some
    connect_s: float = 5.0
    sweep_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """``hosts``: names accepted in Host beside the loopback ones and the bound address. ``origins``: web
    pages that may call, as ``https://name[:port]``. ``api_keys`` may infer; ``key_file`` says what its keys
    may, and changes at any time. ``open_paths`` lifts X7 for these paths. ``route_by_model``: read ``model``
    in the body for the backend; else large bodies are sent on as they come. ``rules``: what is left for
    llama-server to judge. If all (``transparent``), the door stands open: of the rest here only the limits
    count. ``request_timeout_s``: what a request may take in all, from its last byte
    (or from when it was sent on, if that was before) to its answer's last; None: as long as it likes.
    ``remote_media``: hosts from which llama-server may fetch media URLs (``allowed_media_host``).
    ``stream_keepalive_s``: a stream that waits for so long gets SSE comments from then on; None: never.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    key_file: KeyFile | None = None
    open_paths: frozenset[str] = frozenset()
    route_by_model: bool = True
    rules: HeadRules = DEFAULT_RULES
    request_timeout_s: float | None = None
    stream_keepalive_s: float | None = None
    remote_media: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
