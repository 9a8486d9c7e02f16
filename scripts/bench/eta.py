"""Measure how good the estimated end of a load is: cold and warm cache, and a throttled disk.

Loads a generated model again and again, and reads the `progress` events as a parent program does. At half
time of each load, the remaining time of the last event, less the time since then, is compared with the real
one. A third of the loads follows earlier loads of the file, mostly of other kinds; a third follows one load
of another file of half the size; before the others, the state folder is empty. All kinds, with and without a
memory map, and the runtimes alternate. Each load waits until the CPU is idle. It is measured again if other
programs used the CPU meanwhile, because they change the time of the warm-up; `--disturbed` counts such loads,
too.

The disk is throttled by a cgroup (v1 `blkio`, or a delegated v2 `io.max`), to another speed for each load. An
*uneven* disk changes its speed once during the load. Without such a cgroup these loads are left out.

    python -m scripts.bench eta [--runtime PATH …] [--loads 30] [--size-mb 1500] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.menu import publish
from tests.kit.models import write_large_decoder

PAGE = "performance.md"
GOAL = 0.9  # of the loads
TOLERANCE = 0.2  # of the remaining time
KINDS = {
    "cold": "cold cache",
    "warm": "warm cache",
    "throttled": "throttled disk",
    "uneven": "uneven disk",
}
EARLIER = {"none": "none", "other": "another file", "known": "known"}
_SLOWEST_BYTES_S, _FASTEST_BYTES_S = 100e6, 250e6
"""Of a throttled disk. A faster one would not be limited by the cgroup but, now and then, by the machine."""
_MOST_OTHERS = 0.25
"""Cores. A load is measured again if other programs used more."""
_MOST_TRIES = 5


@dataclass(frozen=True, slots=True)
class Load:
    """``eta_s``: the announced remaining time at half time; None: none was announced. ``grew`` and ``fell``:
    how often the remaining time grew, and the percent fell, without a reason. ``others``: the cores that
    other programs used.
    """

    runtime: str
    kind: str
    earlier: str
    mapped: bool
    took_s: float
    eta_s: float | None
    grew: int
    fell: int
    others: float
    events: list[dict[str, Any]]

    @property
    def error(self) -> float:
        """Relative to the real remaining time."""
        half_s = self.took_s / 2
        return 1.0 if self.eta_s is None else abs(self.eta_s - half_s) / half_s

    @property
    def is_good(self) -> bool:
        return self.error <= TOLERANCE


def main(options: argparse.Namespace) -> None:
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the model and the cgroup
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, _throttle() as throttle:
        kinds = [kind for kind in options.kinds or KINDS if throttle or kind in ("cold", "warm")]
        model = write_large_decoder(Path(folder) / "model.gguf", options.size_mb << 20)
        _sync(model)
        other = write_large_decoder(Path(folder) / "other.gguf", options.size_mb << 19)
        loads = list(_loads(options, model, other, kinds, throttle))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(load) for load in loads], indent=2))
    about = f"{options.size_mb} MiB, {platform.machine()}, {os.cpu_count()} CPUs."
    publish(options, f"{about}\n\n{_table(loads)}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", action="append", help="may be given more than once")
    parser.add_argument("--loads", type=int, default=30, help="of each kind")
    parser.add_argument("--size-mb", type=int, default=1500, help="of the model")
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument("--disturbed", action="store_true", help="count every load")
    parser.add_argument("--folder", help="for the model, on a real disk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")


def _loads(
    options: argparse.Namespace, model: Path, other: Path, kinds: Sequence[str], throttle: Throttle | None
) -> Iterator[Load]:
    runtimes = options.runtime or [None]
    with tempfile.TemporaryDirectory() as known_state:
        for runtime in runtimes:  # so that each known load has an earlier one
            _load(model, runtime, "warm", "known", True, Path(known_state), throttle)
        for number in range(options.loads):
            earlier = list(EARLIER)[number % 3]
            mapped = number // 3 % 2 == 0
            runtime = runtimes[number // 6 % len(runtimes)]
            for kind in random.sample(kinds, len(kinds)):
                for _ in range(1 if options.disturbed else _MOST_TRIES):
                    with tempfile.TemporaryDirectory() as new_state:
                        state = Path(known_state if earlier == "known" else new_state)
                        if earlier == "other":
                            _load(other, runtime, "warm", earlier, mapped, state, throttle)
                        load = _load(model, runtime, kind, earlier, mapped, state, throttle)
                    if load.others <= _MOST_OTHERS:
                        break
                print(
                    f"{number + 1:3} {load.runtime:9} {earlier:6} {kind:10}"
                    f"{'mmap' if mapped else 'read'} {load.took_s:6.1f} s {load.error:5.0%}"
                    f" {load.others:5.2f}",
                    file=sys.stderr,
                    flush=True,
                )
                yield load


def _load(
    model: Path,
    runtime: str | None,
    kind: str,
    earlier: str,
    mapped: bool,
    state: Path,
    throttle: Throttle | None,
) -> Load:
    _wait_for_idle_cpu()
    if kind == "warm":
        _read(model)
    else:
        _drop(model)
    # 4 GiB of prompt cache and the like are not the subject: a small context, as for a small machine
    command = [sys.executable, "-m", "llamasup", "run", str(model), "--port", "0", "--events", "jsonl"]
    command += ["--ctx-size", "4096", "--parallel", "1", *(["--runtime", runtime] if runtime else [])]
    command += [] if mapped else ["--", "--load-mode", "none"]
    change: threading.Timer | None = None
    if kind in ("throttled", "uneven"):
        assert throttle is not None
        bytes_s = random.uniform(_SLOWEST_BYTES_S, _FASTEST_BYTES_S)
        throttle.limit(bytes_s)
        command = [*throttle.command, *command]
        if kind == "uneven":
            changed = bytes_s * random.choice([0.6, 1.6])
            change = threading.Timer(random.uniform(1.0, 3.0), throttle.limit, [changed])
            change.start()
    began_s, cpu_before_s = time.monotonic(), _cpu_of_others_s()
    process = subprocess.Popen(
        command,
        env=os.environ | {"XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            at_s = time.monotonic()
            if event["event"] == "state" and event["state"] == "starting":
                began_s = at_s
            elif event["event"] == "progress":
                events.append({"at_s": at_s - began_s, **event})
            elif event["event"] == "ready":
                break
        took_s = time.monotonic() - began_s
        time.sleep(0.2)  # llamasup saves the times of the load
    finally:
        if change is not None:
            change.cancel()
            change.join()
        if throttle is not None:
            throttle.limit(None)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    others = (_cpu_of_others_s() - cpu_before_s) / (time.monotonic() - began_s)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    name = "embedded" if runtime == "embedded" else "binary"
    before = [event for event in events if event["at_s"] <= took_s / 2 and event["eta_s"] is not None]
    eta_s = before[-1]["eta_s"] - (took_s / 2 - before[-1]["at_s"]) if before else None
    return Load(name, kind, earlier, mapped, took_s, eta_s, *_surprises(events), others, events)


def _surprises(events: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Count how often the remaining time grew, and the percent fell, without a reason."""
    grew = fell = 0
    for before, after in pairwise(events):
        if after["reason"] is None and None not in (before["eta_s"], after["eta_s"]):
            grew += after["eta_s"] > before["eta_s"]
            fell += after["percent"] < before["percent"]
    return grew, fell


