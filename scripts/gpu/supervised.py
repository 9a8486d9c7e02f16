"""A llamasup process under measurement: its events, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from scripts.bench.plan import tokens

__all__ = ["Answer", "Supervised", "supervised"]

Event = dict[str, Any]
START_LIMIT_S = 120.0


class Answer:
    """``first_s``: seconds to the first token, or None. ``problem``: empty for a complete answer."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.tokens = 0
        self.tokens_per_s = 0.0
        self.problem = ""

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


class Supervised:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.events: list[tuple[float, Event]] = []  # with the seconds since the start
        self._began_s = time.monotonic()
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append((time.monotonic() - self._began_s, json.loads(line)))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(
        self, wanted: Callable[[Event], bool], *, after: int = 0, limit_s: float = START_LIMIT_S
    ) -> tuple[float, Event]:
        """The first such event after the first ``after`` events, and the seconds from the start to it."""
        deadline_s = time.monotonic() + limit_s
        with self._changed:
            while True:
                for found in self.events[after:]:
                    if wanted(found[1]):
                        return found
                left_s = deadline_s - time.monotonic()
                if self._ended or left_s <= 0:
                    raise RuntimeError(f"the event did not come; the last ones: {self.events[-5:]}")
                self._changed.wait(left_s)

    def ready(self) -> float:
        """Wait until llamasup is ready. The seconds from its start."""
        return self.wait_for(lambda event: event["event"] == "ready")[0]

    @property
    def port(self) -> int:
        return int(next(event["port"] for _, event in self.events if event["event"] == "ready"))

    def servers(self) -> list[psutil.Process]:
        """The llama-server processes, without the guardian."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in children if "--model" in child.cmdline()]
        return []

    def ask(self, *, model: str = "", prompt: int = 16, seed: int = 1, answer: int = 32) -> Answer:
        """Send a streaming request. An error is part of the answer."""
        result = Answer()
        body = {
            "prompt": tokens(prompt, seed),
            "n_predict": answer,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
            "stream": True,
        } | ({"model": model} if model else {})
        began_s = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_LIMIT_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                result.problem = f"{response.status}: {response.read(500).decode(errors='replace')}"
                return result
            for line in response:
                if line.startswith(b"data:"):
                    self._take(result, json.loads(line[5:]), began_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            result.problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return result

    def _take(self, result: Answer, event: Event, began_s: float) -> None:
        if "error" in event:
            result.problem = str(event["error"].get("message", event["error"]))
        elif event.get("tokens") and result.first_s is None:
            result.first_s = time.monotonic() - began_s
        if "timings" in event and event.get("stop"):
            result.tokens = event["timings"]["predicted_n"]
            result.tokens_per_s = event["timings"]["predicted_per_second"]

    def crowd(self, count: int, **request: Any) -> tuple[list[Answer], float]:
        """The answers to ``count`` requests sent together, and the seconds until the last one ended."""
        answers: list[Answer] = []
        threads = [
            threading.Thread(target=lambda seed=seed: answers.append(self.ask(seed=seed, **request)))
            for seed in range(10, 10 + count)
        ]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers, time.monotonic() - began_s


@contextmanager
def supervised(*arguments: str) -> Iterator[Supervised]:
    """Run llamasup with these arguments. It is stopped at the end; its log is shown if it cannot start."""
    name, *others = arguments
    command = [sys.executable, "-m", "llamasup", name, "--events", "jsonl", *others]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        running = Supervised(process)
        try:
            yield running
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
