"""Network namespaces with a delay between them: Ray nodes of one machine that are as far apart as machines.

A process moves the frames: it holds the other end of a TAP device in each namespace, and passes each frame on
after the delay. (``tc qdisc … netem`` does this in the kernel, but few kernels of virtual machines have it.)
A namespace can also be cut off, as a machine that loses its power: nothing refuses a connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import TracebackType

__all__ = ["Network"]

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 16_000  # few frames, since Python moves each of them
_MAX_FRAME = 1 << 16
_EVERYONE = b"\xff" * 6


class Network:
    """``size`` namespaces, with the numbers 1 to ``size``. This process stays in its own, as number 0."""

    def __init__(self, size: int, delay_s: float) -> None:
        self._delay_s = delay_s
        pid = os.getpid()
        self._names = [f"llamasup-{pid}-{number}" for number in range(1, size + 1)]
        self._subnet = f"198.{18 + pid // 256 % 2}.{pid % 256}"  # of the networks for benchmarks (RFC 2544)
        self._stack = ExitStack()

    @staticmethod
    def problem() -> str:
        """Why there can be no network; empty if it can be."""
        if os.geteuid() != 0:
            return "namespaces need root"
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            return "this machine has no /dev/net/tun"
        return "" if _ip("netns", "list").returncode == 0 else "`ip netns` does not work"

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            for name in self._names:
                _must("netns", "add", name)
                stack.callback(_ip, "netns", "delete", name)
            command = [sys.executable, __file__, self._subnet, str(self._delay_s), *self._names]
            switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(_end, switch)
            assert switch.stdin is not None
            assert switch.stdout is not None
            assert switch.stdout.readline() == b"ready\n", "the switch ended"
            self._orders = switch.stdin
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address(self, number: int) -> str:
        return f"{self._subnet}.{number + 1}"

    @contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """This thread, and the processes that it starts, are in the namespace."""
        with Path("/proc/thread-self/ns/net").open("rb") as own:
            _enter(self._names[number - 1])
            try:
                yield
            finally:
                _set_namespace(own.fileno())

    def cut(self, number: int) -> None:
        """No frame reaches the namespace or comes from it any more."""
        self._order("cut", number)

    def join(self, number: int) -> None:
        self._order("join", number)

    def _order(self, order: str, number: int) -> None:
        self._orders.write(f"{order} {number}\n".encode())
        self._orders.flush()


def _ip(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    with suppress(FileNotFoundError):
        return subprocess.run(["ip", *arguments], capture_output=True, check=False)
    return subprocess.CompletedProcess(["ip"], 127, b"", b"ip is not installed")


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, (arguments, done.stderr)


def _end(switch: subprocess.Popen[bytes]) -> None:
    assert switch.stdin is not None
    assert switch.stdout is not None
    switch.stdin.close()
    switch.wait()
    switch.stdout.close()


def _enter(name: str) -> None:
    with Path("/run/netns", name).open("rb") as there:
        _set_namespace(there.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


# --- the process that moves the frames ----------------------------------------------------------------


class Switch:
    """Each port is the descriptor of a TAP device; its number is that of the namespace."""

    def __init__(self, ports: list[int], delay_s: float) -> None:
        self._ports = ports
        self._delay_s = delay_s
        self._known: dict[bytes, int] = {}
        """The port behind which a hardware address is."""
        self._cut: set[int] = set()
        self._moving: deque[tuple[float, int, bytes]] = deque()
        self._loop = asyncio.get_running_loop()
        for number, port in enumerate(ports):
            self._loop.add_reader(port, self._read, number)

    def order(self, order: str, number: int) -> None:
        (self._cut.add if order == "cut" else self._cut.discard)(number)

    def _read(self, number: int) -> None:
        with suppress(BlockingIOError):
            while frame := os.read(self._ports[number], _MAX_FRAME):
                target, source = frame[:6], frame[6:12]
                self._known[source] = number
                found = self._known.get(target)
                to = range(len(self._ports)) if found is None or target == _EVERYONE else (found,)
                if not self._moving:
                    self._loop.call_later(self._delay_s, self._deliver)
                due_s = monotonic() + self._delay_s
                self._moving.extend(
                    (due_s, port, frame) for port in to if port != number and not self._cut & {number, port}
                )

    def _deliver(self) -> None:
        while self._moving and self._moving[0][0] <= monotonic():
            _, port, frame = self._moving.popleft()
            with suppress(OSError):  # full, as a port of a real switch
                os.write(self._ports[port], frame)
        if self._moving:
            self._loop.call_later(self._moving[0][0] - monotonic(), self._deliver)


def _tap(name: str) -> int:
    import fcntl  # Windows has none, and collects the tests of this folder

    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


async def _switch(subnet: str, delay_s: float, names: list[str]) -> None:
    own_name = f"lsup{os.getpid()}"
    own = _tap(own_name)
    _must("address", "add", f"{subnet}.1/24", "dev", own_name)
    _must("link", "set", own_name, "mtu", str(_MTU), "up")
    ports = [own]
    for number, name in enumerate(names, 1):
        _enter(name)
        ports.append(_tap("eth0"))
        _must("link", "set", "lo", "up")
        _must("address", "add", f"{subnet}.{number + 1}/24", "dev", "eth0")
        _must("link", "set", "eth0", "mtu", str(_MTU), "up")
        _must("route", "add", "default", "via", f"{subnet}.1")
    switch = Switch(ports, delay_s)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    async for line in orders:
        order, cut_number = line.decode().split()
        switch.order(order, int(cut_number))


if __name__ == "__main__":
    asyncio.run(_switch(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
