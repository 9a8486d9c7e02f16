"""Finds the llamasups that run here, by asking each one over its private socket."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from llamasup.control.choose import Found, Running, RunningFact, Silent
from llamasup.http.httpx_import import httpx
from llamasup.pool.state import AWAY
from llamasup.system.process.identity import start_of
from llamasup.system.process.run_folder import OWNER, run_folders
from llamasup.system.text import INVALID_JSON

__all__ = ["SOCKET_NAME", "look", "running_at"]

SOCKET_NAME = "control.sock"
"""In a run folder."""

# The first question makes it load its control application, which takes 0.2 s.
_TIMEOUT_S = 5.0
# Those that take the port of 127.0.0.1, too.
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "0.0.0.0"})  # noqa: S104 - compared, not bound
_RUN_FOLDER = re.compile(r"(\d+)-.+")
_SYSTEM_SERVICES = Path("/run/llamasup")


class _Model(msgspec.Struct):
    id: str
    state: str


class _Status(msgspec.Struct):
    """What is needed here of the ``status`` object (docs/design.md)."""

    pid: int
    url: str
    models: list[_Model]
    version: str = ""


def look(services: Path = _SYSTEM_SERVICES) -> Found:
    """All that this user may ask, the services of systemd among them (``services``: where theirs are)."""
    if sys.platform == "win32":  # asyncio has no Unix sockets there
        return Found()
    running: list[Running] = []
    silent: list[Silent] = []
    closed: list[str] = []
    folders = dict(run_folders())
    for base in _service_folders(services):
        try:
            folders.update(_in_service(base))
        except PermissionError:
            closed.append(base.name)
        except OSError:  # its service has just ended
            continue
    for folder, pid in folders.items():
        match _ask(folder, pid):
            case Running() as answer:
                running.append(answer)
            case Silent() as silence:
                silent.append(silence)
    return Found(tuple(running), tuple(silent), tuple(closed))


def running_at(port: int) -> RunningFact | None:
    """Who has ``port`` of 127.0.0.1, and what is served there; None where it is none of us."""
    for running in look().running:
        if _has(running.url, port):
            return RunningFact(running.pid, running.url, running.models)
    return None


def _service_folders(services: Path) -> Iterator[Path]:
    """``RuntimeDirectory=`` of the units that ``llamasup service`` writes, the system's and this user's."""
    bases = [services]
    if given_by_login := os.environ.get("XDG_RUNTIME_DIR"):
        bases.append(Path(given_by_login) / "llamasup")
    for base in bases:
        with contextlib.suppress(OSError):
            for entry in sorted(base.iterdir()):
                if _RUN_FOLDER.fullmatch(entry.name) is None and entry.is_dir():
                    yield entry


def _in_service(base: Path) -> Iterator[tuple[Path, int]]:
    for entry in sorted(base.iterdir()):
        if named := _RUN_FOLDER.fullmatch(entry.name):
            yield entry, int(named[1])


def _ask(folder: Path, pid: int) -> Running | Silent | None:
    """None for what a run has left that is over, and for what is no llamasup."""
    socket_path = folder / SOCKET_NAME
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path), verify=False),  # no TLS there
            timeout=_TIMEOUT_S,
            trust_env=False,
        ) as client:
            answer = client.get("http://localhost/llamasup/v1/status")
        status = msgspec.json.decode(answer.content, type=_Status)
    except httpx.TimeoutException:
        return Silent(pid, "hangs")
    except httpx.HTTPError:
        if not _is_of_living(folder, pid):
            return None
        return Silent(pid, "stopping" if socket_path.exists() else "starting")
    except INVALID_JSON:
        return None
    loaded_first = sorted(status.models, key=lambda each: each.state in AWAY)
    models = tuple(f"{each.id} ({each.state})" for each in loaded_first)
    return Running(status.pid, status.url, status.version, models, str(socket_path))


def _is_of_living(folder: Path, pid: int) -> bool:
    start = start_of(pid)
    try:
        return start is not None and (folder / OWNER).read_text() in ("", start)
    except OSError:  # it has gone with its folder
        return False


def _has(url: str, port: int) -> bool:
    parts = urlsplit(url)
    return parts.hostname in _LOOPBACK and parts.port == port
