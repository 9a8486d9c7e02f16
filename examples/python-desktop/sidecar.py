"""A llamasup that lives as long as this process: `ready` has its address, `stop()` ends it."""

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from http.client import HTTPConnection

STOP_TIMEOUT_S = 45


class Llamasup:
    def __init__(self, command: list[str], model: str) -> None:
        self.ready: Future[dict] = Future()
        self._process = subprocess.Popen(
            [*command, "run", model, "--sidecar"],
            stdin=subprocess.PIPE,  # its end, also by our death, is what stops llamasup
            stdout=subprocess.PIPE,  # events
            encoding="utf-8",
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # Windows: no console
        )
        threading.Thread(target=self._read_events, daemon=True).start()

    def stop(self) -> None:
        """Return when llamasup and all that it has started have ended."""
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_events(self) -> None:
        for line in self._process.stdout:
            event = json.loads(line)  # there are other events, which an application may show
            if event["event"] == "ready":
                self.ready.set_result(event)
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"llamasup ended with {self._process.wait()}"))


def chat(address: dict, messages: list[dict]) -> Iterator[str]:
    """The pieces of text of a streamed answer."""
    connection = HTTPConnection(address["host"], address["port"])
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": 128})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(json.load(answer)["error"]["message"])
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:  # llama-server ended within the answer
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
