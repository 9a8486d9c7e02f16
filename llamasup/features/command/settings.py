"""The keys of a model with a command, its mistakes, and the ``Engine`` that the core gets of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from llamasup.core.config.config_keys import Config
from llamasup.core.http.routes import CONTROL, closed_by_default, route_of
from llamasup.core.llama_server.warmup import WarmUpRequest
from llamasup.core.settings.declaration import ConfigKey, Place, Setting, SettingGroup, setting, settings_of
from llamasup.core.settings.kinds import Integer, JsonValues, Many, Named, Section, SizeText, Text
from llamasup.core.settings.model import Engine, ModelEntry, ModelSettings
from llamasup.core.settings.units import Size

_PLACEHOLDERS: Final = ("port", "socket", "folder", "name")
_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]+)\}")
_ALLOWED: Final = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
_PATH: Final = Text("a path such as /health", r"/[!-~]*")
_ROUTE: Final = Text("a path such as /v1/audio/speech, or /sdapi/* for all paths below it", r"/[!-)+-~]+\*?")
_VARIABLE: Final = Text("the name of an environment variable", "[A-Za-z_][A-Za-z0-9_]*")
_OWN_PATHS: Final = ("/", "/health", "/v1/health", "/livez", "/readyz", "/metrics")
# The settings of a model that also hold for other programs.
_HOLD: Final = frozenset(
    (
        *("devices", "nice", "ttl", "pin", "preload", "replicas"),
        *("max_concurrent", "max_queued", "wait_timeout", "drain_timeout"),
    )
)


class HealthCheck(SettingGroup, frozen=True, kw_only=True):
    """The request that shows whether a program is ready."""

    path: str = setting(_PATH, "The path of the request.", default="/", unset="/")
    status: int | None = setting(Integer(200, 599), "The status of its answer.", "200 to 299")

    @property
    def statuses(self) -> range:
        return range(200, 300) if self.status is None else range(self.status, self.status + 1)


class WarmUp(SettingGroup, frozen=True, kw_only=True):
    """The request that proves each start."""

    path: str | None = setting(_PATH, "The path of the POST request.", "required")
    body: Mapping[str, Any] = setting(
        JsonValues("field", "fields of a JSON object", Text(), lambda name, value: None),
        "Its JSON body.",
        "empty",
        unset={},
    )


class Needs(SettingGroup, frozen=True, kw_only=True):
    """The memory of one process."""

    ram: Size | None = setting(SizeText(percent=False), "Its main memory.", "as measured at earlier loads")
    vram: Size | None = setting(
        SizeText(percent=False), "Its memory on the first of its devices, or of all GPUs.", "none"
    )


class CommandEntry(ModelEntry, frozen=True, kw_only=True):
    """A model by its name. Without path, repo, url and command, llamasup finds it in models_dir or caches."""

    command: tuple[str, ...] = setting(
        Many(Text(), or_one=False),
        "Another program that serves the model over HTTP, and its arguments. {port}, {socket}, {folder} and "
        "{name} stand for what llamasup chooses.",
        "llama-server",
        names="program",
        unset=(),
    )
    routes: tuple[str, ...] = setting(
        Many(_ROUTE),
        "The paths that the program serves; /prefix/*: all below.",
        "required",
        names="rights",
        unset=(),
    )
    health: HealthCheck | None = setting(
        Section(HealthCheck, short="path"),
        "The path that answers when the program is ready.",
        "any answer of /",
    )
    memory: Needs = setting(Section(Needs), "The memory of the program.", unset=Needs())
    stop: tuple[str, ...] = setting(
        Many(Text(), or_one=False),
        "The command that stops the program, such as [docker, stop, '{name}'].",
        "SIGTERM",
        names="program",
        unset=(),
    )
    environment: tuple[str, ...] = setting(
        Many(_VARIABLE), "Further environment variables that it gets.", "none", names="flags", unset=()
    )
    warmup: WarmUp | None = setting(
        Section(WarmUp, short="path"), "The request that proves each start.", "none"
    )

    @property
    def engine(self) -> Engine | None:
        if not self.command:
            return None
        from llamasup.features.command.planner import CommandEngine  # here, as few configs have one

        folder = Path(self.where.rpartition(":")[0]).parent if self.where else Path.cwd()
        health, needs, warmup = self.health, self.memory, self.warmup
        return CommandEngine(
            program=Path(self.command[0]).name,
            routes=self.routes,
            warms_up=warmup is not None,
            command=self.command,
            stop=self.stop,
            health_path="/" if health is None else health.path,
            healthy=range(200, 500) if health is None else health.statuses,
            ram_bytes=None if needs.ram is None else needs.ram.bytes,
            vram_bytes=None if needs.vram is None else needs.vram.bytes,
            environment=self.environment,
            warm_up=None if warmup is None else WarmUpRequest(warmup.path or "/", warmup.body),
            folder=str(folder),
        )


# --- mistakes ----------------------------------------------------------------------------------------


def _issues(config: Config, _models_are_known: bool) -> Iterator[tuple[Place, str]]:
    for name, entry in config.models.items():
        if not isinstance(entry, CommandEntry):
            continue  # a program made it
        at: Place = ("models", name)
        given = [key for key in settings_of(CommandEntry) if (*at, key) in config.lines]
        if entry.command:
            yield from _mistakes(entry, at, given)
            if not entry.routes and (*at, "routes", 0) not in config.lines:  # else they are unreadable
                yield at, "routes are missing; list the paths that the program serves"
            continue
        own = [key for key in given if key not in settings_of(ModelEntry)]
        for key in ["command"] if "command" in own else own:
            yield (*at, key), "a model with a command needs command: [PROGRAM, --port, '{port}']"


def _mistakes(entry: CommandEntry, at: Place, given: Sequence[str]) -> Iterator[tuple[Place, str]]:
    unknown = [
        ((*at, key, number), f"unknown placeholder {{{found}}}; allowed are {_ALLOWED}")
        for key, words in (("command", entry.command), ("stop", entry.stop))
        for number, word in enumerate(words)
        for found in _PLACEHOLDER.findall(word)
        if found not in _PLACEHOLDERS
    ]
    yield from unknown
    text = " ".join(entry.command)
    if not unknown and ("{port}" in text) == ("{socket}" in text):
        yield (*at, "command"), "the program learns its address from {port} or {socket}; write one of them"
    for number, route in enumerate(entry.routes):
        path = route.encode()
        known = route_of(path)
        if route in _OWN_PATHS or known is CONTROL or known.lists or closed_by_default(b"POST", path):
            yield (*at, "routes", number), "llamasup answers this path itself, or keeps it closed; remove it"
    if entry.warmup is not None and not entry.warmup.path:
        yield (*at, "warmup"), "path is missing"
    for key in given:
        if key in settings_of(ModelSettings) and key not in _HOLD:
            yield (*at, key), "is a setting of llama-server, and this model has a command; remove it"


MODELS: Final[ConfigKey[Mapping[str, ModelEntry]]] = ConfigKey(
    "models",
    Setting(
        Named(Section(CommandEntry, "ModelEntry"), pattern=True),
        settings_of(Config)["models"][1].about,
        settings_of(Config)["models"][1].default,
    ),
    {},
    after="models",
    issues=_issues,
)
"""Takes the place of the core's key."""
