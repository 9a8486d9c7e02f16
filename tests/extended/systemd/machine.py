"""A real systemd for services, separate from the machine's own systemd and without traces in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from llamasup.features.systemd.systemctl import closed_to_others
from llamasup.features.systemd.unit_file import is_hidden
from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S

__all__ = ["INSIDE", "PATIENCE_S", "Machine", "boot", "reason_to_skip"]

INSIDE = Path("/run/test")
"""Where the work folder is seen from inside."""
_PREFIXES = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1]))
KEPT = tuple(dict.fromkeys([str(ROOT), *_PREFIXES]))
"""What a service of these tests runs: the project and its Python."""
POLL_INTERVAL_S = 0.05

# Services log into the work folder; there is no journal.
_LOGS = """[Service]
StandardOutput=append:/run/test/logs/%n
StandardError=append:/run/test/logs/%n
"""


def reason_to_skip() -> str | None:
    """Why no systemd can be booted here; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "root is needed to boot a systemd in namespaces of its own"
    for tool in ("unshare", "nsenter", "systemctl"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian: apt-get install systemd util-linux)"
    if not Path("/lib/systemd/systemd").exists():
        return "systemd is missing (Debian: apt-get install systemd)"
    done = subprocess.run(
        ["unshare", "--fork", "--pid", "--mount", "--cgroup", "mount", "-t", "cgroup2", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return f"namespaces with cgroups cannot be made: {done.stderr.strip()}"
    closed = closed_to_others(KEPT, [path for path in KEPT if is_hidden(path)])
    return f"a service's own user could not run this: {'; '.join(closed)}" if closed else None


class Machine:
    """A booted systemd, with commands run as root inside."""

    def __init__(self, work: Path, pid: int) -> None:
        self.work = work
        self._namespace = _link(Path(f"/proc/{pid}/ns/pid"))
        self._enter = ["nsenter", "-t", str(pid), "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--"]

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self._enter, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/root"},
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *arguments, check=check).stdout

    def llamasup(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-P", "-m", "llamasup", *arguments, check=check)

    def show(self, unit: str) -> Mapping[str, str]:
        lines = self.systemctl("show", unit).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def wait_until(self, unit: str, **expected: str) -> Mapping[str, str]:
        """Wait until systemd shows these values: a value, or a part of one after ``~``."""
        end = time.monotonic() + PATIENCE_S
        while True:
            seen = self.show(unit)
            if all(_matches(seen.get(name, ""), value) for name, value in expected.items()):
                return seen
            shown = {name: seen.get(name) for name in (*expected, "ActiveState", "StatusText", "Result")}
            assert time.monotonic() < end, f"{unit} is {shown}, not {expected}\n{self.logs()}"
            time.sleep(POLL_INTERVAL_S)

    def pids(self, unit: str) -> list[psutil.Process]:
        """The processes of a service, as seen from outside. Another test run may have a unit of this name."""
        return [
            process
            for process in psutil.process_iter()
            if f"/system.slice/{unit}" in _text(Path(f"/proc/{process.pid}/cgroup"))
            and _link(Path(f"/proc/{process.pid}/ns/pid")) == self._namespace
        ]

    def main(self, unit: str) -> psutil.Process:
        candidates = [
            process
            for process in self.pids(unit)
            if "-P" in (arguments := process.cmdline()) and ("run" in arguments or "serve" in arguments)
        ]
        # A child has its parent's command line until it executes its program.
        return min(candidates, key=lambda process: process.create_time())

    def write_unit(self, name: str, text: str) -> None:
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")"; cat > "$0"', f"/run/systemd/system/{name}")

    def add_drop_in(self, unit: str, text: str) -> None:
        """Settings on top of what the unit says, as ``systemctl edit`` makes them."""
        (self.work / "drop-in.conf").write_text(text)
        folder = f"/etc/systemd/system/{unit}.d"
        self.run("sh", "-c", f"mkdir -p {folder} && cp {INSIDE}/drop-in.conf {folder}/test.conf")
        self.systemctl("daemon-reload")

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in (self.work / "logs").iterdir())


@contextmanager
def boot(work: Path, *, cgroups: str = "v2") -> Iterator[Machine]:
    """``work`` is an empty folder that services may read and write."""
    units = work / "system"
    (units / "service.d").mkdir(parents=True)
    (work / "logs").mkdir()
    (units / "service.d/logs.conf").write_text(_LOGS)
    (units / "test.target").write_text("[Unit]\nDefaultDependencies=no\n")
    work.chmod(0o755)
    process = subprocess.Popen(
        ["bash", str(Path(__file__).with_name("boot.sh")), str(work), cgroups, *KEPT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout
    output_lines: list[str] = []
    reader = threading.Thread(target=lambda: output_lines.extend(output), daemon=True)
    reader.start()
    try:
        machine = Machine(work, _first_process(process))
        end = time.monotonic() + PATIENCE_S
        while machine.systemctl("is-system-running", check=False).strip() not in ("running", "degraded"):
            assert process.poll() is None, f"systemd ended: {output_lines}"
            assert time.monotonic() < end, "systemd does not come up"
            time.sleep(POLL_INTERVAL_S)
        yield machine
    finally:
        process.kill()  # --kill-child: PID 1 goes with it, and with that everything inside
        process.wait(PATIENCE_S)
        reader.join(PATIENCE_S)
        output.close()


def _first_process(unshare: subprocess.Popen[str]) -> int:
    """PID 1 of the new namespace, as numbered outside."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and unshare.poll() is None:
        for child in psutil.Process(unshare.pid).children():
            if child.name() == "systemd":
                return int(child.pid)
        time.sleep(POLL_INTERVAL_S)
    raise AssertionError(f"no systemd was started; exit code {unshare.poll()}")


def _matches(seen: str, expected: str) -> bool:
    return expected[1:] in seen if expected.startswith("~") else seen == expected


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
