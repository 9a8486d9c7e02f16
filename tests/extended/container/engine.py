"""The image of packaging/Containerfile, built with podman, and containers of it without a network.

Its base is ``$LLAMASUP_TEST_BASE``, an image that podman has or can pull; or a Debian that debootstrap makes.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S, eventually

__all__ = ["KEY", "PYTHON", "Container", "image", "reason_to_skip", "started"]

KEY = "secret"
PYTHON = "/opt/llamasup/bin/python"
_WORK = ROOT / ".build" / "container"
_PODMAN = ["podman", "--root", str(_WORK / "storage"), "--runroot", "/run/llamasup-test-containers"]
_MOST = 4096
_LIMITS = [  # podman would raise them, which root may not do on each machine
    f"--ulimit={name}={min(most, _MOST)}:{min(most, _MOST)}"
    for name, (_, most) in (
        ("nofile", resource.getrlimit(resource.RLIMIT_NOFILE)),
        ("nproc", resource.getrlimit(resource.RLIMIT_NPROC)),
    )
    if most != resource.RLIM_INFINITY
]
_REQUEST = """
import json, sys, urllib.request
body = json.loads(sys.argv[1])
headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
url = "http://127.0.0.1:8080/v1/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    for line in answer:
        print(line.decode(), end="", flush=True)
"""


def reason_to_skip() -> str | None:
    """Why no container can be run here; None if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "root is needed, as containers get limits of memory here"
    missing = [tool for tool in ("podman", *_base_tools()) if shutil.which(tool) is None]
    return (
        f"missing: {' '.join(missing)} (Debian: apt-get install podman runc debootstrap)" if missing else None
    )


def _base_tools() -> list[str]:
    return [] if os.environ.get("LLAMASUP_TEST_BASE") else ["debootstrap"]


def image() -> str:
    """Build the image, once if nothing changes, and return its name."""
    _WORK.mkdir(parents=True, exist_ok=True)
    with (_WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        base = os.environ.get("LLAMASUP_TEST_BASE") or _debian()
        certificates = os.environ.get("SSL_CERT_FILE", "")
        own = [f"--build-arg={name}={certificates}" for name in ("PIP_CERT", "SSL_CERT_FILE") if certificates]
        if certificates:  # of a proxy of this machine
            own += ["--volume", f"{certificates}:{certificates}:ro"]
        _podman(
            *("build", "--isolation=chroot", "--network=host", "--format=docker", "--layers", *own),
            *(f"--build-arg={name}={base}" for name in ("BASE", "SERVER_BASE")),
            *("--file=packaging/Containerfile", "--tag=llamasup-test", "."),
        )
        # What earlier trees left.
        _podman("image", "prune", "--force", "--filter=until=48h", check=False)
    return "localhost/llamasup-test"


def _debian() -> str:
    """Make a base image with the Python of this Debian."""
    name = "localhost/debian-with-python"
    if _podman("image", "exists", name, check=False).returncode != 0:
        lines = Path("/etc/os-release").read_text("utf-8").splitlines()
        release = dict(line.split("=", 1) for line in lines if "=" in line)
        tree = _WORK / "debian"
        shutil.rmtree(tree, ignore_errors=True)
        packages = "--include=ca-certificates,python3,python3-venv"
        suite = release["VERSION_CODENAME"]
        _run(["debootstrap", "--variant=minbase", packages, suite, str(tree)], timeout_s=600)
        _run(["tar", "-C", str(tree), "-cf", str(_WORK / "debian.tar"), "."])
        _podman("import", str(_WORK / "debian.tar"), name)
        shutil.rmtree(tree)
        (_WORK / "debian.tar").unlink()
    return name


class Container:
    """A container of the image."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, *words: str) -> list[str]:
        return [*_podman_command(), "exec", self.name, *words]

    def run(self, *words: str, check: bool = True) -> str:
        return _run(self.command(*words), check=check).stdout

    def request(self, **body: Any) -> subprocess.Popen[str]:
        """Send a chat request from inside; the output is the answer."""
        told = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], **body}
        command = self.command("python3", "-c", _REQUEST, json.dumps(told))
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def answer(self) -> str:
        output, errors = self.request(max_tokens=8).communicate(timeout=PATIENCE_S)
        assert output, f"{errors}\n{self.logs()}"
        return str(json.loads(output)["choices"][0]["message"]["content"])

    def is_healthy(self) -> bool:
        return _podman("healthcheck", "run", self.name, check=False).returncode == 0

    def wait_until_healthy(self) -> None:
        eventually(lambda: self.is_healthy() or not self.is_running(), "health", every_s=0.5)
        assert self.is_running(), self.logs()

    def is_running(self) -> bool:
        return bool(self.state()["Running"])

    def state(self) -> Mapping[str, Any]:
        (found,) = json.loads(_podman("inspect", self.name).stdout)
        return dict(found["State"])

    def stop(self) -> int:
        _podman("stop", "--time=60", self.name)
        return int(self.state()["ExitCode"])

    def wait(self) -> int:
        return int(_podman("wait", self.name).stdout)

    def logs(self) -> str:
        done = _podman("logs", self.name, check=False)
        return done.stdout + done.stderr

    def processes(self) -> list[tuple[int, str, str]]:
        """Return (pid, state, command line) of the processes inside."""
        script = (
            "for p in /proc/[0-9]*; do echo $(basename $p)"
            " $(sed 's/.*) //; s/ .*//' $p/stat) $(tr '\\0' ' ' <$p/cmdline); done"
        )
        lines = [line.split(maxsplit=2) for line in self.run("sh", "-c", script).splitlines()]
        return [(int(words[0]), words[1], (words[2:] or [""])[0]) for words in lines if len(words) > 1]


@contextmanager
def started(
    models: Path, *options: str, key: str | None = KEY, command: Sequence[str] = ()
) -> Iterator[Container]:
    name = f"llamasup-test-{uuid.uuid4().hex[:12]}"
    environment = [] if key is None else ["--env", f"LLAMASUP_API_KEY={key}"]
    mounts = ["--volume", f"{models}:/models:ro"]
    words = [*_LIMITS, "--network=none", *environment, *mounts, *options, "localhost/llamasup-test", *command]
    try:
        _podman("run", "--detach", "--name", name, *words)
        yield Container(name)
    finally:
        _podman("rm", "--force", "--time=0", "--volumes", name, check=False)


def _podman_command() -> list[str]:
    runtime = ["--runtime", "runc"] if shutil.which("runc") else []  # crun needs cgroups v2 alone
    return [*_PODMAN, "--cgroup-manager=cgroupfs", *runtime]


def _podman(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return _run([*_podman_command(), *words], check=check, timeout_s=1200)


def _run(
    command: Sequence[str], *, check: bool = True, timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert not check or done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done
