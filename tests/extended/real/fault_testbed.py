"""A llamasup with a real server for one fault, and the outcome of this fault."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.driver import Llamasup, is_alive, llamasup
from tests.extended.real.fault_clients import Client, Ending
from tests.kit.models import write_large_decoder
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port
from tests.kit.runtimes import shell_command
from tests.real.remains import Remains, folders_of, remains_of

__all__ = [
    "PATIENCE_S",
    "FaultRun",
    "FaultTestbed",
    "Outcome",
    "fault_run",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one fault. Times in seconds from the fault."""

    endings: Sequence[Ending]
    """Of each client."""
    detected_s: float | None = None
    """Until llamasup reported the exit or the hang."""
    restart_in_s: float = 0.0
    """The total backoff of all restarts (S2)."""
    serves_s: float | None = None
    """Until the next generation had produced a token; None if no generation was needed or possible."""
    late_s: float | None = None
    """Until the requests sent after the fault had the first byte of their answers."""
    gone_s: float | None = None
    """Until no process and no file was left, if the fault ends llamasup itself."""
    left: Remains = ()
    cause: str = ""
    detail: Sequence[str] = ()
    """What each client received, to explain a failure."""

    def count(self, ending: Ending) -> int:
        return list(self.endings).count(ending)


@dataclass(slots=True)
class FaultTestbed:
    """Runs the faults with one runtime. ``home`` contains the folders of llamasup."""

    runtime: str
    home: Path
    tiny: Path
    _large: Path | None = None
    _number: int = field(default=0)

    @property
    def large(self) -> Path:
        """A model of 100 MB. A prompt of 1,800 tokens takes seconds of one core."""
        if self._large is None:
            self._large = write_large_decoder(self.home / "large.gguf", 100_000_000, quantization="F16")
        return self._large

    @property
    def next_folder(self) -> Path:
        """The folder of the next run."""
        return self.home / str(self._number + 1)

    def new_folder(self) -> Path:
        """A folder for one run, with a path that is short enough for sockets."""
        path = self.next_folder
        self._number += 1
        path.mkdir(exist_ok=True)
        return path

    @property
    def executable(self) -> str:
        """The command of the runtime, quoted for a shell."""
        return shell_command(self.runtime)


