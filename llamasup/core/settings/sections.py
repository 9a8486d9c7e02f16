"""The settings of the sections of a config, each declared once. Paths are absolute, times in seconds."""

# The annotations are values, not strings: the command line reads them at each start.
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from llamasup.core.http.address import Address
from llamasup.core.settings.address_kinds import HostName, Listen, MediaHost, Origin, ProxyAddress
from llamasup.core.settings.declaration import Setting, SettingGroup
from llamasup.core.settings.kinds import (
    Boolean,
    Endpoint,
    FilePath,
    Integer,
    Many,
    Name,
    Named,
    NodeUrl,
    OneOf,
    Parameters,
    RuntimeName,
    Section,
    SizeText,
    Text,
    Time,
)
from llamasup.core.settings.parameters import ParameterName
from llamasup.core.settings.units import Size

SLOTS_BYTES: Final = 10 << 30
"""The default limit for all saved slots: ten conversations of 8,192 tokens with a model of 8 billion
parameters (128 KiB per token in f16).
"""

USAGE_KEEP_DAYS: Final = 400
"""A year, and the month in which it is compared with the year before."""


class RuntimeChoice(SettingGroup, frozen=True, kw_only=True):
    """The llama-server to use."""

    path: Annotated[
        str | None,
        Setting(RuntimeName(), "The llama-server. auto: the first that llamasup finds.", "auto"),
    ] = None
    watch: Annotated[
        bool,
        Setting(
            Boolean(),
            "Move the models to the new build when the symbolic link in path changes, if the build proves "
            "itself.",
        ),
    ] = False


class Memory(SettingGroup, frozen=True, kw_only=True):
    """The most memory that all models together may use. They never get memory that other programs use."""

    ram: Annotated[
        Size | None,
        Setting(SizeText(), "Main memory for models, of this machine or its container.", "all free memory"),
    ] = None
    vram: Annotated[
        Size | None, Setting(SizeText(), "GPU memory for models, on each GPU.", "all free memory")
    ] = None


