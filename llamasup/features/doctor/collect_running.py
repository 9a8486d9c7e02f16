"""Requests the status and the logs of each running llamasup of this user, for a bug report."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from llamasup._version import __version__
from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.llama_server.shareable_lines import shareable_lines
from llamasup.errors import LlamasupError
from llamasup.features.doctor.bug_report import RunningReport

_PACKAGES = ("httpx", "httptools", "msgspec", "psutil", "typer", "uvloop", "uvicorn", "xllamacpp")
_MAX_LINES = 200
_READ_LINES = 5000  # a start writes about 150 lines, and each request about 20


def versions() -> Mapping[str, str]:
    found = {
        "llamasup": __version__,
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "executable": sys.executable,
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def collect_running() -> Iterator[RunningReport]:
    found = discover()
    for running in found.running:
        try:
            with ControlClient(ControlAddress(socket=running.socket)) as client:
                status = client.status()
                logs = {model["id"]: _log_of(client, model["id"]) for model in status["models"]}
                shown = {name: lines for name, lines in logs.items() if lines}
                yield RunningReport(running.pid, status, shown)
        except LlamasupError as error:
            yield RunningReport(running.pid, problem=error.message)
    for process in found.unresponsive:
        yield RunningReport(process.pid, problem=f"does not answer ({process.reason})")


def _log_of(client: ControlClient, model: str) -> list[str]:
    """Return the shareable lines; none for a model that was never loaded."""
    try:
        content = b"".join(client.log(model, lines=_READ_LINES))
    except LlamasupError:
        return []
    return shareable_lines(content.decode(errors="replace").splitlines(), _MAX_LINES)
