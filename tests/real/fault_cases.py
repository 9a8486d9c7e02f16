"""The faults of the matrix (docs/reliability.md): each is done to a real llama-server under ``llamasup run``.

A case hurts something at a certain moment, and returns what came of it. It judges nothing.
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

from llamasup.testing.models import write_large_decoder
from tests.e2e.driver import adopted, command
from tests.real.fault_bench import Bench, Outcome, Patient, patient
from tests.real.memory_group import in_group, memory_group
from tests.real.remains import folders_of

__all__ = ["CASES", "Case", "Impossible"]

MIB = 1 << 20
SLOTS = ("--ctx-size", "4096", "--parallel", "10")
ENDLESS = -1
"""Tokens of a stream that is to be cut: it runs until then, for old context makes room for new."""
SHIFT = ("--", "--context-shift")
A_WHILE = 3000
"""Tokens of a stream that has to end by itself: 0.2 s at least."""
BINARY, EMBEDDED = ("binary",), ("embedded",)


class Impossible(Exception):
    """This machine does not allow the fault; says why."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[Bench], Outcome]
    ends_us: bool = False
    """llamasup itself ends: no request is answered any more, and no process or file may be left."""
    slow: bool = False
    runtimes: Sequence[str] = (*BINARY, *EMBEDDED)
    """Those the tests run it with. One where the kind of llama-server makes no difference to the outcome."""


# --- the server ends -------------------------------------------------------------------------------------


def idle(bench: Bench, number: signal.Signals = signal.SIGKILL) -> Outcome:
    with patient(bench, bench.tiny, *SLOTS) as it:
        it.ready()
        server = it.server()
        it.hurt(lambda: server.send_signal(number))
        it.ask(n_predict=1)
        return it.outcome()


def during_load(bench: Bench) -> Outcome:
    """Three requests are there already, two of them streams."""
    with patient(bench, bench.large, "--ctx-size", "4096") as it:
        it.running.wait_for("state", state="starting")
        server = it.server()
        for stream in (True, True, False):
            it.ask(n_predict=1, stream=stream)
        it.hurt(server.kill)
        return it.outcome()


def in_prefill(bench: Bench, clients: int) -> Outcome:
    with patient(bench, bench.large, "--ctx-size", "4096", "--parallel", "8", "--threads", "1") as it:
        it.ready()
        it.in_flight()  # the first look takes longer: the control application is loaded for it
        it.prompts(clients, words=360 // clients)
        it.hurt(it.server().kill)
        return it.outcome()


def in_stream(
    bench: Bench, clients: int, waiting: int = 0, number: signal.Signals = signal.SIGKILL
) -> Outcome:
    """``waiting``: so many more have no byte yet, since they asked for the whole answer at once."""
    with patient(bench, bench.tiny, *SLOTS, *SHIFT) as it:
        it.ready()
        it.in_flight()  # the first look takes longer: the control application is loaded for it
        it.stream(clients, ENDLESS)
        server = it.server()
        it.wait_plainly(waiting, server)

        def end() -> None:
            server.send_signal(number)
            if number is not signal.SIGKILL:
                server.resume()

        it.hurt(end)
        return it.outcome()


def exit_1(bench: Bench) -> Outcome:
    """A script around the server ends with 1, and does not end the server."""
    wrapper = bench.place() / "llama-server"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--model*) ;; *) exec {bench.executable} "$@" ;; esac\n'
        "trap 'exit 1' USR1\n"
        f'{bench.executable} "$@" &\n'
        "wait\n"
    )
    wrapper.chmod(0o755)
    with patient(bench, bench.tiny, *SLOTS, *SHIFT, runtime=str(wrapper)) as it:
        it.ready()
        it.in_flight()
        it.stream(1, ENDLESS)
        it.wait_plainly(1, it.server())
        script = next(child for child in it.running.children() if child.ppid() == it.running.pid)
        it.hurt(lambda: script.send_signal(signal.SIGUSR1))
        return it.outcome()


# --- the server is of no use any more --------------------------------------------------------------------


def stopped(bench: Bench) -> Outcome:
    with patient(bench, bench.tiny, *SLOTS, *SHIFT) as it:
        it.ready()
        it.in_flight()
        it.stream(1, ENDLESS)
        server = it.server()
        it.wait_plainly(1, server)
        it.hurt(server.suspend)
        it.ask(n_predict=1)
        return it.outcome()


def without_socket(bench: Bench) -> Outcome:
    with patient(bench, bench.tiny, *SLOTS) as it:
        it.ready()
        (path,) = (it.home / "run" / "llamasup").glob("*/[0-9]*.sock")
        it.hurt(path.unlink)
        for _ in range(3):
            it.ask(n_predict=1)
        return it.outcome()


# --- memory and disk -------------------------------------------------------------------------------------


def memory_at_load(bench: Bench) -> Outcome:
    """More than the group may have is asked for, and the check that would have refused it is off."""
    fat = bench.home / "fat.gguf"
    if not fat.exists():
        write_large_decoder(fat, 300_000_000, head_count_kv=16)
    with (
        _group() as group,
        patient(bench, fat, "--no-memory-check", prefix=in_group(group, 1000 * MIB)) as it,
    ):
        it.running.wait_for("state", state="starting")
        it.hurt(lambda: None)
        it.ask(n_predict=1)
        return it.outcome()


