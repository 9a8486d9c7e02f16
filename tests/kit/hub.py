"""A model hub on loopback, with everything that can go wrong with one. Two servers: the hub, and its CDN."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.kit.patience import PATIENCE_S

__all__ = ["Asked", "Fault", "Hub", "running_hub"]

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    server: str  # "hub" or "cdn"
    path: str  # without the query
    headers: Mapping[str, str]
    query: str = ""

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next answers whose path ends in ``path``; ``times`` of them.

    ``cut_after``: bytes of the body, then the connection ends. ``hold``: bytes are held back there until
    the event is set. ``change``: the body is made another one.
    """

    path: str
    times: int = 1
    server: str = "hub"
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    redirect: str | None = None
    cut_after: int | None = None
    hold_after: int | None = None
    change: Callable[[bytes], bytes] | None = None
    only_parts: bool = False
    """Not of the first look at the file (bytes=0-0)."""


class Hub:
    """``repos``: contents by repository and path. ``plain``: files at any URL of the CDN."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.plain: dict[str, bytes] = {}
        self.gated: set[str] = set()
        self.revisions = {"main"}
        self.token = ""
        self.ranges = True
        self.etags = True
        self.lengths = True
        self.checksums = True
        self.page = 1000
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.list_body: bytes | None = None  # sent in place of every list of files
        self.released = threading.Event()
        self.held = threading.Event()
        self._lock = threading.Lock()
        self.servers = [self._server("hub"), self._server("cdn")]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)
        self.redirects_to_cdn = False

    def _server(self, name: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "name": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def close(self) -> None:
        self.released.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def fault_for(self, asked: Asked) -> Fault | None:
        with self._lock:
            self.asked.append(asked)
            for fault in self.faults:
                if (
                    fault.times
                    and fault.server == asked.server
                    and asked.path.endswith(fault.path)
                    and not (fault.only_parts and asked.range in (None, "bytes=0-0"))
                ):
                    fault.times -= 1
                    return fault
        return None

    def paths(self, server: str = "hub") -> list[str]:
        return [request.path for request in self.asked if request.server == server]

    def parts(self) -> list[str]:
        """The ranges that were asked for, the looks left out."""
        return [request.range for request in self.asked if request.range not in (None, "bytes=0-0")]


@lru_cache(maxsize=64)
def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    name: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = Asked(
            self.name,
            unquote(url.path),
            {key.lower(): value for key, value in self.headers.items()},
            url.query,
        )
        fault = self.hub.fault_for(asked)
        if fault is not None and fault.redirect is not None:
            return self._redirect(fault.redirect)
        if fault is not None and fault.status is not None:
            return self._send(fault.status, b"", fault.headers)
        if self.name == "hub" and asked.path.startswith("/api/models/"):
            return self._tree(asked)
        if self.name == "hub" and (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", asked.path)):
            return self._resolve(asked, found[1], found[3], fault)
        content = self.hub.plain.get(asked.path)
        if content is None:
            return self._send(404, b"not found")
        return self._content(asked, content, {}, fault)

    def _may(self, asked: Asked, repo: str) -> bool:
        return repo not in self.hub.gated or asked.headers.get("authorization") == f"Bearer {self.hub.token}"

    def _tree(self, asked: Asked) -> None:
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", asked.path)
        files = self.hub.repos.get(found[1]) if found else None
        if files is None or found is None:
            return self._send(
                401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            )
        if self.hub.list_body is not None:
            return self._send(200, self.hub.list_body)
        if found[2] not in self.hub.revisions:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        start = int(parse_qs(asked.query).get("cursor", ["0"])[0])
        shown = sorted(files.items())[start : start + self.hub.page]
        body = json.dumps(
            [{"type": "directory", "oid": "0", "size": 0, "path": "folder"}, *map(self._entry, shown)]
        )
        more = {}
        if start + self.hub.page < len(files):
            link = f"https://huggingface.co{quote(asked.path)}?recursive=true&cursor={start + self.hub.page}"
            more = {"Link": f'<{link}>; rel="next"'}
        return self._send(200, body.encode(), more)

    def _entry(self, item: tuple[str, bytes]) -> dict[str, object]:
        path, content = item
        entry: dict[str, object] = {"type": "file", "oid": "0" * 40, "size": len(content), "path": path}
        if self.hub.checksums:
            digest = _digest(content)
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return entry

    def _resolve(self, asked: Asked, repo: str, path: str, fault: Fault | None) -> None:
        if not self._may(asked, repo):
            return self._send(
                403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            )
        content = self.hub.repos.get(repo, {}).get(path)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        linked = {"X-Repo-Commit": _COMMIT}
        if self.hub.checksums:
            linked["X-Linked-Etag"] = f'"{_digest(content)}"'
            linked["X-Linked-Size"] = str(len(content))
        if self.hub.redirects_to_cdn:
            self.hub.plain[f"/blobs/{path}"] = content
            return self._redirect(f"{self.hub.cdn}/blobs/{quote(path)}?X-Signature=secret", linked)
        return self._content(asked, content, linked, fault)

    def _redirect(self, target: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(302, b"Found. Redirecting.", {**(headers or {}), "Location": target})

    def _content(self, asked: Asked, content: bytes, headers: Mapping[str, str], fault: Fault | None) -> None:
        if fault is not None and fault.change is not None:
            content = fault.change(content)
        sent = dict(headers)
        if self.hub.etags:
            sent["ETag"] = f'"{_digest(content)[:32]}"'
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.range or "")
        status, body = 200, content
        if found is not None and self.hub.ranges:
            start, end = int(found[1]), min(int(found[2]) + 1, len(content))
            status, body = 206, content[start:end]
            sent["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._send(status, body, sent, fault)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if self.hub.lengths or status != 200:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.close_connection = True
                self.send_header("Connection", "close")
            self.end_headers()
            if fault is not None and fault.hold_after is not None:
                self.wfile.write(body[: fault.hold_after])
                self.wfile.flush()
                self.hub.held.set()
                self.hub.released.wait(PATIENCE_S)
                body = body[fault.hold_after :]
            if fault is not None and fault.cut_after is not None:
                body = body[: fault.cut_after]
                self.close_connection = True
            self.wfile.write(body)
        except OSError:  # whoever asked has gone
            self.close_connection = True


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
