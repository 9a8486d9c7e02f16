"""The HTTP side of the fake llama-server: its endpoints and their shapes, as b11434 has them.

One thread per connection, plain sockets, standard library only: the fake is ready a few tens of milliseconds
after exec, and every misbehaviour is a few lines here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.faults import Faults

__all__ = ["ClientGone", "HttpServer"]

_PUBLIC = {"/health", "/v1/health", "/models", "/v1/models"}
_COMPLETIONS = {"/completion", "/completions", "/v1/completions", "/infill"}
_CHATS = {"/v1/chat/completions", "/chat/completions"}
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
            500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable"}  # fmt: skip


class ClientGone(Exception):
    """The client has closed its connection; llama-server cancels the request then."""


class HttpServer:
    """Serves one listening socket until the process ends. ``ready`` and ``stopping`` are set from outside."""

    def __init__(self, listener: socket.socket, faults: Faults, options: dict[str, str]) -> None:
        self.ready = False
        self.stopping = threading.Event()
        self.open_requests = 0
        self._listener = listener
        self._faults = faults
        self._alias = options.get("--alias") or os.path.basename(options.get("--model", "fake"))  # noqa: PTH119
        self._keys = _api_keys(options)
        self._embeds = "--embedding" in options
        self._ranks = "--rerank" in options
        self._n_slots = max(
            1, int(options.get("--parallel", "4")) if options.get("--parallel") != "-1" else 4
        )
        self._n_ctx = int(options.get("--ctx-size", "0")) or 2048
        self._has_metrics = "--metrics" in options
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._slots: list[int | None] = [None] * self._n_slots  # tokens decoded by who holds it
        self._held = [""] * self._n_slots  # what each was asked last; a character is a token
        self._slot_folder = options.get("--slot-save-path")
        self._deferred = 0
        self._n_decode = 0
        self._n_prompt = 0
        self._leaked: list[bytes] = []

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    # --- one connection --------------------------------------------------------------------------

    def _connection(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ClientGone), connection.makefile("rb") as reader:
            while (head := _read_head(reader)) is not None:
                method, path, headers = head
                body = _read_body(reader, headers)
                with self._lock:
                    self.open_requests += 1
                try:
                    keep = self._answer(connection, method, path, headers, body)
                finally:
                    with self._lock:
                        self.open_requests -= 1
                if not keep or headers.get("connection", "").lower() == "close":
                    return

    def _answer(
        self, connection: socket.socket, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> bool:
        faults, path = self._faults, target.partition("?")[0]
        if path in {"/health", "/v1/health"} and faults.health != "ok":
            if faults.health == "never":
                self._until_client_leaves(connection)
            if faults.health == "garbage":
                connection.sendall(b"\x16\x03\x01 this is no HTTP \xff\xfe\r\n\r\n")
                return False
            return _send_error(connection, int(faults.health), "Unhealthy", "server_error")
        if not self.ready:
            return _send_error(connection, 503, "Loading model", "unavailable_error")
        if self._keys and path not in _PUBLIC and _given_key(headers) not in self._keys:
            return _send_error(connection, 401, "Invalid API Key", "authentication_error")
        if method == "GET":
            return self._get(connection, path)
        if method != "POST":
            return _send_error(connection, 404, "File Not Found", "not_found_error")
        try:
            request = json.loads(body or b"{}")
        except ValueError as error:
            return _send_error(connection, 400, f"parse error: {error}", "invalid_request_error")
        if path.startswith("/slots/"):
            return self._move_slot(connection, target, request)
        return self._post(connection, path, request)

    def _get(self, connection: socket.socket, path: str) -> bool:
        match path:
            case "/health" | "/v1/health":
                return _send_json(connection, {"status": "ok"})
            case "/models" | "/v1/models":
                return _send_json(connection, {"object": "list", "data": [
                    {"id": self._alias, "aliases": [self._alias], "object": "model", "owned_by": "llamacpp",
                     "meta": {"n_ctx": self._n_ctx, "n_ctx_train": self._n_ctx}}]})  # fmt: skip
            case "/props":
                return _send_json(connection, {
                    "default_generation_settings": {"n_ctx": self._n_ctx}, "total_slots": self._n_slots,
                    "model_alias": self._alias, "model_path": self._alias, "build_info": "b0-fake",
                })  # fmt: skip
            case "/slots":
                if self._faults.list_slots_s:
                    os.write(2, b"I srv  GET /slots waits\n")
                    self._pause(connection, self._faults.list_slots_s)
                with self._lock:
                    slots = [
                        _slot(number, self._n_ctx, decoded) for number, decoded in enumerate(self._slots)
                    ]
                return _send_json(connection, slots)
            case "/metrics" if self._has_metrics:
                return _send(connection, 200, self._metrics().encode(), "text/plain; version=0.0.4")
            case "/metrics":
                message = "This server does not support metrics endpoint. Start it with `--metrics`"
                return _send_error(connection, 501, message, "not_supported_error")
            case _:
                return _send_error(connection, 404, "File Not Found", "not_found_error")

    def _post(self, connection: socket.socket, path: str, request: dict[str, Any]) -> bool:
        faults = self._faults
        if path == "/tokenize":
            return _send_json(connection, {"tokens": list(str(request.get("content", "")).encode())})
        if path in {"/v1/embeddings", "/embedding", "/embeddings"}:
            if not self._embeds:
                message = "This server does not support embeddings. Start it with `--embeddings`"
                return _send_error(connection, 501, message, "not_supported_error")
            inputs = request.get("input", request.get("content", ""))
            count = len(inputs) if isinstance(inputs, list) else 1
            vectors = [{"object": "embedding", "index": n, "embedding": [0.5] * 8} for n in range(count)]
            usage = {"prompt_tokens": count, "total_tokens": count}
            return _send_json(
                connection, {"object": "list", "model": self._alias, "data": vectors, "usage": usage}
            )
        if path in {"/v1/rerank", "/rerank", "/v1/reranking", "/reranking"}:
            if not self._ranks:
                message = "This server does not support reranking. Start it with `--reranking`"
                return _send_error(connection, 501, message, "not_supported_error")
            count = len(request.get("documents", []))
            results = [{"index": n, "relevance_score": 1.0 / (n + 1)} for n in range(count)]
            return _send_json(connection, {"object": "list", "model": self._alias, "results": results})
        if path not in _COMPLETIONS | _CHATS:
            return _send_error(connection, 404, "File Not Found", "not_found_error")
        if faults.status:
            return _send_error(connection, faults.status, "fake failure", "server_error")
        return self._complete(connection, path, request)

    def _move_slot(self, connection: socket.socket, target: str, request: dict[str, Any]) -> bool:
        faults, (place, _, action) = self._faults, target.partition("?action=")
        if self._slot_folder is None:
            message = "This server does not support slots action. Start it with `--slot-save-path`"
            return _send_error(connection, 501, message, "not_supported_error")
        self._pause(connection, faults.slots_s)
        number = int(place.rpartition("/")[2]) % self._n_slots
        path = Path(self._slot_folder, request["filename"])
        if faults.slots_fail == action:
            if action == "save":
                path.write_bytes(b"a part")
                return _send_error(connection, 500, "Unable to save slot", "server_error")
            message = "Unable to restore slot: No available space in KV cache or invalid slot save file"
            return _send_error(connection, 400, message, "invalid_request_error")
        if faults.slots_fail == "die" and action == "restore":
            os._exit(1)
        if action == "save":
            path.write_text(self._held[number])
        else:
            self._held[number] = path.read_text()
        counted = {f"n_{action}d": len(self._held[number])}
        return _send_json(connection, {"id_slot": number, "filename": path.name, **counted})

    # --- completions -----------------------------------------------------------------------------

    def _complete(self, connection: socket.socket, path: str, request: dict[str, Any]) -> bool:
        asked = request.get("max_tokens", request.get("n_predict", request.get("max_completion_tokens")))
        n_tokens = self._faults.tokens if asked is None or asked < 0 else int(asked)
        stream = bool(request.get("stream"))
        shape = _Shape(path, self._alias, request)
        with self._slot(connection) as number:
            self._held[number] = str(request.get("prompt", request.get("messages", "")))
            if self._faults.die_on and self._faults.die_on in self._held[number]:
                self._faults.die("stream")
            if self._n_prompt == self._faults.fail_at:
                return _send_error(connection, 500, "injected", "server_error")
            # Headers go out when a slot starts the request, not before (b11434).
            if stream:
                connection.sendall(_head(200, "text/event-stream", chunked=True))
            self._pause(connection, self._faults.prefill_s)
            words = []
            for word in self._decode(connection, number, n_tokens):
                words.append(word)
                if stream:
                    _send_event(connection, shape.chunk(word))
        if not stream:
            return _send_json(connection, shape.whole(words))
        for event in shape.ending(words):
            _send_event(connection, event)
        connection.sendall(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True

    def _decode(self, connection: socket.socket, number: int, n_tokens: int) -> Iterator[str]:
        faults = self._faults
        for n in range(n_tokens):
            if faults.wedge or n == faults.stall_after or self.stopping.is_set():
                # A wedged decode moves no counter and notices no client; a stop ends generation but not
                # the stream (b11434).
                self._until_client_leaves(connection)
            if n == faults.die_in_stream:
                faults.die("stream")
            self._pause(connection, faults.token_s)
            with self._lock:
                self._n_decode += 1
                self._slots[number] = n + 1
            yield f" {'x' if faults.wrong else 'w'}{n}"

    @contextlib.contextmanager
    def _slot(self, connection: socket.socket) -> Iterator[int]:
        with self._free:
            self._deferred += 1
            try:
                while None not in self._slots:
                    self._free.wait(0.05)
                    _raise_if_gone(connection, 0)
            finally:
                self._deferred -= 1
            number = self._slots.index(None)
            self._slots[number] = 0
            self._n_prompt += 1
            self._leaked.append(b"x" * self._faults.leak_bytes)
            if self._n_prompt == self._faults.die_at:
                os._exit(1)
        try:
            yield number
        finally:
            with self._free:
                self._slots[number] = None
                self._free.notify()

    def _pause(self, connection: socket.socket, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._faults.over:
            _raise_if_gone(connection, min(left, 0.05) if self._faults.until else left)
            if select.select([connection], [], [], 0)[0]:  # a pipelined request: do not spin on it
                time.sleep(min(left, 0.01))

    def _until_client_leaves(self, connection: socket.socket) -> None:
        while not self._faults.over:
            self._pause(connection, 3600)

    def _metrics(self) -> str:
        with self._lock:
            busy = sum(decoded is not None for decoded in self._slots)
            values = {
                "prompt_tokens_total": self._n_prompt, "tokens_predicted_total": self._n_decode,
                "n_decode_total": self._n_decode, "requests_processing": busy,
                "requests_deferred": self._deferred}  # fmt: skip
        return "".join(
            f"# TYPE llamacpp:{name} {'counter' if name.endswith('total') else 'gauge'}\n"
            f"llamacpp:{name} {value}\n"
            for name, value in values.items()
        )


class _Shape:
    """What a completion looks like under the path that asked for it."""

    def __init__(self, path: str, model: str, request: dict[str, Any]) -> None:
        self._chat = path in _CHATS
        self._openai = self._chat or path.startswith("/v1/")
        self._model = model
        self._usage = bool((request.get("stream_options") or {}).get("include_usage"))

    def chunk(self, word: str) -> dict[str, object]:
        if not self._openai:
            return {"index": 0, "content": word, "stop": False}
        part: dict[str, object] = {"delta": {"content": word}} if self._chat else {"text": word}
        return self._envelope([{"index": 0, "finish_reason": None, **part}], streamed=True)

    def ending(self, words: list[str]) -> Iterator[dict[str, object]]:
        timings = {"timings": _timings(len(words))}
        if not self._openai:
            yield {"index": 0, "content": "", "stop": True, "tokens_predicted": len(words), **timings}
            return
        part: dict[str, object] = {"delta": {}} if self._chat else {"text": ""}
        last = self._envelope([{"index": 0, "finish_reason": "stop", **part}], streamed=True)
        yield last if self._usage else {**last, **timings}
        if self._usage:
            yield {**self._envelope([], streamed=True), "usage": _usage(len(words)), **timings}

    def whole(self, words: list[str]) -> dict[str, object]:
        text, timings = "".join(words), {"timings": _timings(len(words))}
        if not self._openai:
            return {"index": 0, "content": text, "stop": True, "tokens_predicted": len(words), **timings}
        part: dict[str, object] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        choice = {"index": 0, "finish_reason": "stop", **part}
        return {**self._envelope([choice], streamed=False), "usage": _usage(len(words)), **timings}

    def _envelope(self, choices: list[dict[str, object]], *, streamed: bool) -> dict[str, object]:
        kind = f"chat.completion{'.chunk' if streamed else ''}" if self._chat else "text_completion"
        return {"choices": choices, "created": 0, "id": "fake", "model": self._model, "object": kind}


def _timings(n_tokens: int) -> dict[str, object]:
    return {"cache_n": 0, "prompt_n": 1, "prompt_ms": 1.0, "predicted_n": n_tokens, "predicted_ms": 1.0}


def _usage(n_tokens: int) -> dict[str, object]:
    return {"prompt_tokens": 1, "completion_tokens": n_tokens, "total_tokens": n_tokens + 1}


def _slot(number: int, n_ctx: int, decoded: int | None) -> dict[str, object]:
    slot: dict[str, object] = {"id": number, "n_ctx": n_ctx, "is_processing": decoded is not None}
    return slot if decoded is None else {**slot, "next_token": [{"n_decoded": decoded}]}


# --- HTTP/1.1, as little of it as is needed ------------------------------------------------------


def _read_head(reader: Any) -> tuple[str, str, dict[str, str]] | None:
    request_line = reader.readline()
    if not request_line:
        return None
    method, target, _ = request_line.decode("latin-1").split(" ", 2)
    headers = {}
    while (line := reader.readline().strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return method, target, headers


def _read_body(reader: Any, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        body: bytes = reader.read(int(headers.get("content-length", "0")))
        return body
    chunks = []
    while size := int(reader.readline().partition(b";")[0], 16):
        chunks.append(reader.read(size))
        reader.readline()
    while reader.readline().strip():
        pass
    return b"".join(chunks)


def _raise_if_gone(connection: socket.socket, timeout_s: float) -> None:
    if select.select([connection], [], [], timeout_s)[0] and not connection.recv(1, socket.MSG_PEEK):
        raise ClientGone


def _head(status: int, content_type: str, *, length: int = 0, chunked: bool = False) -> bytes:
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}"
    # Any status of 400 and more closes (b11434).
    keep = "Keep-Alive: timeout=5, max=100" if status < 400 else "Connection: close"
    return (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\nServer: llama.cpp\r\n"
        f"Content-Type: {content_type}\r\n{framing}\r\n{keep}\r\n\r\n"
    ).encode()


def _send(connection: socket.socket, status: int, body: bytes, content_type: str) -> bool:
    connection.sendall(_head(status, content_type, length=len(body)) + body)
    return status < 400


def _send_json(connection: socket.socket, value: object) -> bool:
    return _send(connection, 200, json.dumps(value).encode(), "application/json; charset=utf-8")


def _send_error(connection: socket.socket, status: int, message: str, kind: str) -> bool:
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    return _send(connection, status, body, "application/json; charset=utf-8")


def _send_event(connection: socket.socket, event: dict[str, object]) -> None:
    line = f"data: {json.dumps(event)}\n\n".encode()
    connection.sendall(f"{len(line):x}\r\n".encode() + line + b"\r\n")


def _api_keys(options: dict[str, str]) -> set[str]:
    given = options.get("--api-key") or os.environ.get("LLAMA_API_KEY", "")
    keys = set(filter(None, given.split(",")))
    if path := options.get("--api-key-file"):
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - the fake has to start fast
            keys |= {line.strip() for line in file if line.strip()}
    return keys


def _given_key(headers: dict[str, str]) -> str:
    return headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
