"""This machine, the runtime, and starting processes: what measurements and tests under faults share."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

READY_LINE = b"listening on"
LLAMASUP = (sys.executable, "-P", "-m", "llamasup")


class Runtime(NamedTuple):
    """A runtime that llamasup found. ``path`` is ``embedded``, or the path of a llama-server."""

    name: str
    path: str


def runtime_for(model: Path, runtime: str | None) -> Runtime:
    """``runtime`` is as in llamasup."""
    words = ["plan", str(model), "--json", *(["--runtime", runtime] if runtime else [])]
    found = json.loads(subprocess.check_output([*LLAMASUP, *words]))["runtime"]
    if found["kind"] == "embedded":
        return Runtime(f"embedded {found['version'].partition(' ')[0]}", "embedded")
    return Runtime(f"llama-server {found['version']}", found["path"])


def machine() -> str:
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in cpu_lines if line.startswith("model name")), "")
    ram_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpus = len(os.sched_getaffinity(0))
    return f"{cpu or platform.machine()}, {cpus} CPUs, {ram_gib:.0f} GiB, {platform.system()}"


@contextmanager
def until_ready(
    *command: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Run a llamasup that prints events. Yields the process and its event ``ready``, and stops it then."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ready":
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended with {process.wait()}")
        # Unread events would fill the pipe; the later ones are not needed.
        os.set_blocking(process.stdout.fileno(), False)
        yield process, event
    finally:
        process.terminate()
        process.communicate(timeout=30)


def seconds_to_ready(plan: Mapping[str, Any]) -> float:
    """Time llama-server without llamasup, from exec to its ready line. ``plan``: ``llamasup plan --json``."""
    with tempfile.TemporaryDirectory() as folder:
        argv = list(plan["argv"])
        host = argv.index("--host") + 1
        if argv[host].endswith(".sock"):
            argv[host] = f"{folder}/s.sock"
        environment = {name: value for name, value in plan["env"].items() if value != "***"}
        environment["XDG_CONFIG_HOME"] = folder
        began = time.monotonic()
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        ) as process:
            assert process.stdout is not None
            assert any(READY_LINE in line for line in process.stdout), argv
            took_s = time.monotonic() - began
            process.kill()
        return took_s
