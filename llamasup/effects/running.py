"""Finds the llamasup of this user that has a port, by asking each one that runs over its private socket."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from llamasup.core.doctor_facts import RunningFact
from llamasup.effects.files import run_folders
from llamasup.effects.httpx_alone import httpx

__all__ = ["running_at"]

# The first question makes it load its control application, which takes 0.2 s.
_TIMEOUT_S = 5.0
# Those that take the port of 127.0.0.1, too.
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "0.0.0.0"})  # noqa: S104 - compared, not bound


class _Model(msgspec.Struct):
    id: str
    state: str


class _Status(msgspec.Struct):
    """What is needed here of the ``status`` object (docs/design.md)."""

    pid: int
    url: str
    models: list[_Model]


def running_at(port: int) -> RunningFact | None:
    """Who has ``port`` of 127.0.0.1, and what is served there; None where it is none of us."""
    if sys.platform == "win32":
        return None
    for folder, _ in run_folders():
        status = _status(folder / "control.sock")
        if status is not None and _has(status.url, port):
            models = tuple(f"{each.id} ({each.state})" for each in status.models)
            return RunningFact(status.pid, status.url, models)
    return None


def _status(socket_path: Path) -> _Status | None:
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path)), timeout=_TIMEOUT_S, trust_env=False
        ) as client:
            answer = client.get("http://llamasup/llamasup/v1/status")
        return msgspec.json.decode(answer.content, type=_Status)
    except (httpx.HTTPError, msgspec.DecodeError):  # it has ended, or it does not answer
        return None


def _has(url: str, port: int) -> bool:
    parts = urlsplit(url)
    return parts.hostname in _LOOPBACK and parts.port == port
