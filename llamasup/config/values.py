"""Everything that a configuration can say: each key once, with what it takes, its default and what it means.

The YAML keys are the fields of these Structs (``_s``, for seconds, is left out there). What reads the file,
the JSON Schema and the table in docs/configuration.md are all made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec

from llamasup.config.issues import Place
from llamasup.config.keys import FilePath, Key, Many, Named, Section
from llamasup.config.kinds import (
    Boolean,
    Endpoint,
    HostName,
    Integer,
    IntegerOr,
    Listen,
    MediaHost,
    Name,
    OneOf,
    Origin,
    Repo,
    RuntimeName,
    SizeText,
    Text,
    Time,
    Url,
)
from llamasup.config.sizes import Size
from llamasup.http.address import Address, TcpAddress, UnixAddress
from llamasup.llama_server.settings import FlashAttn, GpuLayers, Profile
from llamasup.llama_server.slots.policy import MAX_BYTES
from llamasup.models.rules import ModelRule
from llamasup.models.spec import ModelOptions

__all__ = [
    "Auth",
    "Cache",
    "Config",
    "Downloads",
    "Http",
    "Memory",
    "ModelEntry",
    "ModelKeys",
    "Slots",
]

Cache = Literal["huggingface", "llama.cpp"]


def _as_written(field: str) -> str:
    return field.removesuffix("_s")


class _Keys(msgspec.Struct, frozen=True, kw_only=True, rename=_as_written):
    pass


_GGUF: Final = FilePath("the path of a .gguf file", as_text=True)
_LORA: Final = FilePath("the path of a .gguf file, or auto", literal=("auto",), as_text=True)

# --- the sections ------------------------------------------------------------------------------------


class Memory(_Keys, frozen=True, kw_only=True):
    """How much memory the models may take together; what others take of it is left to them."""

    ram: Annotated[
        Size | None, Key(SizeText(), "Of this machine's memory, or of the container's.", "what is free")
    ] = None
    vram: Annotated[Size | None, Key(SizeText(), "Of each GPU's memory.", "what is free")] = None


class ModelKeys(_Keys, frozen=True, kw_only=True):
    """What can be said of a model: under its own name, under a rule, and for all under ``defaults``."""

    ctx_size: Annotated[
        int | None,
        Key(Integer(1), "Context of one request, in tokens.", "what the model and the memory allow"),
    ] = None
    parallel: Annotated[
        int | None, Key(Integer(1, 1024), "Requests that are computed at the same time.", "planned")
    ] = None
    gpu_layers: Annotated[
        GpuLayers | None, Key(IntegerOr(0, ("auto", "all")), "Layers that are kept on the GPU.", "auto")
    ] = None
    threads: Annotated[int | None, Key(Integer(1, 4096), "Threads that compute.", "planned")] = None
    kv_type: Annotated[
        str | None,
        Key(
            Text("a type of llama-server's such as f16, q8_0 or q4_0", "[a-z][a-z0-9_]{0,15}"),
            "Type of the KV cache.",
            "planned",
        ),
    ] = None
    flash_attn: Annotated[FlashAttn | None, Key(OneOf(get_args(FlashAttn)), "Flash attention.", "auto")] = (
        None
    )
    draft_model: Annotated[str | None, Key(_GGUF, "Small model that guesses ahead.", "none")] = None
    mmproj: Annotated[
        str | None,
        Key(
            FilePath("the path of a .gguf file, or none", literal=("none",), as_text=True),
            "Multimodal projector.",
            "the one beside the model",
        ),
    ] = None
    profile: Annotated[
        Profile | None,
        Key(OneOf(get_args(Profile)), "What to favour; plain passes only what is asked for.", "none of them"),
    ] = None
    loras: Annotated[
        tuple[str, ...] | None,
        Key(Many(_LORA), "LoRA adapters; auto: those beside it, for requests that name them.", "none"),
    ] = None
    devices: Annotated[
        tuple[str, ...] | None,
        Key(
            Many(
                Text(
                    "a device of llama-server --list-devices, such as CUDA0", "[A-Za-z][A-Za-z0-9_.:-]{0,63}"
                )
            ),
            "GPUs that it may be on.",
            "all",
        ),
    ] = None
    extra: Annotated[
        tuple[str, ...] | None,
        Key(Many(Text(), or_one=False), "llama-server's own flags, passed on as they are.", "none"),
    ] = None
    check_memory: Annotated[
        bool | None, Key(Boolean(), "Refuse to start it where it seems not to fit.", "true")
    ] = None
    warm_up: Annotated[bool | None, Key(Boolean(), "Serve only after the proof of a real token.", "true")] = (
        None
    )

    ttl_s: Annotated[
        float | None,
        Key(Time(never=True), "Unload it when it was idle for so long.", "never"),
    ] = None
    pin: Annotated[bool | None, Key(Boolean(), "Never unload it for another model.", "false")] = None
    preload: Annotated[bool | None, Key(Boolean(), "Load it at the start.", "false")] = None
    replicas: Annotated[
        int | None, Key(Integer(1, 64), "Processes that serve it behind its one name.", "1")
    ] = None
    keep_slots: Annotated[
        bool | None,
        Key(Boolean(), "Keep its conversations' caches on disk while it is unloaded.", "as slots.keep"),
    ] = None

    max_concurrent: Annotated[
        int | None, Key(Integer(1), "Requests that run at once.", "as many as it has slots")
    ] = None
    max_queued: Annotated[int | None, Key(Integer(0), "Requests that may wait; more are refused.", "256")] = (
        None
    )
    wait_timeout_s: Annotated[
        float | None,
        Key(Time(), "How long a request may wait while it loads, restarts or is busy.", "2m"),
    ] = None
    drain_timeout_s: Annotated[
        float | None, Key(Time(), "How long requests in flight may finish before it is unloaded.", "30s")
    ] = None


class ModelEntry(ModelKeys, frozen=True, kw_only=True):
    """A model by its name. Without path, repo and url it is one that is found, in models_dir or a cache."""

    path: Annotated[
        str | None,
        Key(
            FilePath("the path of a .gguf file, or demo", literal=("demo",), as_text=True),
            "Its file; of several parts, any.",
            "none",
        ),
    ] = None
    repo: Annotated[str | None, Key(Repo(), "Where it is downloaded from, on the hub.", "none")] = None
    url: Annotated[str | None, Key(Url(), "Where it is downloaded from, elsewhere.", "none")] = None
    aliases: Annotated[tuple[str, ...], Key(Many(Name()), "Other names for it.", "none")] = ()
    where: str = ""
    """FILE:LINE, where it is said."""

    @property
    def source(self) -> str | None:
        """An absolute path, ``demo``, ``org/repo[:quant]`` or a URL; None: one that is found somewhere."""
        return self.path or self.repo or self.url

    @property
    def options(self) -> ModelOptions:
        return model_options(self)


def model_options(keys: ModelKeys) -> ModelOptions:
    return ModelOptions(**{each: getattr(keys, each) for each in ModelKeys.__struct_fields__})


class Auth(_Keys, frozen=True, kw_only=True):
    """Who may use it. ``$LLAMASUP_API_KEY`` is a key too."""

    api_key_file: Annotated[
        Path | None,
        Key(
            FilePath("the path of a file of keys", hidden=True),
            "File of keys, as llamasup key makes it.",
            "none",
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool, Key(Boolean(), "Allow another address than loopback without a key.")
    ] = False


class Http(_Keys, frozen=True, kw_only=True):
    """How it talks to clients."""

    allow_hosts: Annotated[
        tuple[str, ...],
        Key(Many(HostName()), "Names accepted in Host, besides localhost and the address.", "none"),
    ] = ()
    allow_origins: Annotated[tuple[str, ...], Key(Many(Origin()), "Web pages that may call.", "none")] = ()
    remote_media: Annotated[
        tuple[str, ...],
        Key(Many(MediaHost()), "Hosts from which llama-server may fetch media URLs of requests.", "false"),
    ] = ()
    tls_cert: Annotated[
        Path | None,
        Key(FilePath("the path of a PEM file"), "Certificate and its chain: serve https.", "none"),
    ] = None
    tls_key: Annotated[Path | None, Key(FilePath("the path of a PEM file"), "Its key.", "none")] = None
    stream_keepalive: Annotated[
        bool,
        Key(Boolean(), "Send comments to a stream that waits, so that nothing on the way gives it up."),
    ] = False
    request_timeout_s: Annotated[
        float | None, Key(Time(zero_is_none=True), "How long a request may take.", "no limit")
    ] = None
    access_log: Annotated[
        Path | None,
        Key(
            FilePath("a path, or - for standard error", literal=("-",)), "One JSON object a request.", "none"
        ),
    ] = None
    slow_request_s: Annotated[
        float | None, Key(Time(zero_is_none=True), "Log requests that take longer to begin.", "none are")
    ] = None


class Downloads(_Keys, frozen=True, kw_only=True):
    """Models that are not here yet."""

    on_demand: Annotated[bool, Key(Boolean(), "Download any org/repo[:quant] that a request names.")] = False
    folder: Annotated[
        Path | None,
        Key(FilePath("a folder"), "Where files go.", "the first of models_dir, else that of pull"),
    ] = None
    endpoint: Annotated[
        str | None,
        Key(Endpoint(), "The hub, or a mirror of it.", "$HF_ENDPOINT, else https://huggingface.co"),
    ] = None
    token_file: Annotated[
        Path | None,
        Key(
            FilePath("the path of a file with a token", hidden=True),
            "Token for the hub.",
            "$HF_TOKEN, if set",
        ),
    ] = None
    private_addresses: Annotated[
        bool, Key(Boolean(), "Download from addresses of this network too, and over http.")
    ] = False
    parallel: Annotated[int, Key(Integer(1, 16), "Connections for one file.")] = 4


class Slots(_Keys, frozen=True, kw_only=True):
    """Conversations' caches of models that are unloaded."""

    keep: Annotated[bool, Key(Boolean(), "Save them when a model is unloaded, and restore them.")] = False
    disk: Annotated[Size, Key(SizeText(percent=False), "What all of them together may take on disk.")] = Size(
        bytes=MAX_BYTES
    )


