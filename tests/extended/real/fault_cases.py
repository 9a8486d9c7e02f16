"""The faults of the matrix (docs/measurements.md), injected into a real llama-server under ``llamasup run``.

A case injects one fault and returns its outcome. The tests and scripts/chaos/faults.py judge the outcome.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.e2e.driver import adopted, command
from tests.extended.real.fault_testbed import FaultRun, FaultTestbed, Outcome, fault_run
from tests.extended.real.memory_group import in_group, memory_group
from tests.kit.models import write_large_decoder
from tests.real.remains import folders_of

__all__ = ["CASES", "Case", "UnsupportedFault"]

MIB = 1 << 20
SLOTS = ("--ctx-size", "4096", "--parallel", "10")
ENDLESS = -1
"""Tokens of a stream that a fault cuts. It does not end by itself, because the context is shifted."""
SHIFT = ("--", "--context-shift")
LONG_ANSWER = 3000
"""Tokens of a stream that ends by itself, after at least 0.2 s."""
BINARY, EMBEDDED = ("binary",), ("embedded",)


class UnsupportedFault(Exception):
    """This machine does not allow the fault. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[FaultTestbed], Outcome]
    ends_llamasup: bool = False
    """llamasup itself ends: it answers no more requests, and no process or file may be left."""
    slow: bool = False
    runtimes: Sequence[str] = (*BINARY, *EMBEDDED)
    """The runtimes of the tests: one of them if the outcome does not depend on the runtime."""


# --- the server ends -------------------------------------------------------------------------------------


def idle(testbed: FaultTestbed, number: signal.Signals = signal.SIGKILL) -> Outcome:
    with fault_run(testbed, testbed.tiny, *SLOTS) as run:
        run.wait_until_ready()
        server = run.server()
        run.inject(lambda: server.send_signal(number))
        run.send_request(n_predict=1)
        return run.outcome()


def during_load(testbed: FaultTestbed) -> Outcome:
    """Three requests wait already, two of them streams."""
    with fault_run(testbed, testbed.large, "--ctx-size", "4096") as run:
        run.running.wait_for("state", state="starting")
        server = run.server()
        for stream in (True, True, False):
            run.send_request(n_predict=1, stream=stream)
        run.inject(server.kill)
        return run.outcome()


def in_prefill(testbed: FaultTestbed, clients: int) -> Outcome:
    with fault_run(testbed, testbed.large, "--ctx-size", "8192", "--parallel", "8", "--threads", "1") as run:
        run.wait_until_ready()
        run.in_flight()  # the first request for metrics takes longer: it loads the control application
        run.start_prompts(clients)
        run.inject(run.server().kill)
        return run.outcome()


def in_stream(
    testbed: FaultTestbed, clients: int, waiting: int = 0, number: signal.Signals = signal.SIGKILL
) -> Outcome:
    """``waiting``: the number of other requests, without a stream, that have received no byte."""
    with fault_run(testbed, testbed.tiny, *SLOTS, *SHIFT) as run:
        run.wait_until_ready()
        run.in_flight()  # the first request for metrics takes longer: it loads the control application
        run.start_streams(clients, ENDLESS)
        server = run.server()
        run.start_waiting_requests(waiting, server)

        def end() -> None:
            server.send_signal(number)
            if number is not signal.SIGKILL:
                server.resume()

        run.inject(end)
        return run.outcome()


def exit_1(testbed: FaultTestbed) -> Outcome:
    """A script that runs the server exits with 1 and leaves the server running."""
    wrapper = testbed.new_folder() / "llama-server"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--model*) ;; *) exec {testbed.executable} "$@" ;; esac\n'
        "trap 'exit 1' USR1\n"
        f'{testbed.executable} "$@" &\n'
        "wait\n"
    )
    wrapper.chmod(0o755)
    with fault_run(testbed, testbed.tiny, *SLOTS, *SHIFT, runtime=str(wrapper)) as run:
        run.wait_until_ready()
        run.in_flight()
        run.start_streams(1, ENDLESS)
        run.start_waiting_requests(1, run.server())
        script = next(child for child in run.running.children() if child.ppid() == run.running.pid)
        run.inject(lambda: script.send_signal(signal.SIGUSR1))
        return run.outcome()


