"""A llamasup that lives as long as this process: `ready` has its address, `stop()` ends it."""

import json
import subprocess
from collections import deque
from concurrent.futures import Future
from threading import Thread

STOP_TIMEOUT_S = 45


class Llamasup:
    def __init__(self, program: str, model: str) -> None:
        self.ready: Future[dict] = Future()
        self.ended: Future[str] = Future()  # with the reason
        try:
            self._process = subprocess.Popen(
                [program, "run", model, "--sidecar"],
                stdin=subprocess.PIPE,  # llamasup stops when it ends, also if this process is killed
                stdout=subprocess.PIPE,  # events
                stderr=subprocess.PIPE,  # messages
                encoding="utf-8",
                errors="replace",
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # Windows: no console
            )
        except OSError as error:
            self._process = None
            self._end(f"{program} could not be started: {error}\n")
            return
        self._said: deque[str] = deque(maxlen=20)  # the last messages
        self._messages = Thread(target=lambda: self._said.extend(self._process.stderr), daemon=True)
        self._messages.start()
        Thread(target=self._read_events, daemon=True).start()

    def stop(self) -> None:
        """Return when llamasup and all that it has started have ended."""
        if self._process is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_events(self) -> None:
        for line in self._process.stdout:
            if (event := ready_event(line)) and not self.ready.done():
                self.ready.set_result(event)
        self._messages.join()
        self._end(f"llamasup ended with {self._process.wait()}\n{''.join(self._said)}")

    def _end(self, reason: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(reason))
        self.ended.set_result(reason)


def ready_event(line: str) -> dict | None:
    try:
        event = json.loads(line)  # there are other events, which an application may show
    except ValueError:  # the last line of a program that was killed may be incomplete
        return None
    return event if isinstance(event, dict) and event.get("event") == "ready" else None
