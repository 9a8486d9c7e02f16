"""The list of features: what llamasup can do without, and where each feature attaches to the rest.

A feature is a folder here. It imports the core and no other feature; nothing of the core imports it. Only its
``command.py`` is a part of the command line, and may import ``cli/`` and ``service/``. The command line and
the services read this list, and import what it names when it is needed. Only peers is imported by services,
too (docs/design.md, Core and features).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple


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
    modules: tuple[str, ...] = ()
    """Modules outside its folder that only its commands use."""
    observer: str = ""
    """``(Host) → None``: attaches observers to a service before it starts."""
    pages: str = ""
    """``(Proxy, Address, hosts, ControlTarget, wake) → ConsolePages``: a part of the control application."""
    dialect: str = ""
    """``(keep) → Dialect``: the API of the listener of ``--ollama``."""
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
    sockets: str = ""
    """``(environ) → sockets``: listening sockets that another program opened for this process."""
    manager: str = ""
    """``(environ) → (service, Policy) → ServiceManager``, or None: reports to what started this process."""
    config_problems: str = ""
    """``(Config) → Iterator[(Place, LlamasupError)]``: what a config names and this machine does not have."""

    @property
    def entries(self) -> Iterator[CommandEntry]:
        """The entries of its commands for the table in ``cli/app.py``."""
        module = self.command_module or f"llamasup.features.{self.name}.command"
        return (CommandEntry(name, module, summary) for name, summary in self.commands.items())


FEATURES: Final = (
    Feature(
        "batch",
        commands={"batch": "Run the requests of a file, and continue after interruptions."},
        command_module="llamasup.cli.commands.batch",
        modules=("llamasup.cli.batch_server", "llamasup.cli.output.batch_view"),
        batches="llamasup.features.batch.attach:batches",
        config_problems="llamasup.features.batch.attach:config_problems",
    ),
    Feature(
        "connect",
        commands={"connect": "Show the settings of a client for a running llamasup."},
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
        "downloads",
        commands={"pull": "Download models from Hugging Face or from an https URL."},
        downloads="llamasup.features.downloads.manager:Downloads",
        fetch_missing="llamasup.features.downloads.command:ensure_downloaded",
    ),
    Feature("ollama", dialect="llamasup.features.ollama.dialect:OllamaDialect"),
    Feature("peers", config_problems="llamasup.features.peers.static:config_problems"),
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
        upgrades="llamasup.features.upgrade.upgrade:Upgrade",
        follow_runtime="llamasup.features.upgrade.follow:follow",
    ),
    Feature(
        "usage",
        commands={"usage": "Show the requests and tokens of each model, key and day."},
        observer="llamasup.features.usage.recorder:attach",
    ),
    Feature("virtual", catalog="llamasup.features.virtual.virtual_backend:VirtualBackend"),
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
