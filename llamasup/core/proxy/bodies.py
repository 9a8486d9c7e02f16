"""Counts the bytes of large request bodies that the proxy holds, in total and for each client.

A body is held while it is read, while its request waits, and while it is kept for a retry. Small bodies are
not counted, so that large ones cannot keep them out. The number of connections bounds them. Of a body that
arrives in several reads, the last one is not counted (256 KiB at most), nor is what a forwarded body holds
before it is complete (``Limits.replay_bytes`` and one read, for each of ``Limits.uploads``).
"""

from __future__ import annotations

from llamasup.core.http.heads import HttpError
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import Limits

_RETRY_S = 1.0  # the time until other requests release their bodies is unknown


class Bodies:
    """Counts received bytes, not announced ones, because a Content-Length costs a client nothing."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_client: dict[str, int] = {}
        self.held_bytes = 0
        # Since memory was last returned to the system:
        self._freed_bytes = 0
        self._peak_bytes = 0

    def hold(self, request: Request, length: int | None, *, size: int | None = None) -> HttpError | None:
        """Count the received part of a body, or return the refusal. ``length``: the announced length.
        ``size``: the bytes to count, if these are not the received ones.
        """
        limits, client = self._limits, request.client
        size = request.body_bytes if size is None else size
        more = size - request.held_bytes
        if size <= limits.small_body_bytes or more <= 0:
            return None
        # A body that cannot be held completely is refused at its beginning. Later only received bytes count.
        needed = more if request.held_bytes else max(more, length or 0)
        of_client = self._by_client.get(client, 0)
        if of_client + needed > limits.bodies_per_client_bytes:
            return HttpError(
                429,
                f"This client's request bodies hold {of_client >> 20} MiB of memory; "
                f"{limits.bodies_per_client_bytes >> 20} MiB is the limit",
                "rate_limit_error",
                "client_bodies_limit",
                "send fewer large requests at one time",
                _RETRY_S,
                close=True,
            )
        if self.held_bytes + needed > limits.bodies_bytes:
            return HttpError(
                503,
                f"Request bodies hold {self.held_bytes >> 20} MiB of memory; "
                f"{limits.bodies_bytes >> 20} MiB is the limit",
                "unavailable_error",
                "bodies_limit",
                "try again shortly",
                _RETRY_S,
                close=True,
            )
        self.held_bytes += more
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        self._by_client[client] = of_client + more
        request.held_bytes += more
        return None

    def drop(self, request: Request) -> None:
        """Release the body of ``request``. May be repeated."""
        size, request.held_bytes = request.held_bytes, 0
        if not size:
            return
        self.held_bytes -= size
        self._freed_bytes += size
        remaining = self._by_client[request.client] - size
        if remaining:
            self._by_client[request.client] = remaining
        else:
            del self._by_client[request.client]

    def may_return_memory(self) -> bool:
        """Whether at most half of the peak is still held. A ``True`` begins the next peak.

        Under a steady flow of bodies, new bodies use the memory that others have freed.
        """
        if self._freed_bytes < self._limits.body_bytes or 2 * self.held_bytes > self._peak_bytes:
            return False
        self._freed_bytes = 0
        self._peak_bytes = self.held_bytes
        return True