def memory_while_serving(bench: Bench) -> Outcome:
    """A neighbour in the same group takes what there is: the kernel ends the largest, which is the server."""
    with _group() as group, patient(
        bench, bench.large, "--ctx-size", "32768", "--parallel", "4", "--kv-type", "f16",
        prefix=in_group(group, 4000 * MIB),
    ) as it:  # fmt: skip
        it.ready()
        it.ask(n_predict=1).ending()
        # Room for the same plan again, but not for what the neighbour wants as well.
        prefix = in_group(group, _anonymous_bytes(it) + 350 * MIB)
        neighbour = subprocess.Popen(
            [*prefix, sys.executable, "-c", _GREED, "450"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        it.running.wait_for("exit")
        it.hurt(neighbour.kill)
        neighbour.communicate()
        it.ask(n_predict=1)
        return it.outcome()


_GREED = """
import sys
taken = []
for _ in range(int(sys.argv[1])):
    taken.append(b"x" * (1 << 20))
sys.stdin.read()
"""


def _anonymous_bytes(it: Patient) -> int:
    status = Path(f"/proc/{it.server().pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@contextmanager
def _group() -> Iterator[Path]:
    with memory_group() as group:
        if group is None:
            raise Impossible("no memory cgroup can be made here")
        yield group


def full_disk(bench: Bench) -> Outcome:
    """64 KiB for logs and state, and a server that logs every request at length."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        raise Impossible("a small disk needs root and unshare")
    state = bench.next_place / "state"
    script = 'mount -t tmpfs -o size=64k,mode=700 tmpfs "$0" && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(state)]
    state.mkdir(parents=True)
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        raise Impossible("this machine allows no mount")
    with patient(bench, bench.tiny, *SLOTS, "--", "-lv", "5", prefix=prefix) as it:
        it.ready()
        for _ in range(20):
            it.ask(n_predict=20, stream=True).ending()
        assert "No space left on device" in it.running.said
        it.hurt(it.server().kill)
        it.ask(n_predict=1)
        return it.outcome()


# --- somebody else ends ----------------------------------------------------------------------------------


def neighbour(bench: Bench) -> Outcome:
    """S17: the server of another model dies while this one streams."""
    with patient(bench, bench.tiny, *SLOTS) as it, patient(bench, bench.tiny, *SLOTS) as other:
        for each in (it, other):
            each.ready()
        it.stream(2, A_WHILE)
        other.hurt(other.server().kill)
        other.ask(n_predict=1)
        other_left = other.outcome().left
        seen = it.undisturbed()
        assert not other_left, other_left
        return seen


def supervisor(bench: Bench) -> Outcome:
    with patient(bench, bench.tiny, *SLOTS, *SHIFT) as it:
        it.ready()
        it.running.wait_for("ready")
        it.stream(1, ENDLESS)
        it.hurt(it.running.process.kill)
        return it.ended()


_PARENT = """
import os, subprocess, sys
argv = [word.replace("PARENT", str(os.getpid())) for word in sys.argv[2:]]
subprocess.Popen(argv, stdin=subprocess.PIPE if sys.argv[1] == "pipe" else subprocess.DEVNULL).wait()
"""


def parent(bench: Bench, tie: str) -> Outcome:
    """``tie``: what holds llamasup to its parent, a pipe or a process number."""
    home = bench.place()
    ready_file = home / "ready.json"
    words = ["--sidecar"] if tie == "pipe" else ["--events", "jsonl", "--port", "0", "--parent-pid", "PARENT"]
    words = ["--runtime", bench.runtime, "--ready-file", str(ready_file), *words]
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT, tie, *command("run", str(bench.tiny), *words, *SHIFT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | folders_of(home),
    )
    with adopted(process) as running:
        it = Patient(running, home, ready_file, int(running.wait_for("ready")["port"]))
        it.stream(1, ENDLESS)
        it.hurt(process.kill)
        return it.ended()


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
    Case("SIGSTOP, 1 in mid-stream, 2 before their first byte", stopped, slow=True),
    Case("socket file removed", without_socket, slow=True, runtimes=BINARY),
    Case("memory limit hit at load (cgroup)", memory_at_load, slow=True),
    Case("memory limit hit while serving (cgroup)", memory_while_serving, slow=True),
    Case("disk full under the logs, then SIGKILL", full_disk, runtimes=BINARY),
    Case("SIGKILL of another model's server", neighbour, runtimes=EMBEDDED),
    Case("llamasup SIGKILLed, 1 in mid-stream", supervisor, ends_us=True),
    Case("parent SIGKILLed (--sidecar), 1 in mid-stream", partial(parent, tie="pipe"), ends_us=True,
         runtimes=BINARY),
    Case("parent SIGKILLed (--parent-pid), 1 in mid-stream", partial(parent, tie="pid"), ends_us=True,
         runtimes=EMBEDDED),
)  # fmt: skip
