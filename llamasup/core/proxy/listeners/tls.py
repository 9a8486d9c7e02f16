"""TLS with the standard library: loads the certificate, reloads it when it changes, does the handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from llamasup.core.http.certificate import MAX_PEM_BYTES, Validity, validity_of
from llamasup.core.http.heads import HttpError
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.connections import TOO_MANY, host_of
from llamasup.core.proxy.context import ProxyContext
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.proxy.listeners.bind import BACKLOG
from llamasup.core.system.event_loops import AcceptWatch
from llamasup.core.system.storage.folders import read_bounded
from llamasup.core.system.storage.paths import irregular_file, why_unusable
from llamasup.errors import ConfigInvalid

__all__ = ["RENEW", "SecureListener", "TlsContext", "read_validity"]

_log = logging.getLogger("llamasup.proxy")

_ACCEPT_PAUSE_S = 1.0  # as asyncio's servers
RENEW = "Renew it and replace the file. llamasup reads it again at the next handshake, without a restart."


class TlsContext:
    """The key and certificate for handshakes. Reloads changed files: the next handshake uses the new ones.

    ``when_warned`` receives message and remedy if the certificate's dates are a problem; None: log them.
    Raises ConfigInvalid for files without a usable key and certificate.
    """

    def __init__(self, key_file: str, cert_file: str) -> None:
        self.when_warned: Callable[[str, str], None] | None = None
        self._key_file = key_file
        self._cert_file = cert_file
        self._known = _identity(key_file, cert_file)
        self._current = _load(key_file, cert_file)
        self._validity = read_validity(cert_file)
        self._last_problem = ""  # of the dates: reported once, not at every handshake

    def current(self) -> ssl.SSLContext:
        """The context for the next handshake. Checks the files, and the dates of the certificate.

        Called before the handshake, not in ``sni_callback``: with that callback, Python decodes the server
        name of the client, and prints a traceback for a name that is not ASCII.
        """
        found = _identity(self._key_file, self._cert_file)
        if found != self._known:
            self._known = found  # an unusable file is reported once, not at every handshake
            try:
                self._current = _load(self._key_file, self._cert_file)
            except ConfigInvalid as error:
                _log.warning("%s Keeping the previous certificate.", error.message)
            else:
                _log.info("the certificate %r has changed; new connections use it", self._cert_file)
                self._validity = read_validity(self._cert_file)
                self._last_problem = ""
        self._check_dates()
        return self._current

    def _check_dates(self) -> None:
        problem = self._validity.problem(datetime.now(UTC)) if self._validity is not None else ""
        if problem == self._last_problem:
            return
        self._last_problem = problem
        if not problem:
            return
        message, remedy = f"The certificate {self._cert_file!r} {problem}.", RENEW
        if self.when_warned is not None:
            self.when_warned(message, remedy)
        else:
            _log.warning("%s %s", message, remedy)


def read_validity(cert_file: str) -> Validity | None:
    """The validity dates of the first certificate of a file; None if it cannot be read."""
    try:
        content, _ = read_bounded(Path(cert_file), MAX_PEM_BYTES)
    except OSError:
        return None
    return validity_of(content.decode("latin-1"))


def _load(key_file: str, cert_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if (irregular := irregular_file(key_file, cert_file)) is not None:
        raise ConfigInvalid(
            f"TLS cannot be served with {irregular!r}: it is not a regular file.",
            remedy="Give the path of a regular PEM file. llamasup reads it again when it changes.",
        )
    try:
        # Without a password, OpenSSL would ask for it at the terminal. A service has none.
        context.load_cert_chain(cert_file, key_file, password="")
    except OSError as error:
        raise ConfigInvalid(
            f"TLS cannot be served with the certificate {cert_file!r} and the key {key_file!r}: "
            f"{why_unusable(error, key_file, cert_file)}.",
            remedy="Give a PEM certificate, followed by its chain, and its unencrypted PEM key.",
        ) from error
    return context


def _identity(*files: str) -> list[tuple[int, int, int] | None]:
    return [_file_identity(Path(file)) for file in files]


def _file_identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class SecureListener:
    """Accepts clients, and starts their TLS handshakes.

    ``create_server`` of asyncio reports a TLS connection only after its handshake, and never reports a failed
    one, but each connection must count from its first moment. Only the handshake runs in a task: it happens
    once for a connection, and takes a millisecond of computing.
    """

    def __init__(
        self, proxy: ProxyContext, access: AccessPolicy, listening: socket.socket, context: TlsContext
    ) -> None:
        self._proxy = proxy
        self._access = access
        self._listening = listening
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        context.current()  # reports a problem of the dates at the start
        self._listen()

    def close(self) -> None:
        """Close the socket as well, as a server of asyncio does."""
        if self._pause is not None:
            self._pause.cancel()
        self._incoming.close()
        self._listening.close()

    def _listen(self) -> None:
        self._incoming = AcceptWatch(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory left: an immediate retry would fail as well
                _log.warning("cannot accept connections: %s", error.strerror)
                self._incoming.close()
                self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            Handshake(self._proxy, self._access, accepted, host_of(address)).begin(self._context.current())


class Handshake:
    """A connection until its handshake is done."""

    def __init__(
        self, proxy: ProxyContext, access: AccessPolicy, accepted: socket.socket, client: str
    ) -> None:
        self.proxy = proxy
        self.access = access
        self._accepted = accepted
        self._client = client

    def begin(self, context: ssl.SSLContext) -> None:
        self._accepted.setblocking(False)
        try:
            client = "" if self._client in self.access.proxies else self._client
            refusal = self.proxy.on_connect(self, client, unauthenticated=self.access.needs_key)
        except ConnectionAbortedError:
            refusal = TOO_MANY
        if refusal is None:
            self.proxy.tasks.start(self._shake_hands(context), "a TLS handshake")
        else:  # before the handshake, no answer can be sent
            self._accepted.close()
            self.proxy.on_disconnect(self)

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        limits = self.proxy.limits
        # Not TLS, an unsupported version, a disconnect, or a timeout.
        with contextlib.suppress(OSError):
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: SecureDownstream(self),
                    self._accepted,
                    ssl=context,
                    ssl_handshake_timeout=limits.head_s,
                    ssl_shutdown_timeout=limits.linger_s,
                )
            finally:
                self.proxy.on_disconnect(self)

    # --- among the connections

    def close_if_idle(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Shut the socket down: the event loop, which owns it, then ends the handshake."""
        with contextlib.suppress(OSError):  # the client has disconnected
            self._accepted.shutdown(socket.SHUT_RDWR)

    def sweep(self, now: float) -> None:
        """Nothing to check: the handshake has its own timeout."""

    def live(self, now: float) -> None:
        """No request yet."""

    def held_slots(self) -> None:
        """No request yet."""

    def waits_since(self) -> float:
        return 0.0

    def interrupt(self, error: HttpError, outcome: str) -> None:
        """No request yet."""


class SecureDownstream(Downstream):
    """A connection after its handshake. It replaces the ``Handshake`` among the connections."""

    def __init__(self, handshake: Handshake) -> None:
        super().__init__(handshake.proxy, handshake.access)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.proxy.on_disconnect(self._handshake)
        super().connection_made(transport)
