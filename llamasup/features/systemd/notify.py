"""Reads systemd's variables for a service: the notification socket, the watchdog interval, open sockets.

Each is read once and removed from the environment, so that children do not use them. Written to sd_notify(3),
sd_watchdog_enabled(3) and sd_listen_fds(3); libsystemd is not needed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import MutableMapping

from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.errors import ConfigInvalid

__all__ = ["Notifier", "Systemd", "take_sockets", "take_systemd"]

_log = logging.getLogger(__name__)

FIRST_FD = 3  # SD_LISTEN_FDS_START
_FAMILIES = ("AF_INET", "AF_INET6", "AF_UNIX")
_MAX_UNSENT = 16  # a start, a reload and a stop together send fewer


class Notifier:
    """Sends to ``$NOTIFY_SOCKET``; a name that begins with ``@`` is abstract. Never raises, never waits."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._unsent: deque[bytes] = deque(maxlen=_MAX_UNSENT)

    def send(self, *assignments: str, keep: bool = True) -> None:
        """Send one datagram. ``keep``: if systemd's queue is full, the next ``send`` tries it again first."""
        message = "\n".join(assignments).encode("utf-8", "replace")
        while self._unsent:
            if not self._sent(self._unsent[0]):
                if keep:
                    self._unsent.append(message)
                return
            self._unsent.popleft()
        if not self._sent(message) and keep:
            self._unsent.append(message)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _sent(self, message: bytes) -> bool:
        """False if it can be retried."""
        try:
            if self._socket is None:
                self._socket = native.datagram_socket()
                self._socket.setblocking(False)
            self._socket.sendto(message, self._address)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            _log.debug("cannot notify systemd: %s", error)
        return True


class Systemd(Struct, frozen=True):
    """The service manager that started us with Type=notify."""

    notifier: Notifier
    watchdog_s: float | None
    """systemd kills the service if no heartbeat comes for this long."""


def take_systemd(environ: MutableMapping[str, str]) -> Systemd | None:
    """Return systemd, if it expects notifications. Removes the variables."""
    address = environ.pop("NOTIFY_SOCKET", "")
    interval = environ.pop("WATCHDOG_USEC", "")
    wanted_of = environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")) or not native.has_unix_sockets:
        return None  # vsock: is for the init system of a virtual machine
    watchdog_s = None
    if interval.isdecimal() and int(interval) > 0 and wanted_of in ("", str(os.getpid())):
        watchdog_s = int(interval) / 1e6
    return Systemd(Notifier(address), watchdog_s)


def take_sockets(environ: MutableMapping[str, str]) -> tuple[socket.socket, ...]:
    """Return the listening sockets of a .socket unit, TCP and Unix, if there is one. Removes the variables.

    Raises ConfigInvalid for a socket of another kind, and closes the others.
    """
    count, wanted_of = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdecimal() or wanted_of != str(os.getpid()):
        return ()
    with contextlib.ExitStack() as opened:
        sockets = []
        for offset in range(int(count)):
            name = names[offset] if offset < len(names) and names[offset] else "unknown"
            sock = opened.enter_context(_listening(FIRST_FD + offset, name))
            sockets.append(sock)
        opened.pop_all()
    return tuple(sockets)


def _listening(fd: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise _unusable_socket(fd, name, error.strerror or str(error)) from error
    # A family that Python does not know is a number.
    if getattr(sock.family, "name", "") not in _FAMILIES or sock.type != socket.SOCK_STREAM:
        reason = "it is not a stream socket"
    elif not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        reason = "it does not listen for connections"
    else:
        sock.set_inheritable(False)
        sock.setblocking(False)
        return sock
    sock.close()
    raise _unusable_socket(fd, name, reason)


def _unusable_socket(fd: int, name: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"Socket {name!r} (descriptor {fd}) from systemd cannot be used: {reason}.",
        remedy="In its .socket unit use ListenStream=ADDRESS:PORT or ListenStream=/PATH, and Accept=no.",
    )
