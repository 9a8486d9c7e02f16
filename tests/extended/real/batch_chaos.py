"""Kills of everything that takes part in a batch, and what its output must be nevertheless."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.driver import PATIENCE_S, children_of, command
from tests.kit.ports import free_port

__all__ = ["SLOTS", "BatchUnderTest", "answers_of", "write_lines"]

# In a context of its own, an answer does not depend on what runs beside it.
SLOTS = ("--parallel", "4", "--ctx-size", "2048")
MAX_SERVER_KILLS = 4  # in one life of llamasup: more are a crash loop


def write_lines(path: Path, count: int, max_tokens: int = 8) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": f"Once there was a fox {number}", "max_tokens": max_tokens, "temperature": 0}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def answers_of(path: Path) -> Mapping[str, str]:
    """The text of each answer, by id. Each id has one line, and each line is an answer."""
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    doubled = [id_ for id_, times in Counter(line["custom_id"] for line in lines).items() if times > 1]
    assert not doubled, doubled[:5]
    errors = [line for line in lines if line["response"] is None or line["response"]["status_code"] != 200]
    assert not errors, errors[:3]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


class BatchUnderTest:
    """llamasup and a run of the batch, each started again when it was killed."""

    def __init__(self, folder: Path, model: Path, runtime: str, source: Path, output: Path) -> None:
        self._port = free_port()
        self._folder = folder
        self._serve = command(
            *("run", str(model), "--port", str(self._port), "--runtime", runtime, *SLOTS),
            *("--log-level", "warning"),
        )
        url = f"http://127.0.0.1:{self._port}"
        self._batch = command("batch", "run", str(source), "-o", str(output), "--url", url, "--json")
        self.output = output
        self.kills: Counter[str] = Counter()
        self._server_kills = 0
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._run: subprocess.Popen[str] | None = None

    @contextmanager
    def started(self) -> Iterator[BatchUnderTest]:
        try:
            self.start_supervisor()
            self.start_run()
            yield self
            # The last kill may be a moment ago. A llamasup that is killed before its guardian runs leaves
            # its folder to the next one.
            assert self._supervisor is not None
            self._supervisor.terminate()
            self._supervisor.wait(PATIENCE_S)
        finally:
            for process in (self._run, self._supervisor):
                if process is not None:
                    process.kill()
                    process.wait()

    def start_supervisor(self) -> None:
        self._server_kills = 0
        with (self._folder / "llamasup.log").open("ab") as log:
            self._supervisor = subprocess.Popen(self._serve, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_run(self) -> None:
        with (self._folder / "batch.log").open("a") as log:
            self._run = subprocess.Popen(
                self._batch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )

    def written(self) -> int:
        """Bytes of the output."""
        try:
            return self.output.stat().st_size
        except FileNotFoundError:
            return 0

    def kill_one(self, chance: random.Random) -> None:
        """SIGKILL for llama-server, llamasup or the run; the latter two start again."""
        kind = chance.choice(("server", "server", "supervisor", "run"))
        assert self._supervisor is not None
        assert self._run is not None
        if kind == "server" and self._server_kills < MAX_SERVER_KILLS:
            try:
                servers = [one for one in children_of(self._supervisor.pid) if self._is_server(one)]
            except psutil.NoSuchProcess:
                servers = []
            if not servers:
                return
            self._server_kills += 1
            for server in servers:
                server.kill()
        elif kind == "run":
            self._run.kill()
            self._run.wait()
            self.start_run()
        else:
            kind = "supervisor"
            self._supervisor.kill()
            self._supervisor.wait()
            self.start_supervisor()
        self.kills[kind] += 1

    def end(self) -> int:
        """Wait for the end of the run, as long as there is progress."""
        assert self._run is not None
        seen, deadline_s = -1, time.monotonic() + PATIENCE_S
        while self._run.poll() is None:
            written = self.written()
            if written != seen:
                seen, deadline_s = written, time.monotonic() + PATIENCE_S
            assert time.monotonic() < deadline_s, f"no progress after {seen} bytes: {self._log()}"
            time.sleep(0.05)
        return self._run.returncode

    @property
    def is_over(self) -> bool:
        return self._run is not None and self._run.poll() is not None

    def _log(self) -> str:
        text = "".join((self._folder / name).read_text()[-1500:] for name in ("batch.log", "llamasup.log"))
        return f"kills {dict(self.kills)}\n{text}"

    @staticmethod
    def _is_server(process: psutil.Process) -> bool:
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            return False
        return "--model" in words or " -m " in words or ".gguf" in words