class Auth(SettingGroup, frozen=True, kw_only=True):
    """API keys. ``$LLAMASUP_API_KEY`` is a valid key too."""

    api_key_file: Annotated[
        Path | None,
        Setting(
            FilePath("the path of a key file", hidden=True),
            "The file of API keys, written by llamasup key.",
            "none",
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool,
        Setting(
            Boolean(),
            "Allow listening on addresses that other machines can reach, without a key.",
            names="rights",
        ),
    ] = False


ApiConfig = Literal["safe", "full"]


class Http(SettingGroup, frozen=True, kw_only=True):
    """Connections of clients, and logs of requests."""

    allow_hosts: Annotated[
        tuple[str, ...],
        Setting(
            Many(HostName()),
            "Further names that the Host header may have. localhost and the address are always allowed.",
            "none",
        ),
    ] = ()
    allow_origins: Annotated[
        tuple[str, ...], Setting(Many(Origin()), "Origins of web pages that may send requests.", "none")
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Setting(
            Many(ProxyAddress()),
            "Reverse proxies whose X-Forwarded-For names the client, for limits, turns and logs.",
            "none",
        ),
    ] = ()
    remote_media: Annotated[
        tuple[str, ...],
        Setting(
            Many(MediaHost()), "Hosts from which llama-server may fetch the media URLs of requests.", "false"
        ),
    ] = ()
    max_body: Annotated[
        Size | None,
        Setting(
            SizeText(percent=False),
            "The largest body of a request. llama-server itself accepts 100 MiB.",
            "100MiB, or 1/64 of the memory if that is less, but at least 32MiB",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Setting(FilePath("the path of a PEM file"), "The certificate and its chain, to serve https.", "none"),
    ] = None
    tls_key: Annotated[
        Path | None,
        Setting(FilePath("the path of a PEM file"), "The private key of the certificate.", "none"),
    ] = None
    stream_keepalive: Annotated[
        bool,
        Setting(Boolean(), "Send SSE comments while a stream waits, so that no proxy on the way closes it."),
    ] = False
    request_timeout_s: Annotated[
        float | None, Setting(Time(zero_is_none=True), "The longest time for a request.", "no limit")
    ] = None
    access_log: Annotated[
        Path | None,
        Setting(
            FilePath("a path, or - for standard error", literal=("-",)),
            "The log file with one line of JSON for each request.",
            "none",
        ),
    ] = None
    slow_request_s: Annotated[
        float | None,
        Setting(
            Time(zero_is_none=True),
            "Log requests whose response takes longer than this to begin.",
            "no requests are logged",
        ),
    ] = None
    ui: Annotated[bool, Setting(Boolean(), "Serve the web console at /llamasup/.")] = True
    api_config: Annotated[
        ApiConfig,
        Setting(
            OneOf(get_args(ApiConfig)),
            "What a config that comes through an address for clients, or from the console, may change. safe: "
            "nothing that names a program, a path, a host or flags. full: these too.",
            names="rights",
        ),
    ] = "safe"


class Ollama(SettingGroup, frozen=True, kw_only=True):
    """Ollama's API (docs/ollama.md)."""

    listen: Annotated[
        Address | None,
        Setting(
            Listen(),
            "The address for clients of Ollama, such as 127.0.0.1:11434.",
            "Ollama's API is not served",
        ),
    ] = None


class PeerEntry(SettingGroup, frozen=True, kw_only=True):
    """Another llamasup, whose models are served here too (docs/fleet.md)."""

    url: Annotated[
        str | None,
        Setting(NodeUrl(), "Where it listens. http only on this machine or a private address.", "required"),
    ] = None
    key_file: Annotated[
        Path | None,
        Setting(
            FilePath("the path of a file with a key", hidden=True),
            "The file with its API key for this node, alone. There, it has the rights inference,node.",
            "none; required for other machines",
        ),
    ] = None
    ca_file: Annotated[
        Path | None,
        Setting(
            FilePath("the path of a PEM file"),
            "The CA that signed its certificate, or that certificate itself.",
            "the CAs of the system",
        ),
    ] = None


class VirtualEntry(SettingGroup, frozen=True, kw_only=True):
    """A name for a model with parameters of its own, or for one of several (docs/virtual-models.md)."""

    model: Annotated[
        str | None,
        Setting(Name(), "The model, or another virtual model.", "required, unless any is given"),
    ] = None
    any: Annotated[
        tuple[str, ...],
        Setting(
            Many(Name()),
            "Several models. A request takes one that is loaded, or the one that loads soonest.",
            "none",
        ),
    ] = ()
    set: Annotated[
        Mapping[str, Any],
        Setting(Parameters(), "Parameters that each request gets, whatever the client sends.", "none"),
    ] = {}
    default: Annotated[
        Mapping[str, Any],
        Setting(Parameters(), "Parameters that a request gets if the client does not send them.", "none"),
    ] = {}
    remove: Annotated[
        tuple[str, ...],
        Setting(Many(ParameterName()), "Parameters that are removed from each request.", "none"),
    ] = ()
    system: Annotated[
        str | None,
        Setting(Text(), "Text in front of the system prompt of each chat.", "none", names="nothing"),
    ] = None


class Downloads(SettingGroup, frozen=True, kw_only=True):
    """Downloads of models."""

    on_demand: Annotated[bool, Setting(Boolean(), "Download each org/repo[:quant] that a request names.")] = (
        False
    )
    folder: Annotated[
        Path | None,
        Setting(
            FilePath("a folder"),
            "The folder for downloaded files.",
            "the first of models_dir, else the folder of llamasup pull",
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        Setting(
            Endpoint(), "The URL of the hub or of a mirror.", "$HF_ENDPOINT, else https://huggingface.co"
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        Setting(
            FilePath("the path of a file with a token", hidden=True),
            "The file with the token for the hub.",
            "$HF_TOKEN, if set",
        ),
    ] = None
    private_addresses: Annotated[
        bool, Setting(Boolean(), "Allow downloads from private addresses, and over http.", names="host")
    ] = False
    parallel: Annotated[int, Setting(Integer(1, 16), "The number of connections for one file.")] = 4


class Slots(SettingGroup, frozen=True, kw_only=True):
    """Conversation caches of unloaded models."""

    keep: Annotated[
        bool,
        Setting(Boolean(), "Save the caches when a model is unloaded, and restore them when it is loaded."),
    ] = False
    disk: Annotated[Size, Setting(SizeText(percent=False), "The disk space for all caches together.")] = Size(
        bytes=SLOTS_BYTES
    )


class Usage(SettingGroup, frozen=True, kw_only=True):
    """Sums of requests, tokens and slot seconds by model, key and day, in the state folder."""

    enabled: Annotated[bool, Setting(Boolean(), "Count the usage, and save it once a minute.")] = True
    keep_days: Annotated[int, Setting(Integer(1, 36_500), "How many days to keep, with today.")] = (
        USAGE_KEEP_DAYS
    )


_HOURS: Final = r"(?:[01]\d|2[0-3]):[0-5]\d-(?:[01]\d|2[0-3]):[0-5]\d"


class Batches(SettingGroup, frozen=True, kw_only=True):
    """The API for batches: ``/v1/files`` and ``/v1/batches`` of OpenAI's client."""

    enabled: Annotated[bool, Setting(Boolean(), "Serve /v1/files and /v1/batches.")] = False
    folder: Annotated[
        Path | None,
        Setting(
            FilePath("a folder"), "The folder of the files: a new or an empty one.", "one in the state folder"
        ),
    ] = None
    max_file: Annotated[Size, Setting(SizeText(percent=False), "The largest file of a client.")] = Size(
        bytes=512 << 20
    )
    disk: Annotated[
        Size,
        Setting(SizeText(percent=False), "The disk space for all files together; then uploads are refused."),
    ] = Size(bytes=10 << 30)
    max_files: Annotated[int, Setting(Integer(1, 1_000_000), "The number of files of a client.")] = 1_000
    max_lines: Annotated[int, Setting(Integer(1, 10_000_000), "The number of lines of a batch.")] = 100_000
    max_batches: Annotated[
        int, Setting(Integer(1, 10_000), "The number of batches of a client that are not over.")
    ] = 20
    keep_days: Annotated[
        int, Setting(Integer(1, 3_650), "How many days to keep files, and batches that are over.")
    ] = 30
    only_between: Annotated[
        str | None,
        Setting(
            Text("hours such as 22:00-07:00", _HOURS),
            "The hours of the local time in which batches run.",
            "all day",
        ),
    ] = None


WhenIdle = Literal["end", "sleep"]


class FleetModel(SettingGroup, frozen=True, kw_only=True):
    """The settings of one model, where they differ from those of the others."""

    min_replicas: Annotated[
        int | None, Setting(Integer(0, 10_000), "The least number of replicas.", "that of fleet")
    ] = None
    max_replicas: Annotated[
        int | None, Setting(Integer(1, 10_000), "The largest number of replicas.", "that of fleet")
    ] = None
    cpus: Annotated[
        int | None, Setting(Integer(0, 4096), "The CPUs that Ray reserves for a replica.", "from the plan")
    ] = None
    gpus: Annotated[
        int | None, Setting(Integer(0, 64), "The GPUs that Ray reserves for a replica.", "that of fleet")
    ] = None
    memory: Annotated[
        Size | None,
        Setting(SizeText(percent=False), "The main memory that Ray reserves for a replica.", "from the plan"),
    ] = None
    when_idle: Annotated[
        WhenIdle | None,
        Setting(OneOf(get_args(WhenIdle)), "What its replicas do when they are idle.", "that of fleet"),
    ] = None


_LISTEN: Final = r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"


_FLEET_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class Fleet(SettingGroup, frozen=True, kw_only=True):
    """Models on a Ray cluster (docs/fleet.md). ``llamasup fleet deploy`` deploys them. ``llamasup serve``
    with a ``directory`` is a front of the fleet, and loads no model itself.
    """

    name: Annotated[
        str,
        Setting(
            Text("up to 63 letters, digits, dots, dashes and underscores", _FLEET_NAME),
            "The name of the fleet in its Ray cluster, which may have several.",
        ),
    ] = "llamasup"
    directory: Annotated[
        str | None,
        Setting(
            Endpoint("the URL of the fleet on Ray Serve, such as http://head:8000"),
            "The fleet whose nodes this llamasup sends requests to.",
            "none",
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        Setting(
            FilePath("the path of a file with the fleet's secret", hidden=True),
            "The file with the secret of the fleet. `llamasup fleet deploy` writes it if it is missing.",
            "fleet.key next to the user's config",
        ),
    ] = None
    ray: Annotated[
        str,
        Setting(
            Text("HOST:PORT, or auto"),
            "The head of the Ray cluster to which this machine belongs. auto: found here.",
            names="host",
        ),
    ] = "auto"
    listen: Annotated[
        str | None,
        Setting(
            Text("HOST:PORT", _LISTEN),
            "Where Ray Serve listens on the head for the fronts, if `llamasup fleet deploy` starts it.",
            "the port of directory, on all addresses unless it is a loopback one; else 127.0.0.1:8000",
        ),
    ] = None
    ingress: Annotated[
        bool,
        Setting(
            Boolean(),
            "Serve the models at the address of Ray Serve too, for clients that use no front "
            "(docs/fleet.md, Two ways in).",
        ),
    ] = False
    min_replicas: Annotated[
        int,
        Setting(Integer(0, 10_000), "The least number of replicas of each model. 0: none without requests."),
    ] = 0
    max_replicas: Annotated[
        int, Setting(Integer(1, 10_000), "The largest number of replicas of each model.")
    ] = 1
    gpus: Annotated[
        int | None,
        Setting(
            Integer(0, 64),
            "The GPUs that Ray reserves for a replica. Needed if the deploying machine has no GPU.",
            "from the plan",
        ),
    ] = None
    target_load: Annotated[
        int,
        Setting(
            Integer(1, 100), "The percentage of its slots that a replica should have busy; else more start."
        ),
    ] = 80
    upscale_after_s: Annotated[
        float, Setting(Time(), "How long the load must be above the target before replicas start.")
    ] = 5.0
    downscale_after_s: Annotated[
        float, Setting(Time(), "How long the load must be below the target before replicas stop.")
    ] = 120.0
    idle_after_s: Annotated[
        float, Setting(Time(), "How long a replica must be idle before the last one ends, or it sleeps.")
    ] = 600.0
    when_idle: Annotated[
        WhenIdle,
        Setting(
            OneOf(get_args(WhenIdle)),
            "What replicas do when they are idle. end: the last one ends. sleep: each unloads its "
            "model, and ends only when Ray needs the room for another replica of the fleet.",
        ),
    ] = "end"
    drain_timeout_s: Annotated[
        float,
        Setting(
            Time(),
            "How long a replica that is to end waits for its running requests; then they end with an error.",
        ),
    ] = 600.0
    surge: Annotated[
        bool,
        Setting(
            Boolean(),
            "During an update, start new replicas before old ones stop. Without free resources for all of "
            "them, the update waits.",
        ),
    ] = False
    models: Annotated[
        Mapping[str, FleetModel],
        Setting(Named(Section(FleetModel)), "Models by name, where they differ from the keys above.", "none"),
    ] = {}
