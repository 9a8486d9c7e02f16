"""Sizes, plans and probes the processes of a model with a command."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from llamasup.core.config.config_keys import Config
from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.llama_server.answers import ContextWindow, Health, NoAnswer, ServerProgress, TokenProbe
from llamasup.core.llama_server.client import PROBE_TIMEOUT_S, Prober
from llamasup.core.llama_server.warmup import WarmUpRequest
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.measured.load_times import LoadTimes
from llamasup.core.planning.memory.shares import RAM, MemoryBudget
from llamasup.core.pool.estimate import SizedModel, Starter, devices_of
from llamasup.core.settings.declaration import Place
from llamasup.core.settings.model import Engine
from llamasup.core.supervision.plan_protocol import ChildPlan, EnginePlan, FixedPlanner
from llamasup.core.system.process.child import child_environment
from llamasup.core.system.process.platform import find_executable, free_loopback_port
from llamasup.core.system.process.run_once import run_commands
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.core.system.storage.folders import private_folder, state_folder
from llamasup.core.system.text import memory_text
from llamasup.errors import BrokenRuntime, DoesNotFit, FolderUnusable, LlamasupError

_STOP_TIMEOUT_S = 30.0  # docker stop waits 10 s before it kills
_PLACEHOLDER = re.compile(r"\{(port|socket|folder|name)\}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")  # of containers


class CommandEngine(Engine, frozen=True, kw_only=True):
    """The program of a model with a command.

    ``health_path`` answers with one of the statuses in ``healthy`` when the program is ready. ``folder``:
    where its relative paths start.
    """

    command: tuple[str, ...]
    stop: tuple[str, ...]
    health_path: str
    healthy: range
    ram_bytes: int | None
    vram_bytes: int | None
    environment: tuple[str, ...]
    warm_up: WarmUpRequest | None
    folder: str

    @property
    def uses_port(self) -> bool:
        return any("{port}" in word for word in self.command)

    def filled(self, words: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
        """Replace the placeholders. A program with a slash in its name starts at ``folder``."""
        first, *others = (_PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in words)
        return (str(Path(self.folder, first)) if Path(first).name != first else first, *others)

    def size(self, spec: ModelSpec, budget: Mapping[str, int], environ: Mapping[str, str]) -> SizedModel:
        return _sized(self, spec, budget, environ)


def _sized(
    engine: CommandEngine, spec: ModelSpec, budget: Mapping[str, int], environ: Mapping[str, str]
) -> SizedModel:
    """Blocks for a moment. Raises DoesNotFit for a program that needs more than ``budget``."""
    needs = Counter[str]()
    ram_bytes = _measured_bytes(engine) if engine.ram_bytes is None else engine.ram_bytes
    for number in range(spec.replicas):
        needs[RAM] += ram_bytes or 0
        if engine.vram_bytes is not None:
            gpus = devices_of(spec, number) or tuple(name for name in budget if name != RAM)
            # A GPU may share the main memory.
            needs[next((name for name in gpus if name in budget), RAM)] += engine.vram_bytes
    for memory, size_bytes in needs.items():
        if size_bytes > budget.get(memory, size_bytes):
            raise DoesNotFit(
                f"{spec.id!r} needs {memory_text(size_bytes)} of {memory}, and all models together may have "
                f"{memory_text(budget[memory])}.",
                remedy="Correct its `memory` in the config, or allow more with `memory` at the top.",
            )
    is_known = ram_bytes is not None or engine.vram_bytes is not None
    starter = Starter(
        partial(CommandPlanner, engine, spec, environ, is_known),
        cwd=Path(engine.folder),
        prober=partial(_prober, engine),
        program=engine.program,
    )
    return SizedModel(spec, None, +needs, spec, starter)


class CommandPlanner(FixedPlanner):
    """Plans every generation with the same command and a new address."""

    def __init__(
        self,
        engine: CommandEngine,
        spec: ModelSpec,
        environ: Mapping[str, str],
        knows_memory: bool,
        name: str,
        number: int,
        folder: Path,
        prefix: str,
        share: Callable[[], MemoryBudget],
    ) -> None:
        self._engine = engine
        own = spec.settings
        self._nice = own.nice
        self._env = _environment(engine, environ)
        self._folder = folder / f"{prefix}command"
        self._name = _NOT_IN_NAMES.sub("-", name) + (f"-{number}" if number else "")
        self._warnings = () if knows_memory or number else (_unknown_memory(name),)
        self._is_new = True

    def plan(self, generation: int) -> EnginePlan:
        """Raises BrokenRuntime if the program is missing."""
        engine = self._engine
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        address: Address = UnixAddress(str(self._folder / f"{generation}.sock"))
        if engine.uses_port:
            address = TcpAddress("127.0.0.1", free_loopback_port())
        values = {
            "name": self._name,
            "folder": self._folder,
            "socket": address.path if isinstance(address, UnixAddress) else "",
            "port": address.port if isinstance(address, TcpAddress) else "",
        }
        argv = engine.filled(engine.command, values)
        _check_program(argv[0], self._env)
        stop = None
        if engine.stop:
            stop = partial(_run, engine.filled(engine.stop, values), self._env, engine.folder)
            if self._is_new:
                stop()  # a llamasup that was killed may have left it behind
        warnings, self._warnings, self._is_new = self._warnings, (), False
        return EnginePlan(
            argv,
            self._env,
            address,
            nice=self._nice,
            warnings=warnings,
            warm_up=engine.warm_up,
            stop=stop,
        )

    def served(
        self,
        made: EnginePlan,
        log: Sequence[str],
        *,
        resident_bytes: int | None,
        generated: bool,
        times: LoadTimes | None = None,
    ) -> None:
        super().served(made, log, resident_bytes=resident_bytes, generated=generated, times=times)
        if resident_bytes is not None:
            with suppress(FolderUnusable):
                _store().put(_identity(self._engine), resident_bytes)


def _unknown_memory(name: str) -> tuple[str, str]:
    return (
        f"The memory of {name!r} is not known, so no model makes room for it. This load measures it.",
        "Say it in the config, such as memory: {ram: 2GiB}.",
    )


def _environment(engine: CommandEngine, environ: Mapping[str, str]) -> dict[str, str]:
    env = child_environment(
        environ, kind="embedded", platform=sys.platform, config_home="", library_path=None
    )
    del env["XDG_CONFIG_HOME"]
    wanted = ("XDG_CONFIG_HOME", *engine.environment)
    return env | {name: environ[name] for name in wanted if name in environ}


def _check_program(program: str, env: Mapping[str, str]) -> None:
    try:
        find_executable(program, env)
    except BrokenRuntime as error:
        raise BrokenRuntime(error.message, remedy="Correct its `command` in the config.") from None


def _run(command: Sequence[str], env: Mapping[str, str], folder: str) -> str:
    """Run the stop command. Returns why it failed; empty if it did not."""
    try:
        (result,) = run_commands([command], env=env, cwd=folder, timeout_s=_STOP_TIMEOUT_S)
    except OSError as error:
        return f"{command[0]}: {error.strerror or error}"
    if result.too_slow:
        return f"it took more than {_STOP_TIMEOUT_S:g} s"
    last = (result.stderr or result.stdout).strip().rpartition("\n")[2][:200]
    return f"exit code {result.exit_code}{last and f' ({last})'}" if result.exit_code else ""


# --- its memory at earlier loads


def _store() -> FactCache[int]:
    return FactCache("command", int, revision="1", folder=private_folder(state_folder() / "experience"))


def _identity(engine: CommandEngine) -> FileIdentity:
    return FileIdentity(shlex.join(engine.command), 0, 0)


def _measured_bytes(engine: CommandEngine) -> int | None:
    with suppress(FolderUnusable):
        return _store().get(_identity(engine))
    return None


# --- its health


def _prober(engine: CommandEngine, plan: ChildPlan) -> CommandProber:
    return CommandProber(plan.address, engine)


class CommandProber(Prober):
    """A client that requests only the path of the health check, and the warm-up."""

    may_block = True

    def __init__(self, address: Address, engine: CommandEngine) -> None:
        super().__init__(address)
        self._engine = engine

    async def health(self, timeout_s: float = PROBE_TIMEOUT_S) -> Health:
        try:
            status = (await self._get(self._engine.health_path, timeout_s)).status
        except NoAnswer:
            return Health.SILENT
        if status in self._engine.healthy:
            return Health.OK
        return Health.LOADING if status == 503 else Health.SILENT

    async def progress(self, timeout_s: float = PROBE_TIMEOUT_S) -> ServerProgress:
        return ServerProgress()

    async def probe_token(self, request: WarmUpRequest) -> TokenProbe:
        """Its health decides, because only its user knows a small request."""
        is_well = await self.health() is Health.OK
        return TokenProbe(None if is_well else "it does not pass its health check")

    async def context_window(self) -> ContextWindow | None:
        return None

    async def metrics(self) -> str | None:
        return None


def config_problems(config: Config) -> Iterator[tuple[Place, LlamasupError]]:
    """Find the programs that this machine does not have."""
    for name, entry in config.models.items():
        engine = entry.engine
        if isinstance(engine, CommandEngine):
            for key, words in (("command", engine.command), ("stop", engine.stop)):
                try:
                    if words and "{" not in words[0]:
                        _check_program(engine.filled(words[:1], {})[0], os.environ)
                except BrokenRuntime as error:
                    yield ("models", name, key), error