# --- the server hangs or cannot be reached ---------------------------------------------------------------


def suspended(testbed: FaultTestbed) -> Outcome:
    with fault_run(testbed, testbed.tiny, *SLOTS, *SHIFT) as run:
        run.wait_until_ready()
        run.in_flight()
        run.start_streams(1, ENDLESS)
        server = run.server()
        run.start_waiting_requests(1, server)
        run.inject(server.suspend)
        run.send_request(n_predict=1)
        return run.outcome()


def without_socket(testbed: FaultTestbed) -> Outcome:
    with fault_run(testbed, testbed.tiny, *SLOTS) as run:
        run.wait_until_ready()
        (path,) = (run.home / "run" / "llamasup").glob("*/[0-9]*.sock")
        run.inject(path.unlink)
        for _ in range(3):
            run.send_request(n_predict=1)
        return run.outcome()


# --- memory and disk -------------------------------------------------------------------------------------


def memory_at_load(testbed: FaultTestbed) -> Outcome:
    """The plan needs more memory than the group's limit, and the memory check is off."""
    large = testbed.home / "fat.gguf"
    if not large.exists():
        write_large_decoder(large, 300_000_000, head_count_kv=16, quantization="F16")
    with (
        _group() as group,
        fault_run(testbed, large, "--no-memory-check", prefix=in_group(group, 1000 * MIB)) as run,
    ):
        run.running.wait_for("state", state="starting")
        run.inject(lambda: None)
        run.send_request(n_predict=1)
        return run.outcome()