# --- the whole ---------------------------------------------------------------------------------------

_LOOPBACK: Final = (TcpAddress("127.0.0.1", 8080),)


class Config(_Keys, frozen=True, kw_only=True):
    """A configuration. Paths are absolute, times in seconds."""

    listen: Annotated[
        tuple[Address, ...],
        Key(Many(Listen()), "Where clients come in; several addresses share one port.", "127.0.0.1:8080"),
    ] = _LOOPBACK
    runtime: Annotated[str | None, Key(RuntimeName(), "The llama-server to use.", "auto")] = None
    models_dir: Annotated[
        tuple[Path, ...],
        Key(Many(FilePath("a folder")), "Folders whose models are served, and watched.", "none"),
    ] = ()
    caches: Annotated[
        tuple[Cache, ...],
        Key(Many(OneOf(get_args(Cache))), "Other programs' caches whose models are served.", "none"),
    ] = ()
    memory: Annotated[Memory, Key(Section(Memory), "How much memory the models may take together.")] = (
        Memory()
    )
    max_loaded: Annotated[
        int | None, Key(Integer(1), "Models that are loaded at the same time at most.", "as many as fit")
    ] = None
    default_model: Annotated[
        str | None, Key(Name(), "The model for requests that name none.", "the only one, where there is one")
    ] = None
    swap_after_s: Annotated[
        float,
        Key(Time(), "How long a request waits for a model's place before busy ones have to give way."),
    ] = 5.0
    defaults: Annotated[ModelKeys, Key(Section(ModelKeys), "What is said of every model.")] = ModelKeys()
    models: Annotated[
        Mapping[str, ModelEntry],
        Key(
            Named(Section(ModelEntry), pattern=True),
            "Models by name; a name with * or ? is a rule for all that match, of several the last counts.",
            "those that are found",
        ),
    ] = {}
    groups: Annotated[
        Mapping[str, tuple[str, ...]],
        Key(
            Named(Many(Name(pattern=True), or_one=False)),
            "Of the models of one group at most one is on a device.",
            "none",
        ),
    ] = {}
    auth: Annotated[Auth, Key(Section(Auth), "Who may use it.")] = Auth()
    http: Annotated[Http, Key(Section(Http), "How it talks to clients.")] = Http()
    downloads: Annotated[Downloads, Key(Section(Downloads), "Models that are not here yet.")] = Downloads()
    slots: Annotated[Slots, Key(Section(Slots), "Conversations' caches of models that are unloaded.")] = (
        Slots()
    )
    watch: Annotated[bool, Key(Boolean(), "Take changes of this file over as they are made.")] = False

    lines: Mapping[Place, int] = {}
    """Of each key that the file gives."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of ``listen``: names, addresses and paths of sockets, as ``--host`` takes them."""
        return tuple(each.path if isinstance(each, UnixAddress) else each.host for each in self.listen)

    @property
    def port(self) -> int:
        """The one that all of ``listen`` share; 0 where only sockets are listened on."""
        return next((each.port for each in self.listen if isinstance(each, TcpAddress)), 0)

    @property
    def default_options(self) -> ModelOptions:
        return model_options(self.defaults).over(ModelOptions(keep_slots=self.slots.keep or None))

    @property
    def rules(self) -> tuple[ModelRule, ...]:
        """What is said of models by name and by pattern, in the order of the file."""
        return tuple(
            ModelRule(name, entry.source, entry.aliases, entry.options, entry.where)
            for name, entry in self.models.items()
        )