class FaultRun:
    """A running llamasup, its server, and its clients at the time of the fault."""

    def __init__(self, running: Llamasup, home: Path, ready_file: Path, port: int) -> None:
        self.running = running
        self.home = home
        self.ready_file = ready_file
        self.url = f"http://127.0.0.1:{port}"
        self.clients: list[Client] = []
        self.injected_s = 0.0

    def wait_until_ready(self, generation: int = 1) -> None:
        self.running.wait_for("state", state="ready", generation=generation)

    def server(self) -> psutil.Process:
        """The process that serves: behind a wrapper, the last process with an address."""
        while True:
            found = [child for child in self.running.children() if "--host" in _command_line(child)]
            if found and "exec_child" not in " ".join(_command_line(found[-1])):
                return found[-1]
            assert self.running.process.poll() is None, self.running.stderr_text

    def send_request(self, **body: Any) -> Client:
        client = Client(self.url, {"prompt": "Once", "temperature": 0, "ignore_eos": True, **body})
        self.clients.append(client)
        return client

    def start_streams(self, count: int, n_predict: int) -> None:
        """Start ``count`` streams and wait for the first bytes."""
        streams = [self.send_request(stream=True, n_predict=n_predict) for _ in range(count)]
        assert all(client.wait_for_body() for client in streams)

    def start_prompts(self, count: int) -> None:
        """Start ``count`` streams, and wait until the server computes the first prompt, which is a batch of
        its own and takes seconds. Then suspend the server: it does not finish the batch before the fault.
        """
        server, before = self.server(), self.in_flight()
        began_cpu_s = _cpu_s(server)
        for number in range(count):
            words = 45 if number else 360
            self.send_request(stream=True, n_predict=2, prompt=f"{number} " + "hello " * words)
            if number == 0:
                eventually(lambda: _cpu_s(server) - began_cpu_s > 0.1)
                server.suspend()  # the others may take a while to arrive
        eventually(lambda: self.in_flight() - before == count)
        server.resume()
        eventually(lambda: _cpu_s(server) - began_cpu_s > 0.2)
        server.suspend()
        assert not any(client.has_response for client in self.clients[-count:])

    def start_waiting_requests(self, count: int, server: psutil.Process) -> None:
        """Start ``count`` requests that get no byte: the server is suspended until the fault."""
        before = self.in_flight()
        server.suspend()
        for _ in range(count):
            self.send_request(n_predict=100)
        eventually(lambda: self.in_flight() - before == count)

    def in_flight(self) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = re.search(r"^llamasup_in_flight\{.*\} ([\d.]+)$", text, re.M)
        return float(found[1]) if found else 0.0

    def inject(self, how: Callable[[], object]) -> None:
        how()
        self.injected_s = time.monotonic()

    def outcome(self) -> Outcome:
        """Wait until llamasup serves again and all clients have ended. Then stop it and list what is left."""
        exited = self.running.wait_for("exit")
        detected_s = time.monotonic() - self.injected_s
        self.running.wait_for_ready_after(1)
        serves_s = time.monotonic() - self.injected_s
        endings = [client.ending() for client in self.clients]
        late_s = [
            one_client.first_byte_s - self.injected_s
            for one_client in self.clients
            if one_client.began_s >= self.injected_s
        ]
        left = (*self._duplicates(), *self.stop())
        exits = [event for event in self.running.events if event["event"] == "exit"]
        return Outcome(
            endings,
            detected_s=detected_s,
            restart_in_s=sum(event["restart_in_s"] or 0.0 for event in exits),
            serves_s=serves_s,
            late_s=max(late_s, default=None),
            left=left,
            cause=exited["cause"],
            detail=[str(client) for client in self.clients],
        )

    def outcome_without_restart(self) -> Outcome:
        """The outcome of a fault that needs no restart."""
        endings = [client.ending() for client in self.clients]
        restarts = [event for event in self.running.events if event["event"] == "exit"]
        left = (*(f"{len(restarts)} restarts" for _ in restarts[:1]), *self._duplicates(), *self.stop())
        return Outcome(endings, left=left, detail=[str(client) for client in self.clients])

    def outcome_of_end(self) -> Outcome:
        """The outcome of a fault that ends llamasup or its parent."""
        while processes := remains_of(self.home, self.ready_file):
            assert time.monotonic() - self.injected_s < PATIENCE_S, processes
            time.sleep(0.005)
        gone_s = time.monotonic() - self.injected_s
        endings = [client.ending() for client in self.clients]
        return Outcome(endings, gone_s=gone_s, detail=[str(client) for client in self.clients])

    def stop(self) -> Remains:
        code = self.running.stop()
        left = remains_of(self.home, self.ready_file)
        return left if code == 0 else (*left, f"exit code {code}")

    def _duplicates(self) -> Remains:
        """Sockets, records and processes of an earlier generation."""
        run = self.home / "run" / "llamasup"
        sockets = [str(path) for path in run.glob("*/[0-9]*.sock")]
        records = [str(path) for path in run.glob("*/child-*.json")]
        servers = [child for child in self.running.children() if is_alive(child)]
        roots = [one_server for one_server in servers if one_server.ppid() == self.running.pid]
        left = [*sockets[1:], *records[1:]]
        return tuple(left) if len(roots) <= 1 else (*left, *(f"process {root.pid}" for root in roots))


@contextmanager
def fault_run(
    testbed: FaultTestbed, model: Path, *arguments: str, runtime: str = "", **options: Any
) -> Iterator[FaultRun]:
    """``llamasup run MODEL`` in its own folders. Clients may connect before it is ready."""
    home = testbed.new_folder()
    ready_file = home / "ready.json"
    port = free_port()
    with llamasup(
        model,
        *("--runtime", runtime or testbed.runtime, "--port", str(port), "--ready-file", str(ready_file)),
        *arguments,
        env=os.environ | folders_of(home),
        **options,
    ) as running:
        yield FaultRun(running, home, ready_file, port)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
