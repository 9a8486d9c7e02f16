"""The changes and faults of a stress run: kills, changed files, config edits, reloads, commands.

Each change is reported to the expectations before it starts, and again once its effect is certain. The seed
alone decides the changes, their models and the pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.driver import Llamasup, command, is_alive
from tests.extended.soak.stress_config import BROKEN, StressConfig, edited
from tests.extended.soak.stress_expectations import Expectations
from tests.extended.soak.stress_models import MODELS, VERSIONS, Version

__all__ = ["PAUSE_S", "Chaos", "Target", "write_first"]

PAUSE_S = 0.7  # on average, between two changes
PATIENCE_S = 120.0
POLL_INTERVAL_S = 0.02
SLOW_S = 10.0
"""A change that takes longer is printed."""


@dataclass(slots=True)
class Target:
    """The llamasup under test. ``http``: a client with the right to control it."""

    running: Llamasup
    http: httpx.AsyncClient
    environ: Mapping[str, str]

    def servers_of(self, path: Path) -> list[psutil.Process]:
        """The processes that serve or load this file."""
        return [server for server, arguments in self.servers() if str(path) in arguments]

    def servers(self) -> list[tuple[psutil.Process, Sequence[str]]]:
        """Every llama-server, with its arguments."""
        found: list[tuple[psutil.Process, Sequence[str]]] = []
        for child in self.running.children():
            try:
                arguments = child.cmdline() if is_alive(child) else []
            except psutil.Error:
                continue
            if "--host" in arguments:
                found.append((child, arguments))
        return found

    async def status(self) -> Mapping[str, Any]:
        answer = await self.http.get("/llamasup/v1/status")
        answer.raise_for_status()
        status: Mapping[str, Any] = answer.json()
        return status


@dataclass(slots=True)
class Chaos:
    target: Target
    expectations: Expectations
    config: StressConfig
    rng: random.Random
    report_violation: Callable[[str], None]
    """Called with each violation."""
    done: Counter[str] = field(default_factory=Counter)
    command_results: Counter[str] = field(default_factory=Counter)
    """The results of the load, unload and restart commands."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def step(self, tasks: asyncio.TaskGroup) -> None:
        """Make one random change. Tasks in ``tasks`` follow its effects."""
        acts, weights = zip(*_ACTS, strict=True)
        act: Callable[[Chaos, asyncio.TaskGroup], Awaitable[None]] = self.rng.choices(acts, weights)[0]
        await act(self, tasks)

    async def wait_until_done(self) -> None:
        """Wait until all changes have taken effect."""
        while self._tasks:
            _, timed_out = await asyncio.wait(tuple(self._tasks), timeout=SLOW_S)
            for task in timed_out:
                print(f"not over after {SLOW_S:g} s: {task.get_name()}", file=sys.stderr, flush=True)

    # --- processes

    async def kill(self, tasks: asyncio.TaskGroup) -> None:
        for model in self.rng.sample(MODELS, len(MODELS)):
            if found := self.target.servers_of(self.config.path_of(model)):
                self.done["SIGKILL"] += 1
                fault = self.expectations.fault_began(model, time.monotonic(), is_kill=True)
                _signal(found[0], signal.SIGKILL)
                await _ended(found[:1])
                self.expectations.fault_ended(fault, time.monotonic())
                return

    async def freeze(self, tasks: asyncio.TaskGroup) -> None:
        candidates, for_s = self.rng.sample(MODELS, len(MODELS)), self.rng.uniform(0.1, 2.0)
        for model in candidates:
            if found := self.target.servers_of(self.config.path_of(model)):
                self.done["SIGSTOP for a moment"] += 1
                fault = self.expectations.fault_began(model, time.monotonic(), is_kill=False)
                _signal(found[0], signal.SIGSTOP)
                await asyncio.sleep(for_s)
                _signal(found[0], signal.SIGCONT)
                self.expectations.fault_ended(fault, time.monotonic())
                return

    # --- files

    async def replace_file(self, tasks: asyncio.TaskGroup) -> None:
        self.done["file replaced"] += 1
        model, number = self.rng.choice(MODELS), self.rng.randrange(VERSIONS)
        then = self.rng.choice((None, None, "reload", "restart", "unload"))
        _write_model(self.expectations, self.config, Version(model, number))
        self._follow(tasks, self._await_new_file(model), f"new file of {model} taken")
        if then == "reload":
            await self._reload()
        elif then is not None:
            self._follow(tasks, self._run_command(then, model), f"{then} {model}")

    async def replace_loaded_file(self, tasks: asyncio.TaskGroup) -> None:
        """Replace the file of a loaded model. It gets a new process even without a request."""
        number = self.rng.randrange(VERSIONS)
        for model in self.rng.sample(MODELS, len(MODELS)):
            if self.target.servers_of(self.config.path_of(model)):
                self.done["file of a loaded model replaced"] += 1
                _write_model(self.expectations, self.config, Version(model, number))
                self._follow(tasks, self._await_new_file(model), f"new file of {model} taken")
                await self._reload()
                return

    async def touch_file(self, tasks: asyncio.TaskGroup) -> None:
        self.done["file touched"] += 1
        self.config.path_of(self.rng.choice(MODELS)).touch()

    async def _await_new_file(self, model: str) -> None:
        """Report when no process can have the old file any more. If the new process does not start, for
        example after a kill, the old one keeps serving, and the log says so.
        """
        changes = self.expectations.changes_of(model)
        old = self.target.servers_of(self.config.path_of(model))
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                await _ended(old)
        except TimeoutError:
            if f"rollout of model {model!r} failed" not in self.target.running.stderr_text:
                self.report_violation(f"{model}: its file was replaced, and {old} still serve the old one")
        else:
            self.expectations.file_applied(model, changes, time.monotonic())

    # --- the config

    async def edit(self, tasks: asyncio.TaskGroup) -> None:
        what, self.config = edited(self.config, self.rng)
        self.done[f"edit: {what}"] += 1
        _write_config(self.config, self.config.text())
        self.expectations.config_written(self.config.names, time.monotonic())
        await self._reload()

    async def reload(self, tasks: asyncio.TaskGroup) -> None:
        await self._reload()

    async def break_config(self, tasks: asyncio.TaskGroup) -> None:
        """Write a broken config, which must change nothing. Then restore the config."""
        self.done["broken config"] += 1
        text = self.rng.choice(BROKEN)
        _write_config(self.config, text)
        for_s = self.rng.uniform(0.0, 1.0)
        answer = await self._post("reload")
        if answer is not None and answer.status_code == 200:
            self.report_violation(f"a broken config was taken: {text!r}: {answer.text}")
        elif answer is not None and answer.json()["error"]["exit_code"] != 78:
            self.report_violation(f"a broken config was refused otherwise than as one: {answer.text}")
        await asyncio.sleep(for_s)
        _write_config(self.config, self.config.text())
        await self._reload()

    async def _reload(self) -> None:
        """Reload by the command, by HTTP, or by a signal. After a signal, a second reload shows its end."""
        how = self.rng.choice(("llamasup reload", "POST reload", "SIGHUP"))
        pause_s = self.rng.uniform(0.0, 0.5)
        self.done[how] += 1
        if how == "SIGHUP":
            self.target.running.send_signal(signal.SIGHUP)
            await asyncio.sleep(pause_s)
        if how == "llamasup reload":
            process = await asyncio.create_subprocess_exec(
                *command("reload", "--json", "--pid", str(self.target.running.pid)),
                env=self.target.environ,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said = (await process.communicate())[0].decode()
            code = process.returncode
        else:
            answer = await self._post("reload")
            if answer is None:
                return
            said, code = answer.text, answer.status_code - 200
        if code:
            self.report_violation(f"a sound config was refused ({how}, {code}): {said}")
        else:
            self.expectations.config_applied(time.monotonic())

    # --- commands

    async def command_model(self, tasks: asyncio.TaskGroup) -> None:
        """Start ``load``, ``unload`` or ``restart`` without waiting for its end."""
        what = self.rng.choice(("load", "unload", "restart"))
        model = self.rng.choice(MODELS)
        self.done[what] += 1
        self._follow(tasks, self._run_command(what, model), f"{what} {model}")

    async def _run_command(self, what: str, model: str) -> None:
        expectations = self.expectations
        began_s = time.monotonic()
        answer = await self._post(f"models/{model}/{what}")
        if answer is None:
            return
        now_s = time.monotonic()
        self.command_results[f"{what}: {answer.status_code}"] += 1
        allowed = {200, 409}  # another command or a change interfered
        if None in expectations.models_of(model, began_s, now_s):
            allowed.add(404)
        if expectations.kills_of(model, began_s - 600.0, now_s):
            allowed.add(503)
        if answer.status_code not in allowed:
            self.report_violation(f"{what} {model}: {answer.status_code} {answer.text}")

    async def _post(self, path: str) -> httpx.Response | None:
        """None: a violation, which is reported."""
        try:
            return await self.target.http.post(f"/llamasup/v1/{path}", timeout=PATIENCE_S)
        except httpx.HTTPError as error:
            self.report_violation(f"POST {path}: {error!r}")
            return None

    # --- background tasks

    def _follow(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> None:
        task = tasks.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def write_first(expectations: Expectations, config: StressConfig) -> None:
    """Write the initial files and config."""
    for model in MODELS:
        _write_model(expectations, config, Version(model, 0))
    _write_config(config, config.text())
    expectations.config_written(config.names, time.monotonic())


def _write_model(expectations: Expectations, config: StressConfig, version: Version) -> None:
    """Replace the file in one step, as a download does."""
    path = config.path_of(version.model)
    half = path.with_suffix(".new")
    half.write_bytes(version.content())
    expectations.file_written(version, time.monotonic())
    half.rename(path)


def _write_config(config: StressConfig, text: str) -> None:
    half = config.path.with_suffix(".new")
    half.write_text(text)
    half.rename(config.path)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


async def _ended(processes: Sequence[psutil.Process]) -> None:
    while any(map(is_alive, processes)):  # noqa: ASYNC110  (other processes set no event)
        await asyncio.sleep(POLL_INTERVAL_S)


_ACTS = (
    (Chaos.kill, 12),
    (Chaos.freeze, 3),
    (Chaos.replace_file, 8),
    (Chaos.touch_file, 3),
    (Chaos.edit, 10),
    (Chaos.reload, 3),
    (Chaos.break_config, 3),
    (Chaos.command_model, 10),
)
