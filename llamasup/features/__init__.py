"""The list of features: what llamasup can do without, and where each feature attaches to the rest.

A feature is a folder here. It imports the core, and of the other features only those that it ``needs``;
nothing of the core imports it. Only its
``command.py`` is a part of the command line, and may import ``cli/`` and ``service/``. The command line and
the services read this list, and import what it names when it is needed. Only peers is imported by services,
too (docs/design.md, Core and features).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from llamasup.errors import UsageInvalid


class CommandEntry(NamedTuple):
    """A command, the module that defines it, and the first line of its help.

    Not a Struct: ``--help`` would import msgspec for nothing else, which takes 6 ms.
    """

    name: str
    module: str
    summary: str


class Feature(NamedTuple):
    """Names what belongs to a feature, besides its folder and its tests.

    The fields after ``modules`` are seams. Each names a function or class as ``module:name``.
    """

    name: str
    commands: Mapping[str, str] = {}
    """The names of the commands in its ``command.py``, with the first lines of their help."""
    command_module: str = ""
    """The module of its commands, if this is not ``command.py`` in its folder."""
    needs: tuple[str, ...] = ()
    """The features that it imports. It is deleted with them."""
    modules: tuple[str, ...] = ()
    """Modules outside its folder that only its commands use."""
    config_key: str = ""
    """``ConfigKey``: its key of a config."""
    observer: str = ""
    """``(Host) → None``: attaches observers to a service before it starts."""
    pages: str = ""
    """``(Proxy, Address, hosts, ControlTarget, wake) → ConsolePages``: a part of the control application."""
    dialect: str = ""
    """``(keep) → Dialect``: the API of the listener of ``--ollama``."""
    routes: str = ""
    """``(Host, ControlTarget) → Starlette's routes``: paths of the control API."""
    batches: str = ""
    """``(settings, Keys) → (BatchWorker, routes)``: requests that llamasup sends itself."""
    downloads: str = ""
    """``(DownloadSettings, run folder, environ) → Downloads``: downloads the models of ``serve``."""
    fetch_missing: str = ""
    """``(model, View)``: downloads the model of ``run``, if it is not here."""
    catalog: str = ""
    """``(Backend, Config) → CatalogFront``: names in front of those of the models of ``serve``."""
    upgrades: str = ""
    """``(Pool, models, tasks, use_runtime) → Upgrades``: moves all models to another build."""
    follow_runtime: str = ""
    """``(path, running, upgrade)``: waits for other builds at a path (``runtime.watch``)."""
    repair: str = ""
    """``AnswerStages.repair``: checks answers, and may request another one."""
    keep: str = ""
    """``AnswerStages.keep``: keeps a stream, to continue it after its server exits."""
    tools: str = ""
    """``AnswerStages.tools``: turns tools into those that llama-server knows, and names their calls back."""
    sockets: str = ""
    """``(environ) → sockets``: listening sockets that another program opened for this process."""
    manager: str = ""
    """``(environ) → (service, Policy) → ServiceManager``, or None: reports to what started this process."""
    config_commands: str = ""
    """Typer's commands: more subcommands of ``llamasup config``."""
    config_problems: str = ""
    """``(Config) → Iterator[(Place, LlamasupError)]``: what a config names and this machine does not have."""

    @property
    def entries(self) -> Iterator[CommandEntry]:
        """The entries of its commands for the table in ``cli/app.py``."""
        module = self.command_module or f"llamasup.features.{self.name}.command"
        return (CommandEntry(name, module, summary) for name, summary in self.commands.items())


_FLEET_KEY: Final = ("llamasup.fleet.settings", "FLEET")

