"""Where clients come in: one address or several, Unix sockets, with TLS or without."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import SHUT_RDWR, socket

from llamasup.errors import PortInUse, PortNotAllowed
from llamasup.http.address import Address, TcpAddress, UnixAddress
from llamasup.proxy.bind import bind, bind_unix, lock_beside
from llamasup.proxy.tls import TlsContext
from llamasup.system.storage.folders import file_id

__all__ = ["ListenerSet", "listen"]


@dataclass(slots=True)
class ListenerSet:
    """Listening sockets and what they are called. Close it with ``close``, once."""

    address: Address
    """The first of them: what people are told."""
    sockets: list[socket]
    tls: TlsContext | None = None
    _files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    ours: bool = True
    """Bound by us. Others' go on to listen elsewhere when they are closed here: the service manager's."""

    def stop_listening(self) -> None:
        """Whoever connects is refused from now on, also where a forked process has the sockets too. Who reads
        from them has to stop before the loop's next round.
        """
        for each in self.sockets if self.ours else ():
            with suppress(OSError):  # closed already
                each.shutdown(SHUT_RDWR)

    def close(self) -> None:
        """Our own sockets leave no file behind; llama-server's do (b11434)."""
        self.stop_listening()
        for path, made in self._files.items():
            # The lock keeps other processes from replacing the file between the check and the removal. While
            # our socket is open, no other file can have its inode.
            with suppress(OSError, PortInUse, PortNotAllowed), lock_beside(path):
                if file_id(path) == made:
                    path.unlink(missing_ok=True)
        for each in self.sockets:
            each.close()


def listen(
    hosts: Sequence[str],
    port: int,
    *,
    reuse_port: bool = False,
    dual_stack: bool = False,
    tls: TlsContext | None = None,
) -> ListenerSet:
    """Take every address. ``hosts`` are names, addresses and paths that end in ``.sock``; all share ``port``.

    ``dual_stack``: where it is the only address, ``::`` takes IPv4 as well.

    Raises PortInUse and PortNotAllowed; then nothing is taken.
    """
    sockets: list[socket] = []
    files: dict[Path, tuple[int, int]] = {}
    addresses: list[Address] = []
    dual_stack = dual_stack and [host for host in hosts if not host.endswith(".sock")] == ["::"]
    try:
        for host in hosts:
            if host.endswith(".sock"):
                sockets.append(bind_unix(host, 0o777 & ~_umask()))
                made = file_id(Path(host).absolute())
                if made is not None:
                    files[Path(host).absolute()] = made
                addresses.append(UnixAddress(host))
            else:
                sockets += bind(host, port, reuse_port=reuse_port, dual_stack=dual_stack)
                port = sockets[-1].getsockname()[1]  # 0: all take the same
                addresses.append(TcpAddress(host, port, tls=tls is not None))
    except BaseException:
        ListenerSet(UnixAddress(""), sockets, None, files).close()
        raise
    first = next((each for each in addresses if isinstance(each, TcpAddress)), addresses[0])
    return ListenerSet(first, sockets, tls, files)


def _umask() -> int:
    """It can only be read by setting it; nothing else runs yet that makes files."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
