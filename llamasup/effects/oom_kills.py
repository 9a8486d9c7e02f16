"""How often the kernel's out-of-memory killer has struck: a SIGKILL leaves no other trace in the child."""

from __future__ import annotations

import re
from pathlib import Path

from llamasup.core.hardware import cgroup_files
from llamasup.effects.system_text import system_text

__all__ = ["oom_kills"]

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(root: Path = Path("/")) -> int:
    """A count that only grows; 0 where the system has none. ``root`` is for tests.

    Of our own cgroup where it counts (v2 ``memory.events``, v1 ``memory.oom_control`` since 4.13), else of
    the whole system (``/proc/vmstat``). A child is in its parent's group, unless somebody moved it.
    """
    own = root / "proc/self"
    files = cgroup_files(system_text(own / "cgroup"), system_text(own / "mountinfo"))
    groups = dict.fromkeys(Path(name).parent for name in files if Path(name).name.startswith("memory."))
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            if found := _COUNT.search(system_text(root / str(group).lstrip("/") / name)):
                return int(found[1])
    found = _COUNT.search(system_text(root / "proc/vmstat"))
    return int(found[1]) if found else 0
