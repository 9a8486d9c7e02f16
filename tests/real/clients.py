"""Requests to llama-server and its responses, in a form that compares a bare server with a wrapped one."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.patience import PATIENCE_S as PATIENCE_S
from tests.kit.ports import free_port as free_port

# The values that differ between two runs of the same server.
_VARIES = re.compile(
    r'"(?:id|created|created_at|completed_at|id_slot|id_task|media_marker|system_fingerprint'
    r'|t_[a-z_]+|[a-z_]+_ms|[a-z_]+_per_second)":\s*'
    r'(?:"[^"]*"|-?[\d.e+-]+)'
)
# Headers of the connection and of the process, and those that llamasup adds.
_NOT_COMPARED = frozenset(
    {"connection", "keep-alive", "content-length", "transfer-encoding"}
    | {"process-start-time-unix", "x-request-id", "server-timing"}
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``numbers``: the response contains numbers that depend on earlier requests."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    numbers: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.body!s:.60} {dict(self.headers)}"


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: frozenset[tuple[str, str]]
    body: str


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def response_to(connection: http.client.HTTPConnection, request: Request) -> Response:
    body = request.body if isinstance(request.body, bytes | None) else json.dumps(request.body).encode()
    try:
        connection.request(request.method, request.path, body=body, headers=dict(request.headers))
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    headers = {(name.lower(), value) for name, value in answer.getheaders()}
    text = _VARIES.sub("_", text)
    if request.numbers:
        # A rate is infinite if the clock did not move meanwhile.
        text = re.sub(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|\b(?:inf|nan)\b)", "#", text)
    return Response(
        answer.status,
        frozenset((name, value) for name, value in headers if name not in _NOT_COMPARED),
        text,
    )


@contextmanager
def bare_server(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A llama-server without llamasup, ready for requests."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stderr is not None
    stderr = process.stderr
    ready = threading.Event()
    log: list[str] = []

    def drain() -> None:
        for line in stderr:
            log.append(line)
            if "listening on" in line:
                ready.set()

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        assert ready.wait(PATIENCE_S), log
        yield process
    finally:
        process.kill()
        process.wait()
        reader.join()
        stderr.close()


def environment(llama_server: str | None, folder: Path) -> dict[str, str]:
    """The environment of a user, without the configuration of this machine."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(folder / "run"),
    }
    (folder / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    if llama_server is not None:
        env["LD_LIBRARY_PATH"] = str(Path(llama_server).parent)
    return env
