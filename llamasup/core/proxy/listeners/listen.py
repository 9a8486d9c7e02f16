"""Opens the listeners: addresses and Unix sockets, with or without TLS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import SHUT_RDWR, socket

from msgspec import Struct, field

from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.proxy.listeners.bind import bind, bind_unix, socket_lock
from llamasup.core.proxy.listeners.tls import TlsContext
from llamasup.core.system.storage.folders import device_and_inode
from llamasup.errors import PortInUse, PortNotAllowed


class ListenerSet(Struct):
    """Listening sockets and their addresses. Close it with ``close``, once."""

    address: Address
    """The first address: shown to users."""
    sockets: list[socket]
    tls: TlsContext | None = None
    _files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    ours: bool = True
    """Whether llamasup bound them. Sockets of a service manager continue to listen in its process."""

    def stop_listening(self) -> None:
        """Refuse new connections, even if a forked process has the sockets. Code that accepts from them must
        stop before the next round of the loop.
        """
        for sock in self.sockets if self.ours else ():
            with suppress(OSError):  # closed already
                sock.shutdown(SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets, and remove their files."""
        self.stop_listening()
        for path, made in self._files.items():
            # The lock keeps other processes from replacing the file between the check and the removal. While
            # our socket is open, no other file can have its inode.
            with suppress(OSError, PortInUse, PortNotAllowed), socket_lock(path):
                if device_and_inode(path) == made:
                    path.unlink(missing_ok=True)
        for sock in self.sockets:
            sock.close()


def listen(
    hosts: Sequence[str],
    port: int,
    *,
    reuse_port: bool = False,
    dual_stack: bool = False,
    tls: TlsContext | None = None,
) -> ListenerSet:
    """Bind every address. ``hosts``: names, addresses, and paths that end in ``.sock``; all share ``port``.

    ``dual_stack``: ``::`` accepts IPv4 as well if it is the only address.

    Raises PortInUse and PortNotAllowed; then no socket stays open.
    """
    sockets: list[socket] = []
    files: dict[Path, tuple[int, int]] = {}
    addresses: list[Address] = []
    dual_stack = dual_stack and [host for host in hosts if not host.endswith(".sock")] == ["::"]
    try:
        for host in hosts:
            if host.endswith(".sock"):
                sockets.append(bind_unix(host, 0o777 & ~_umask()))
                made = device_and_inode(Path(host).absolute())
                if made is not None:
                    files[Path(host).absolute()] = made
                addresses.append(UnixAddress(host))
            else:
                sockets += bind(host, port, reuse_port=reuse_port, dual_stack=dual_stack)
                port = sockets[-1].getsockname()[1]  # if 0, the other addresses get the same port
                addresses.append(TcpAddress(host, port, tls=tls is not None))
    except BaseException:
        ListenerSet(UnixAddress(""), sockets, None, files).close()
        raise
    first = next((address for address in addresses if isinstance(address, TcpAddress)), addresses[0])
    return ListenerSet(first, sockets, tls, files)


def _umask() -> int:
    """The umask can be read only by setting it. No other thread creates files at this time."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