def _table(loads: Sequence[Load]) -> str:
    rows = [
        "| Disk | Earlier loads | Median time | Within 20 % | Median error | Unexplained |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind, title in KINDS.items():
        for earlier, of in EARLIER.items():
            found = [load for load in loads if load.kind == kind and load.earlier == earlier]
            if not found:
                continue
            share = sum(load.is_good for load in found) / len(found)
            rows.append(
                f"| {title} | {of} "
                f"| {statistics.median(load.took_s for load in found):.1f} s "
                f"| {share:.0%}{'' if share >= GOAL else ' (missed)'} "
                f"| {statistics.median(load.error for load in found):.0%} "
                f"| {sum(load.grew + load.fell for load in found)} |"
            )
    return "\n".join(rows)


def _wait_for_idle_cpu() -> None:
    """Until it was nearly idle for a second, for 20 s at most."""
    until_s = time.monotonic() + 20.0
    while time.monotonic() < until_s:
        before = _cpu_times()
        time.sleep(1.0)
        total, idle = (after - first for after, first in zip(_cpu_times(), before, strict=True))
        if idle >= 0.8 * total:
            return


def _cpu_of_others_s() -> float:
    """Return the CPU seconds of this machine since its start, without the ended children of this process."""
    total, idle = _cpu_times()
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (total - idle) / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


def _cpu_times() -> tuple[int, int]:
    times = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]))
    return sum(times), times[3] + times[4]


# --- the page cache


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- the disk


@dataclass(frozen=True, slots=True)
class Throttle:
    """A cgroup whose processes read slowly from the disk of ``device`` ("254:0")."""

    group: Path
    device: str

    @property
    def works(self) -> bool:
        try:
            self.limit(None)
        except OSError:
            return False
        return True

    @property
    def command(self) -> list[str]:
        """Runs another command in the group."""
        return ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs; exec "$@"', "sh"]

    def limit(self, bytes_s: float | None) -> None:
        """Limit the reads; None removes the limit."""
        v1 = self.group / "blkio.throttle.read_bps_device"
        if v1.exists():
            v1.write_text(f"{self.device} {round(bytes_s or 0)}")
        else:
            rate = "max" if bytes_s is None else round(bytes_s)
            (self.group / "io.max").write_text(f"{self.device} rbps={rate}")


@contextmanager
def _throttle() -> Iterator[Throttle | None]:
    """None if this user cannot create such a cgroup."""
    device = _device(Path(tempfile.gettempdir()))
    for parent in (Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")):
        throttle = Throttle(parent / f"llamasup-bench-{os.getpid()}", device)
        try:
            throttle.group.mkdir()
        except OSError:
            continue
        try:
            yield throttle if throttle.works else None
        finally:
            throttle.group.rmdir()
        return
    yield None


def _device(folder: Path) -> str:
    """Return the number of the whole disk: a limit of a partition is not allowed."""
    number = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    disk = block.parent if (block / "partition").exists() else block
    return (disk / "dev").read_text().strip() if (disk / "dev").exists() else "0:0"
