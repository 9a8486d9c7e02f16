"""The configuration of ``serve``: the settings of its sections and models, and those at the top of the file.

The reader, the JSON Schema and the tables in docs/configuration.md come from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from msgspec.structs import replace

from llamasup.core.config.issues import Place
from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.models.rules import ModelRule
from llamasup.core.settings.address_kinds import Listen
from llamasup.core.settings.declaration import Setting, SettingGroup
from llamasup.core.settings.kinds import (
    Boolean,
    FilePath,
    Integer,
    Many,
    Name,
    Named,
    OneOf,
    Section,
    Time,
)
from llamasup.core.settings.model import ModelEntry, ModelSettings
from llamasup.core.settings.sections import (
    Auth,
    Batches,
    Downloads,
    Fleet,
    Http,
    Memory,
    Ollama,
    PeerEntry,
    RuntimeChoice,
    Slots,
    Usage,
    VirtualEntry,
)

Cache = Literal["huggingface", "llama.cpp"]

_LOOPBACK: Final = (TcpAddress("127.0.0.1", 8080),)


class Config(SettingGroup, frozen=True, kw_only=True):
    """A configuration. Paths are absolute, times in seconds."""

    listen: Annotated[
        tuple[Address, ...],
        Setting(
            Many(Listen()),
            "The addresses for clients. All TCP addresses have the same port.",
            "127.0.0.1:8080",
        ),
    ] = _LOOPBACK
    runtime: Annotated[
        RuntimeChoice,
        Setting(Section(RuntimeChoice, short="path"), "The llama-server to use.", "auto"),
    ] = RuntimeChoice()
    models_dir: Annotated[
        tuple[Path, ...],
        Setting(
            Many(FilePath("a folder")),
            "Folders of models to serve. llamasup watches them for changes.",
            "none",
        ),
    ] = ()
    follow_links: Annotated[
        bool,
        Setting(
            Boolean(),
            "Serve files outside of these folders to which links in them lead. Only in folders of this user.",
            names="path",
        ),
    ] = False
    caches: Annotated[
        tuple[Cache, ...],
        Setting(
            Many(OneOf(get_args(Cache))),
            "Caches of other programs with models to serve.",
            "none",
            names="path",
        ),
    ] = ()
    memory: Annotated[
        Memory, Setting(Section(Memory), "The most memory that all models together may use.")
    ] = Memory()
    max_loaded: Annotated[
        int | None,
        Setting(Integer(1), "The number of models that may be loaded at the same time.", "as many as fit"),
    ] = None
    default_model: Annotated[
        str | None,
        Setting(Name(), "The model for requests that name no model.", "the only model, if there is one"),
    ] = None
    swap_after_s: Annotated[
        float,
        Setting(
            Time(), "How long a request for an unloaded model waits before busy models have to make room."
        ),
    ] = 5.0
    defaults: Annotated[
        ModelSettings, Setting(Section(ModelSettings, "ModelKeys"), "Settings for all models.")
    ] = ModelSettings()
    models: Annotated[
        Mapping[str, ModelEntry],
        Setting(
            Named(Section(ModelEntry), pattern=True),
            "Models by name. A name with * or ? is a rule for all matching models; the last rule wins.",
            "the models that llamasup finds",
        ),
    ] = {}
    virtual_models: Annotated[
        Mapping[str, VirtualEntry],
        Setting(
            Named(Section(VirtualEntry)),
            "Further names for models, with parameters of their own, or for one of several models.",
            "none",
        ),
    ] = {}
    groups: Annotated[
        Mapping[str, tuple[str, ...]],
        Setting(
            Named(Many(Name(pattern=True), or_one=False)),
            "Groups of models. On each device, at most one model of a group is loaded.",
            "none",
        ),
    ] = {}
    auth: Annotated[Auth, Setting(Section(Auth), "API keys.")] = Auth()
    http: Annotated[Http, Setting(Section(Http), "Connections of clients, and logs of requests.")] = Http()
    ollama: Annotated[Ollama, Setting(Section(Ollama), "Ollama's API.")] = Ollama()
    downloads: Annotated[Downloads, Setting(Section(Downloads), "Downloads of models.")] = Downloads()
    slots: Annotated[Slots, Setting(Section(Slots), "Conversation caches of unloaded models.")] = Slots()
    usage: Annotated[Usage, Setting(Section(Usage), "Sums of requests and tokens.")] = Usage()
    batches: Annotated[Batches, Setting(Section(Batches), "The API for batches.")] = Batches()
    peers: Annotated[
        Mapping[str, PeerEntry],
        Setting(
            Named(Section(PeerEntry)),
            "Other llamasup nodes by name, whose models are served here too.",
            "none",
        ),
    ] = {}
    fleet: Annotated[Fleet | None, Setting(Section(Fleet), "Models on a Ray cluster.", "none")] = None
    watch: Annotated[bool, Setting(Boolean(), "Reload the config when this file changes.")] = False

    lines: Mapping[Place, int] = {}
    """The line of each key in the file."""

    @property
    def has_models_here(self) -> bool:
        """Whether it names models or folders of this machine, and not only other nodes."""
        return bool(self.models or self.models_dir or self.caches)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of ``listen``, in the notation of ``--host``: names, addresses and paths of sockets."""
        return tuple(
            address.path if isinstance(address, UnixAddress) else address.host for address in self.listen
        )

    @property
    def port(self) -> int:
        """The port of all TCP addresses in ``listen``; 0 if it has only sockets."""
        return next((address.port for address in self.listen if isinstance(address, TcpAddress)), 0)

    @property
    def is_front(self) -> bool:
        """Whether it serves the models of a fleet, and none itself."""
        return self.fleet is not None and self.fleet.directory is not None

    def without_models(self) -> Config:
        """Leave out what a front does not need: settings of the nodes, whose files may not exist here.

        ``defaults`` keeps the limits of the queue.
        """
        fleet = self.fleet and Fleet(directory=self.fleet.directory, key_file=self.fleet.key_file)
        own = self.defaults
        return replace(
            self,
            models={},
            groups={},
            models_dir=(),
            caches=(),
            runtime=RuntimeChoice(),
            memory=Memory(),
            downloads=Downloads(),
            slots=Slots(),
            defaults=ModelSettings(
                wait_timeout_s=own.wait_timeout_s,
                max_queued=own.max_queued,
                continue_streams=own.continue_streams,
            ),
            fleet=fleet,
        )

    @property
    def default_options(self) -> ModelSettings:
        return self.defaults.over(ModelSettings(keep_slots=self.slots.keep or None))

    @property
    def rules(self) -> tuple[ModelRule, ...]:
        """Settings of models by name and by pattern, in the order of the file."""
        return tuple(
            ModelRule(name, entry.source, entry.aliases, entry.options, entry.where)
            for name, entry in self.models.items()
        )