FEATURES: Final = (
    Feature("agent_tools", tools="llamasup.features.agent_tools.stage:attach"),
    Feature(
        "chat",
        commands={"chat": "Chat with a model in the terminal or in a pipe."},
    ),
    Feature("config_import", config_commands="llamasup.features.config_import.command:commands"),
    Feature(
        "command",
        config_key="llamasup.features.command.settings:MODELS",
        config_problems="llamasup.features.command.planner:config_problems",
    ),
    Feature(
        "connect",
        commands={
            "connect": "Show the settings of a client for a running llamasup.",
            "launch": "Run an agent with a model, and leave nothing behind.",
        },
    ),
    Feature(
        "console",
        commands={"ui": "Open the web console of a running llamasup."},
        pages="llamasup.features.console.routes:pages",
    ),
    Feature("continuation", keep="llamasup.features.continuation.continued_stream:keep"),
    Feature(
        "doctor",
        commands={
            "doctor": "Check this machine for problems, and show a remedy for each.",
            "inspect": "Show facts about a model, and whether it fits in memory.",
        },
    ),
    Feature(
        "ollama",
        config_key="llamasup.features.ollama.settings:OLLAMA",
        dialect="llamasup.features.ollama.dialect:OllamaDialect",
    ),
    Feature(
        "downloads",
        commands={"pull": "Download models from Hugging Face or from an https URL."},
        config_key="llamasup.features.downloads.settings:DOWNLOADS",
        downloads="llamasup.features.downloads.manager:Downloads",
        fetch_missing="llamasup.features.downloads.command:ensure_downloaded",
    ),
    Feature(
        "router",
        config_key="llamasup.features.router.settings:ROUTER",
        routes="llamasup.features.router.routes:routes",
    ),
    Feature(
        "runtimes",
        commands={"runtime": "Install builds of llama.cpp, and choose one."},
        needs=("downloads",),
    ),
    Feature("repair", repair="llamasup.features.repair.second_try:repair"),
    Feature(
        "systemd",
        commands={"service": "Run llamasup as a systemd service."},
        sockets="llamasup.features.systemd.notify:take_sockets",
        manager="llamasup.features.systemd.attach:manager",
    ),
    Feature("tracing", observer="llamasup.features.tracing.attach:attach"),
    Feature(
        "tuning",
        commands={"tune": "Measure which flags make a model better here, and keep them."},
    ),
    Feature(
        "upgrade",
        commands={"upgrade": "Move to another build of llama.cpp once it is proven."},
        routes="llamasup.features.upgrade.routes:routes",
        upgrades="llamasup.features.upgrade.upgrade:Upgrade",
        follow_runtime="llamasup.features.upgrade.follow:follow",
    ),
    Feature(
        "usage",
        commands={"usage": "Show the requests and tokens of each model, key and day."},
        config_key="llamasup.features.usage.settings:USAGE",
        observer="llamasup.features.usage.recorder:attach",
        routes="llamasup.features.usage.routes:routes",
    ),
    Feature(
        "batch",
        commands={"batch": "Run the requests of a file, and continue after interruptions."},
        command_module="llamasup.cli.commands.batch",
        modules=("llamasup.cli.batch_server", "llamasup.cli.output.batch_view"),
        config_key="llamasup.features.batch.settings:BATCHES",
        batches="llamasup.features.batch.attach:batches",
        config_problems="llamasup.features.batch.attach:config_problems",
    ),
    Feature(
        "peers",
        config_key="llamasup.features.peers.settings:PEERS",
        config_problems="llamasup.features.peers.static:config_problems",
    ),
    Feature(
        "virtual",
        config_key="llamasup.features.virtual.settings:VIRTUAL_MODELS",
        catalog="llamasup.features.virtual.virtual_backend:VirtualBackend",
    ),
    Feature(
        "wrap",
        commands={"wrap": "Supervise an existing llama-server command line, unchanged."},
    ),
)


def attached(seam: str) -> Iterator[Any]:
    """Import and return what the features attach to a seam, which is the name of a field of ``Feature``."""
    for feature in FEATURES:
        if where := getattr(feature, seam):
            module, _, name = where.partition(":")
            yield getattr(import_module(module), name)


def only_attached(seam: str) -> Any | None:
    """Import and return what is attached to a seam of only one feature; None without this feature."""
    return next(attached(seam), None)


@cache
def config_keys() -> tuple[Any, ...]:
    """Import and return the ``ConfigKey`` of each feature and of ``fleet/``, in the order of the docs."""
    module, name = _FLEET_KEY
    return (*attached("config_key"), getattr(import_module(module), name))


def config_key(name: str) -> Any | None:
    """Return the ``ConfigKey`` of this name; None without its feature."""
    return next((key for key in config_keys() if key.name == name), None)


def key_of_option(name: str, option: str) -> Any:
    """Return the ``ConfigKey`` of this name, for an option. Raises UsageInvalid without its feature."""
    if (key := config_key(name)) is None:
        raise missing_feature(option)
    return key


def missing_feature(option: str) -> UsageInvalid:
    from llamasup.errors import UsageInvalid  # here, as --help does without it

    return UsageInvalid(
        f"This llamasup was built without the feature of {option}.",
        remedy="Install the complete package llamasup.",
    )
