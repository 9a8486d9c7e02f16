"""Finds the llamasups that run on this machine, with a request to each private socket."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from llamasup.core.control.client import StatusRead
from llamasup.core.control.private_socket import SOCKET_NAME, reach
from llamasup.core.control.selection import Discovered, Running, Unresponsive
from llamasup.core.http.httpx_client import httpx
from llamasup.core.pool.shown_state import AWAY
from llamasup.core.system.native import native
from llamasup.core.system.process.run_folder import NO_CONTROL, OWNER, run_folders
from llamasup.core.system.text import INVALID_JSON

# The first request loads the control application, which takes 0.2 s.
_TIMEOUT_S = 5.0
# Addresses that also use the port of 127.0.0.1.
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "0.0.0.0"})  # noqa: S104 - compared, not bound
_RUN_FOLDER = re.compile(r"(\d+)-.+")
_SYSTEM_SERVICES = Path("/run/llamasup")


def discover(services: Path = _SYSTEM_SERVICES) -> Discovered:
    """Return all llamasups that this user may access, with services of systemd below ``services``."""
    running: list[Running] = []
    unresponsive: list[Unresponsive] = []
    closed: list[str] = []
    folders = dict(run_folders())
    for base in _service_folders(services):
        try:
            folders.update(_in_service(base))
        except PermissionError:
            closed.append(base.name)
        except OSError:  # the service has just ended
            continue
    for folder, pid in folders.items():
        match _ask(folder, pid):
            case Running() as answer:
                running.append(answer)
            case Unresponsive() as process:
                unresponsive.append(process)
    return Discovered(tuple(running), tuple(unresponsive), tuple(closed))


def running_at(port: int) -> Running | None:
    """The llamasup that listens on ``port`` of 127.0.0.1, if any."""
    for running in discover().running:
        parts = urlsplit(running.url)
        if parts.hostname in _LOOPBACK and parts.port == port:
            return running
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


def _ask(folder: Path, pid: int) -> Running | Unresponsive | None:
    """Request the status of a llamasup; None for the folder of an ended run, and for other programs."""
    socket_path = folder / SOCKET_NAME
    try:
        reached = reach(str(socket_path))
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=reached.uds, verify=False),  # no TLS there
            headers=reached.headers,
            timeout=_TIMEOUT_S,
            trust_env=False,
        ) as client:
            answer = client.get(f"{reached.url}/llamasup/v1/status")
        status = msgspec.json.decode(answer.content, type=StatusRead)
    except httpx.TimeoutException:
        return Unresponsive(pid, "hangs")
    except (httpx.HTTPError, OSError):
        if (folder / NO_CONTROL).exists() or not _owner_runs(folder, pid):
            return None
        return Unresponsive(pid, "stopping" if socket_path.exists() else "starting")
    except INVALID_JSON:
        return None
    loaded_first = sorted(status.models, key=lambda model: model.state in AWAY)
    models = tuple(f"{model.id} ({model.state})" for model in loaded_first)
    return Running(status.pid, status.url, status.version, models, str(socket_path))


def socket_at(url: str) -> str | None:
    """The private socket of the llamasup of this user at a loopback ``url``; None if it is another one."""
    parts = urlsplit(url)
    if parts.hostname not in {*_LOOPBACK, "::1"} or parts.path not in ("", "/"):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for running in discover().running:
        own = urlsplit(running.url)
        if own.scheme == parts.scheme and own.port == port and own.hostname in {*_LOOPBACK, "::1", "::"}:
            return running.socket
    return None


def _owner_runs(folder: Path, pid: int) -> bool:
    start = native.start_of(pid)
    try:
        return start is not None and (not start or (folder / OWNER).read_text() in ("", start))
    except OSError:  # it has exited and removed its folder
        return False
