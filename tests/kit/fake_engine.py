"""A program other than llama-server that serves HTTP: a real child process, which misbehaves as it is told.

``python -S fake_engine.py --port N`` logs each 0.05 s until it listens. Its name is not that of a
llama-server, and neither is one of its paths.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 64
STATE = {"hangs": False, "loads": True}


def command(*options: str) -> list[str]:
    """The command of a config that starts it on a port."""
    return [sys.executable, "-S", str(Path(__file__).resolve()), "--port", "{port}", *options]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def shows(self, **values: object) -> None:
        seen = {"path": self.path, "pid": os.getpid(), "type": self.headers.get("Content-Type")}
        self.answer(json.dumps(seen | values).encode())

    def do_GET(self) -> None:
        while STATE["hangs"]:
            time.sleep(0.1)
        if self.path == "/health":
            self.answer(b"{}", status=503 if STATE["loads"] else 200)
        else:
            self.shows(env=dict(os.environ), cwd=str(Path.cwd()), argv=sys.argv)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match self.path.rpartition("/")[2]:
            case "speech":
                self.answer(PNG, "audio/wav")
            case "image":
                self.answer(PNG, "image/png")
            case "slow":
                time.sleep(json.loads(body)["seconds"])
                self.shows()
            case "crash":
                os.abort()
            case "hang":
                STATE["hangs"] = True
                self.shows()
            case "fail":
                self.answer(b"{}", status=500)
            case _:
                self.shows(bytes=len(body), form=body.count(b"form-data;"))
        if isinstance(self.server, OneByOne):
            self.close_connection = True

    do_PUT = do_POST


class TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 128


class OneByOne(socketserver.TCPServer):
    """Answers nothing else while it works on a request."""

    allow_reuse_address = True
    request_queue_size = 128


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int)
    options.add_argument("--socket")
    options.add_argument("--delay", type=float, default=0.0)
    options.add_argument("--fails", action="store_true")
    options.add_argument("--silent", action="store_true")
    options.add_argument("--ignores-term", action="store_true")
    options.add_argument("--has-child", action="store_true")
    options.add_argument("--bytes", type=int, default=0)
    options.add_argument("--blocks", action="store_true")
    given, _ = options.parse_known_args()
    if given.ignores_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.has_child:  # in another session, so that no kill of a process group reaches it
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    kept = b"x" * given.bytes
    until = time.monotonic() + given.delay
    while time.monotonic() < until:
        if not given.silent:
            print(f"reading the model, {until - time.monotonic():.2f} s left", flush=True)
        time.sleep(0.05)
    if given.fails:
        print("engine: this GPU is not supported", flush=True)
        sys.exit(3)
    server: socketserver.BaseServer
    if given.socket:
        server = UnixServer(given.socket, Handler)
    else:
        address = ("127.0.0.1", given.port)
        server = OneByOne(address, Handler) if given.blocks else TcpServer(address, Handler)
    STATE["loads"] = False
    print(f"engine: listening, with {len(kept)} bytes", flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
