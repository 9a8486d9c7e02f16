"""Memory cgroups of our own, where this user may make one (v1, or a delegated v2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["in_group", "memory_group"]


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """A group without a limit yet; None where none can be made."""
    group = next(filter(None, map(_made_group, _group_folders())), None)
    try:
        yield group
    finally:
        if group is not None:
            with suppress(OSError):
                group.rmdir()


def in_group(group: Path, limit_bytes: int) -> list[str]:
    """Sets the limit of the group, and returns a program that runs another in it."""
    limit = _limit_file(group)
    assert limit is not None
    limit.write_text(str(limit_bytes))
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]


def _group_folders() -> list[Path]:
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup")
    return [root / "memory", root / own.get("", "/").lstrip("/")]


def _made_group(parent: Path) -> Path | None:
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