def memory_while_serving(testbed: FaultTestbed) -> Outcome:
    """A process in the same group uses up the memory. The kernel kills the largest process, the server."""
    with _group() as group, fault_run(
        testbed, testbed.large, "--ctx-size", "32768", "--parallel", "4", "--kv-type", "f16",
        prefix=in_group(group, 4000 * MIB),
    ) as run:  # fmt: skip
        run.wait_until_ready()
        run.send_request(n_predict=1).ending()
        # Enough for the same plan again, but not for the other process too.
        prefix = in_group(group, _anonymous_bytes(run) + 350 * MIB)
        neighbour = subprocess.Popen(
            [*prefix, sys.executable, "-c", _MEMORY_HOG, "450"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        run.running.wait_for("exit")
        run.inject(neighbour.kill)
        neighbour.communicate()
        run.send_request(n_predict=1)
        return run.outcome()


_MEMORY_HOG = """
import sys
taken = []
for _ in range(int(sys.argv[1])):
    taken.append(b"x" * (1 << 20))
sys.stdin.read()
"""


def _anonymous_bytes(run: FaultRun) -> int:
    status = Path(f"/proc/{run.server().pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@contextmanager
def _group() -> Iterator[Path]:
    with memory_group() as group:
        if group is None:
            raise UnsupportedFault("no memory cgroup can be made here")
        yield group


def full_disk(testbed: FaultTestbed) -> Outcome:
    """64 KiB for logs and state, and a server with a verbose log."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        raise UnsupportedFault("a small disk needs root and unshare")
    state = testbed.next_folder / "state"
    script = 'mount -t tmpfs -o size=64k,mode=700 tmpfs "$0" && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(state)]
    state.mkdir(parents=True)
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        raise UnsupportedFault("this machine allows no mount")
    with fault_run(testbed, testbed.tiny, *SLOTS, "--", "-lv", "5", prefix=prefix) as run:
        run.wait_until_ready()
        for _ in range(20):
            run.send_request(n_predict=20, stream=True).ending()
        assert "No space left on device" in run.running.stderr_text
        run.inject(run.server().kill)
        run.send_request(n_predict=1)
        return run.outcome()


# --- another process ends --------------------------------------------------------------------------------


def neighbour(testbed: FaultTestbed) -> Outcome:
    """S17: the server of another model dies while this one streams."""
    with fault_run(testbed, testbed.tiny, *SLOTS) as run, fault_run(testbed, testbed.tiny, *SLOTS) as other:
        for one_run in (run, other):
            one_run.wait_until_ready()
        run.start_streams(2, LONG_ANSWER)
        other.inject(other.server().kill)
        other.send_request(n_predict=1)
        other_left = other.outcome().left
        seen = run.outcome_without_restart()
        assert not other_left, other_left
        return seen


def supervisor(testbed: FaultTestbed) -> Outcome:
    with fault_run(testbed, testbed.tiny, *SLOTS, *SHIFT) as run:
        run.wait_until_ready()
        run.running.wait_for("ready")
        run.start_streams(1, ENDLESS)
        run.inject(run.running.process.kill)
        return run.outcome_of_end()


_PARENT = """
import os, subprocess, sys
argv = [word.replace("PARENT", str(os.getpid())) for word in sys.argv[2:]]
subprocess.Popen(argv, stdin=subprocess.PIPE if sys.argv[1] == "pipe" else subprocess.DEVNULL).wait()
"""


def parent(testbed: FaultTestbed, tie: str) -> Outcome:
    """``tie``: how llamasup notices the end of its parent, by a pipe or by a process ID."""
    home = testbed.new_folder()
    ready_file = home / "ready.json"
    words = ["--sidecar"] if tie == "pipe" else ["--events", "jsonl", "--port", "0", "--parent-pid", "PARENT"]
    words = ["--runtime", testbed.runtime, "--ready-file", str(ready_file), *words]
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT, tie, *command("run", str(testbed.tiny), *words, *SHIFT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | folders_of(home),
    )
    with adopted(process) as running:
        run = FaultRun(running, home, ready_file, int(running.wait_for("ready")["port"]))
        run.start_streams(1, ENDLESS)
        run.inject(process.kill)
        return run.outcome_of_end()


# --- all of them -----------------------------------------------------------------------------------------

CASES = (
    Case("SIGKILL, idle", idle),
    Case("SIGKILL, during load, 3 clients wait", during_load),
    Case("SIGKILL, in prefill, 1 client", partial(in_prefill, clients=1), runtimes=EMBEDDED),
    Case("SIGKILL, in prefill, 8 clients", partial(in_prefill, clients=8), slow=True, runtimes=BINARY),
    Case("SIGKILL, in mid-stream, 1 client", partial(in_stream, clients=1), runtimes=BINARY),
    Case("SIGKILL, in mid-stream, 8 clients", partial(in_stream, clients=8), runtimes=EMBEDDED),
    Case("SIGKILL, 4 in mid-stream, 4 before their first byte", partial(in_stream, clients=4, waiting=4)),
    Case("SIGABRT, 1 in mid-stream, 1 before its first byte",
         partial(in_stream, clients=1, waiting=1, number=signal.SIGABRT)),
    Case("exit 1, 1 in mid-stream, 1 before its first byte", exit_1),
    Case("SIGSTOP, 1 in mid-stream, 2 before their first byte", suspended, slow=True),
    Case("socket file removed", without_socket, slow=True, runtimes=BINARY),
    Case("memory limit hit at load (cgroup)", memory_at_load, slow=True),
    Case("memory limit hit while serving (cgroup)", memory_while_serving, slow=True),
    Case("disk full under the logs, then SIGKILL", full_disk, runtimes=BINARY),
    Case("SIGKILL of another model's server", neighbour, runtimes=EMBEDDED),
    Case("llamasup SIGKILLed, 1 in mid-stream", supervisor, ends_llamasup=True),
    Case("parent SIGKILLed (--sidecar), 1 in mid-stream", partial(parent, tie="pipe"), ends_llamasup=True,
         runtimes=BINARY),
    Case("parent SIGKILLed (--parent-pid), 1 in mid-stream", partial(parent, tie="pid"), ends_llamasup=True,
         runtimes=EMBEDDED),
)  # fmt: skip
