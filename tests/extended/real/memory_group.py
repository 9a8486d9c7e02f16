"""Memory cgroups for tests, if this user may create one (v1, or a delegated v2)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["in_group", "memory_group"]

_BALLAST_BYTES = 128 << 20
_BALLAST = """
import sys
taken = b"x" * int(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """A group without a limit; None if this user cannot create one.

    The memory of a killed process counts until the kernel has freed it. If llamasup needs a page meanwhile,
    the kernel kills a second process of the group (Linux 6.18, on a busy machine 0.1 s after the first). The
    ballast is larger than llamasup, so it is the second.
    """
    group = next(filter(None, map(_create_group, _group_folders())), None)
    if group is None:
        yield None
        return
    command = [*_enter_group_command(group), sys.executable, "-c", _BALLAST, str(_BALLAST_BYTES)]
    ballast = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert ballast.stdout is not None
        assert ballast.stdout.readline() == b"ready\n"
        yield group
    finally:
        ballast.kill()
        ballast.communicate()
        with suppress(OSError):
            group.rmdir()


def in_group(group: Path, limit_bytes: int) -> list[str]:
    """Sets the limit of the group without its ballast. Returns a program that runs another in the group."""
    limit = _limit_file(group)
    assert limit is not None
    limit.write_text(str(limit_bytes + _BALLAST_BYTES))
    return _enter_group_command(group)


def _enter_group_command(group: Path) -> list[str]:
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]


def _group_folders() -> list[Path]:
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup")
    return [root / "memory", root / own.get("", "/").lstrip("/")]


def _create_group(parent: Path) -> Path | None:
    group = parent / f"llamasup-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    if _limit_file(group) is None:
        group.rmdir()
        return None
    return group


def _limit_file(group: Path) -> Path | None:
    files = [group / name for name in ("memory.limit_in_bytes", "memory.max")]
    return next((file for file in files if file.exists() and os.access(file, os.W_OK)), None)
