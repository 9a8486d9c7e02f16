"""Binds the addresses to listen on. The error for an address in use names the process that has it."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from llamasup.core.system.native import native
from llamasup.errors import PortInUse, PortNotAllowed

_LOCK_WAIT_S = 5.0  # a process holds the lock for the time of a connect() and a bind()
_LOCK_FILE_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))
BACKLOG = 1024  # connects that arrive in one burst before the loop accepts them


def bind(host: str, port: int, *, reuse_port: bool = False, dual_stack: bool = False) -> list[socket.socket]:
    """Listening sockets for every address of ``host``. ``port`` 0: any free port, the same for all addresses.

    ``dual_stack``: an IPv6 socket accepts IPv4 as well, so that ``::`` is every address of the machine.

    Raises PortInUse, with the name of the process that has the port if it can be found, and PortNotAllowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise PortNotAllowed(
            f"{host!r} is not an address of this machine ({error})",
            remedy="use 127.0.0.1, or an address from `ip addr`",
        ) from error
    sockets: list[socket.socket] = []
    skipped: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:  # a kernel without IPv6
                skipped = error
                continue
            try:
                _listen(sock, (address[0], port, *address[2:]), reuse_port=reuse_port, dual_stack=dual_stack)
            except OSError as error:
                sock.close()
                if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                    skipped = error  # a name with the address ::1, while IPv6 is switched off
                    continue
                raise _bind_error(host, port, error) from error
            sockets.append(sock)
            port = sock.getsockname()[1]
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    if not sockets:
        raise _bind_error(host, port, skipped or OSError(errno.EADDRNOTAVAIL, "no such address"))
    return sockets


def bind_unix(path: str, mode: int = 0o600) -> socket.socket:
    """A listening Unix socket at ``path``. Replaces a stale socket file, on which no process listens.

    Raises PortInUse and PortNotAllowed.
    """
    file = Path(path)
    sock = native.unix_socket()
    try:
        with socket_lock(file):
            if _is_socket(file):
                _refuse_if_listening(path)
                file.unlink()
            elif os.path.lexists(file):
                raise PortNotAllowed(  # noqa: TRY301
                    f"cannot listen on {path}: a file that is not a socket has this path",
                    remedy="choose another path",
                )
            # bind() creates the file, which must never have wider permissions.
            previous = os.umask(0o777 & ~mode)
            try:
                sock.bind(path)
            finally:
                os.umask(previous)
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except (PortInUse, PortNotAllowed):
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise PortNotAllowed(
            f"cannot listen on {path} ({error.strerror or error})",
            remedy="choose a path of at most 107 bytes, in a folder that exists and that you may write to",
        ) from error
    return sock


@contextmanager
def socket_lock(path: Path) -> Iterator[None]:
    """Hold the lock for replacing or removing the socket file ``path``.

    Without the lock, another process could find the new socket stale between its bind() and its listen(), and
    replace it. Then both processes would believe that they own the address. The process that holds the lock
    removes the lock file. Where files cannot be locked (Windows, some network file systems), there is no such
    protection.

    Raises PortInUse if another process holds the lock for too long, PortNotAllowed if the lock file cannot be
    opened, OSError if the folder cannot be used.
    """
    lock = path.with_name(f".{path.name}.lock")
    fd = _acquire_lock(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before the unlock: a waiting process notices (see _acquire_lock)
        os.close(fd)


def _acquire_lock(lock: Path) -> int:
    until = monotonic() + _LOCK_WAIT_S
    while True:
        fd = _open_lock_file(lock)
        try:
            if not native.lock(fd):  # no locks on this file system
                return fd
            if _is_same_file(fd, lock):
                return fd
        except BlockingIOError:
            if monotonic() > until:
                os.close(fd)
                raise PortInUse(
                    f"another process has held the lock {str(lock)!r} for {_LOCK_WAIT_S:g} s",
                    remedy="stop that process, or choose another path",
                ) from None
            sleep(0.005)
        os.close(fd)


def _open_lock_file(lock: Path) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | _LOCK_FILE_FLAGS, 0o600)
    except OSError as error:
        if not os.path.lexists(lock):
            raise  # the folder is the problem
        raise PortNotAllowed(
            f"cannot open the lock file {str(lock)!r} of the socket ({error.strerror or error})",
            remedy="remove the lock file, or choose another path for the socket",
        ) from error


def _is_same_file(fd: int, path: Path) -> bool:
    """False if the process that held the lock has removed the lock file."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _listen(sock: socket.socket, address: tuple[object, ...], *, reuse_port: bool, dual_stack: bool) -> None:
    native.before_bind(sock, share=reuse_port)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual_stack else 1)
    sock.bind(address)
    sock.listen(BACKLOG)  # at once: two processes can bind the same port until one of them listens
    sock.setblocking(False)


def _bind_error(host: str, port: int, error: OSError) -> PortInUse | PortNotAllowed:
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        return PortInUse(
            f"port {port} on {host} is in use" + (f" by {holder}" if holder else ""),
            remedy="stop that process, or choose another port (--port 0 takes any free one)",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PortNotAllowed(f"permission denied for port {port} on {host}", remedy="use a port above 1023")
    return PortNotAllowed(
        f"cannot listen on {host}:{port} ({error.strerror or error})",
        remedy="use 127.0.0.1, or an address from `ip addr`",
    )


def _holder(port: int) -> str:
    """The process that listens on ``port``, as ``python (pid 123)``; empty if the system does not show it."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            local = connection.laddr
            if local and local.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def _is_socket(file: Path) -> bool:
    try:
        return stat.S_ISSOCK(file.lstat().st_mode)
    except OSError:
        return False


def _refuse_if_listening(path: str) -> None:
    with native.unix_socket() as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:  # its queue is full, or permission is denied: another process may own it
            pass
    raise PortInUse(f"another process listens on {path}", remedy="stop it, or choose another path")
