"""The private address of the control API: who may read a file in the run folder, may control llamasup.

It is a Unix socket in that folder. Where Python has none (Windows), it is a port of 127.0.0.1 and a random
key, and the file in the folder holds both.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write
from llamasup.core.system.text import INVALID_JSON

SOCKET_NAME = "control.sock"
"""In a run folder."""

THROUGH_PROXY = b"x-llamasup-through-proxy"
"""The header that the proxy adds to each request that it forwards to the control API."""

_CLIENT, _MODELS = "x-llamasup-client", "x-llamasup-models"
BACKLOG = 64
_KEY_BYTES = 32


class Listening(Struct, frozen=True):
    """A socket that listens. ``key``: requests need it as a bearer token; None for a Unix socket."""

    sock: socket.socket
    address: Address
    key: str | None = None


class Reached(Struct, frozen=True):
    """The address that a client connects to: the arguments for httpx."""

    url: str
    uds: str | None
    headers: Mapping[str, str]


def client_of(headers: Mapping[str, str]) -> str:
    """The client whose key a request has that the proxy forwards; empty without a key."""
    return unquote(headers.get(_CLIENT, ""))


def limits_of(headers: Mapping[str, str]) -> list[str]:
    """The names and patterns of models to which the key of such a request is limited; empty: it is not."""
    limits = unquote(headers.get(_MODELS, ""))
    return limits.split(",") if limits else []


def listen(path: Path) -> Listening:
    """Listen at ``path``, a file that does not exist yet, in a private folder. Raises OSError."""
    sock = native.unix_socket() if native.has_unix_sockets else socket.socket()
    try:
        if native.has_unix_sockets:
            sock.bind(str(path))
            listening = Listening(sock, UnixAddress(str(path)))
        else:
            native.before_bind(sock, share=False)
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
            listening = Listening(sock, TcpAddress("127.0.0.1", port), secrets.token_urlsafe(_KEY_BYTES))
        sock.listen(BACKLOG)
        sock.setblocking(False)
        if listening.key is not None:
            content = {"port": sock.getsockname()[1], "key": listening.key}
            atomic_write(path, json.dumps(content).encode())
    except BaseException:
        sock.close()
        raise
    return listening


def reach(path: str) -> Reached:
    """Read the address of the control API at ``path``. Raises OSError if the file holds none."""
    if native.has_unix_sockets:
        return Reached("http://localhost", path, {})
    try:
        found: Any = json.loads(Path(path).read_bytes())
        port, key = int(found["port"]), str(found["key"])
    except (*INVALID_JSON, KeyError, TypeError) as error:
        raise ConnectionRefusedError(f"{path} holds no address") from error
    return Reached(f"http://127.0.0.1:{port}", None, {"authorization": f"Bearer {key}"})


def with_key(app: Any, key: str) -> Any:
    """The ASGI application, for requests with this key only: every user can connect to the port."""
    wanted = f"Bearer {key}".encode()

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(given, wanted):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return checked
