"""Requests the models of one node repeatedly, and reports its answers and failures."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable

import httpx

from llamasup.core.http.address import TcpAddress
from llamasup.core.pool.catalog.v1_models import NodeListing, read_in_slices
from llamasup.errors import text_of, without_errno
from llamasup.features.peers.nodes import Peer, ProbePolicy, Trouble

_MAX_BYTES = 8 << 20  # 1000 models with 32 aliases have 0.4 MB
# Each piece (chunk) takes 40 µs: without a limit, those of one byte take all of the event loop.
_MAX_TINY_PIECES = 256
_PIECE_BYTES = 256
_MIN_PAUSE_S = 0.05  # between two probes, however often connections fail
_LATE_S = 0.25


def address_of(peer: Peer) -> TcpAddress:
    """Return where the node listens. Raises ValueError."""
    url = httpx.URL(peer.url)
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{peer.url!r} is not the URL of a node, such as https://desk.example.net:8080")
    tls = url.scheme == "https"
    return TcpAddress(url.host, url.port or (443 if tls else 80), tls=tls)


def tls_of(peer: Peer) -> ssl.SSLContext | None:
    """Make the context that verifies the certificate and the name of the node. Blocks for milliseconds."""
    if not peer.url.lower().startswith("https:"):
        return None
    return ssl.create_default_context(cadata=peer.ca or None)


class NodeWatch:
    """The watch of one node. ``sender`` is the id of this node. ``is_urgent``: whether a request waits for
    news of the node. The callbacks are called in the task of ``run``.
    """

    def __init__(
        self,
        peer: Peer,
        sender: str,
        policy: ProbePolicy,
        *,
        on_listing: Callable[[NodeListing], Awaitable[None]],
        on_trouble: Callable[[Trouble], None],
        is_urgent: Callable[[], bool],
    ) -> None:
        self.peer = peer
        self.tls: ssl.SSLContext | None = None
        """Set before the first call of ``on_listing``."""
        self._sender = sender
        self._policy = policy
        self._on_listing = on_listing
        self._on_trouble = on_trouble
        self._is_urgent = is_urgent
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """Probe at once, because a connection to the node failed or a request waits for it."""
        self._awake.set()

    async def run(self) -> None:
        self.tls = await asyncio.to_thread(tls_of, self.peer)
        headers = {"X-Llamasup-Node": self._sender, "Accept-Encoding": "identity"}
        if self.peer.key:
            headers["Authorization"] = f"Bearer {self.peer.key}"
        async with httpx.AsyncClient(
            base_url=self.peer.url,
            headers=headers,
            verify=self.tls or False,
            trust_env=False,
            timeout=None,  # noqa: S113 - _probe_once has one for the whole request
            limits=httpx.Limits(max_connections=2, keepalive_expiry=60.0),
        ) as client:
            while True:
                self._awake.clear()
                found = await self._probe(client)
                if isinstance(found, Trouble):
                    self._on_trouble(found)
                else:
                    await self._on_listing(found)
                await self._pause()

    async def _pause(self) -> None:
        policy = self._policy
        try:
            async with asyncio.timeout(policy.busy_interval_s if self._is_urgent() else policy.interval_s):
                await self._awake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_MIN_PAUSE_S)

    async def _probe(self, client: httpx.AsyncClient) -> NodeListing | Trouble:
        """Probe again if this process was stopped or blocked: the answer may have arrived in that time."""
        ends_s = time.monotonic() + self._policy.timeout_s
        found = await self._probe_once(client)
        was_stopped = isinstance(found, Trouble) and time.monotonic() > ends_s + _LATE_S
        return await self._probe_once(client) if was_stopped else found

    async def _probe_once(self, client: httpx.AsyncClient) -> NodeListing | Trouble:
        timeout_s = self._policy.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await _ask(client)
        except (httpx.ConnectTimeout, TimeoutError):
            return Trouble(f"no answer within {timeout_s:g} s", "check whether it is overloaded or suspended")
        except httpx.ConnectError as error:
            return _unconnected(error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Trouble(f"the connection broke ({text_of(error)})")


async def _ask(client: httpx.AsyncClient) -> NodeListing | Trouble:
    async with client.stream("GET", "/v1/models") as response:
        content, pieces = bytearray(), 0
        # Not decompressed, whatever the node sends: a kilobyte can become a gigabyte.
        async for piece in response.aiter_raw():
            content += piece
            pieces += 1
            if len(content) > _MAX_BYTES:
                return Trouble(f"its list of models has more than {_MAX_BYTES >> 20} MiB", final=True)
            if pieces > _MAX_TINY_PIECES + len(content) // _PIECE_BYTES:
                return Trouble("its list of models comes in too many pieces", final=True)
    if response.status_code in (401, 403):
        return Trouble(
            f"it does not accept our key ({response.status_code})",
            "create a key there with `llamasup key new NAME --rights inference,node`, and write it into the "
            "file of key_file here",
            final=True,
        )
    if not response.is_success:
        return Trouble(f"it answers {response.status_code}", "see its log")
    try:
        for listing in read_in_slices(bytes(content)):  # noqa: B007 - the last one
            await asyncio.sleep(0)
    except ValueError:
        return Trouble(
            "it does not answer like a llamasup node",
            "check its url, and that its llamasup is not older than this one",
            final=True,
        )
    return listing


def _unconnected(error: httpx.ConnectError) -> Trouble:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (ssl.SSLError, ConnectionRefusedError)):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Trouble(
            f"its certificate is not valid here: {cause.verify_message}",
            "set ca_file to the CA that signed it, and url to a name that it has",
            final=True,
        )
    if isinstance(cause, ssl.SSLError):
        return Trouble(
            "it does not speak TLS as expected", "check whether its url is http or https", final=True
        )
    if isinstance(cause, ConnectionRefusedError):
        return Trouble("nothing listens there", "start llamasup on that node", gone=True)
    return Trouble(f"no connection ({without_errno(str(error))})", "check its url and the network", gone=True)
