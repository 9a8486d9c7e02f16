"""Run folders whose llamasup has ended without removing them: killed, or the machine lost power.

Only looks: what is found belongs to nobody any more, but the user decides.
"""

from __future__ import annotations

import socket
import stat
import sys
from pathlib import Path

from llamasup.core.doctor_facts import LeftFolder
from llamasup.effects.files import run_folders

__all__ = ["leftovers"]

_CONNECT_S = 0.2
# A folder is made after its process, by clocks that differ by a tick of 10 ms.
_CLOCKS_DIFFER_S = 1.0


def leftovers() -> tuple[LeftFolder, ...]:
    """Those folders, with the sockets in them that something still listens on."""
    return tuple(
        LeftFolder(str(folder), pid, tuple(map(str, _answering(folder))))
        for folder, pid in run_folders()
        if not _is_alive(pid, folder)
    )


def _is_alive(pid: int, folder: Path) -> bool:
    """Whether the process that made ``folder`` runs: not another one that got its number since."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.create_time() <= folder.stat().st_mtime + _CLOCKS_DIFFER_S
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True  # it is there, and we may not look at it; or the folder has just gone


def _answering(folder: Path) -> list[Path]:
    if sys.platform == "win32":
        return []
    try:
        return [path for path in sorted(folder.iterdir()) if _answers(path)]
    except OSError:
        return []


def _answers(path: Path) -> bool:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
