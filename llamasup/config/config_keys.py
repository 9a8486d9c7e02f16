"""All keys of a configuration, each with its kind, default and help text.

The YAML keys are the fields of these Structs, without ``_s`` for seconds. The reader, the JSON Schema and the
tables in docs/configuration.md come from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec

from llamasup.config.issues import Place
from llamasup.config.kinds import (
    Boolean,
    Endpoint,
    FilePath,
    HostName,
    Integer,
    IntegerOr,
    Key,
    Listen,
    Many,
    MediaHost,
    Name,
    Named,
    OneOf,
    Origin,
    Repo,
    RuntimeName,
    Section,
    SizeText,
    Text,
    Time,
    Url,
)
from llamasup.config.units import Size
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


def _yaml_key(field: str) -> str:
    return field.removesuffix("_s")


class _Keys(msgspec.Struct, frozen=True, kw_only=True, rename=_yaml_key):
    pass


_GGUF: Final = FilePath("the path of a .gguf file", as_text=True)
_LORA: Final = FilePath("the path of a .gguf file, or auto", literal=("auto",), as_text=True)

# --- the sections ------------------------------------------------------------------------------------


class Memory(_Keys, frozen=True, kw_only=True):
    """The most memory that all models together may use. They never get memory that other programs use."""

    ram: Annotated[
        Size | None,
        Key(SizeText(), "Main memory for models, of this machine or its container.", "all free memory"),
    ] = None
    vram: Annotated[
        Size | None, Key(SizeText(), "GPU memory for models, on each GPU.", "all free memory")
    ] = None


class ModelKeys(_Keys, frozen=True, kw_only=True):
    """Settings of models. They apply to all models, or to those of an entry in ``models``."""

    ctx_size: Annotated[
        int | None,
        Key(
            Integer(1),
            "The context of one request, in tokens.",
            "the largest that the model and the memory allow",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        Key(
            Integer(1, 1024),
            "The number of slots: how many requests the server computes at the same time.",
            "planned",
        ),
    ] = None
    gpu_layers: Annotated[
        GpuLayers | None,
        Key(IntegerOr(0, ("auto", "all")), "The number of layers on the GPU. auto: as many as fit.", "auto"),
    ] = None
    threads: Annotated[int | None, Key(Integer(1, 4096), "CPU threads for computing.", "planned")] = None
    kv_type: Annotated[
        str | None,
        Key(
            Text("a KV cache type such as f16, q8_0 or q4_0", "[a-z][a-z0-9_]{0,15}"),
            "The type of the KV cache.",
            "planned",
        ),
    ] = None
    flash_attn: Annotated[
        FlashAttn | None,
        Key(
            OneOf(get_args(FlashAttn)),
            "Whether to use flash attention. auto: on where it is supported.",
            "auto",
        ),
    ] = None
    draft_model: Annotated[str | None, Key(_GGUF, "The draft model for speculative decoding.", "none")] = None
    mmproj: Annotated[
        str | None,
        Key(
            FilePath("the path of a .gguf file, or none", literal=("none",), as_text=True),
            "The multimodal projector. none: load no projector.",
            "the one in the model's folder",
        ),
    ] = None
    profile: Annotated[
        Profile | None,
        Key(
            OneOf(get_args(Profile)),
            "The planning goal. plain: pass only the flags that you set.",
            "no profile",
        ),
    ] = None
    loras: Annotated[
        tuple[str, ...] | None,
        Key(
            Many(_LORA),
            "LoRA adapters. auto: those in the model's folder, for requests that name them.",
            "none",
        ),
    ] = None
    devices: Annotated[
        tuple[str, ...] | None,
        Key(
            Many(
                Text(
                    "a device of llama-server --list-devices, such as CUDA0", "[A-Za-z][A-Za-z0-9_.:-]{0,63}"
                )
            ),
            "The GPUs that the model may use.",
            "all",
        ),
    ] = None
    extra: Annotated[
        tuple[str, ...] | None,
        Key(Many(Text(), or_one=False), "Flags for llama-server, passed on unchanged.", "none"),
    ] = None
    check_memory: Annotated[
        bool | None, Key(Boolean(), "Refuse a start if the estimated memory does not fit.", "true")
    ] = None
    warm_up: Annotated[
        bool | None,
        Key(Boolean(), "Generate one token after each start, before the first request is served.", "true"),
    ] = None

    ttl_s: Annotated[
        float | None,
        Key(Time(never=True), "Unload the model after this time without requests.", "never"),
    ] = None
    pin: Annotated[
        bool | None, Key(Boolean(), "Keep the model loaded even if another model needs its memory.", "false")
    ] = None
    preload: Annotated[bool | None, Key(Boolean(), "Load the model when llamasup starts.", "false")] = None
    replicas: Annotated[
        int | None, Key(Integer(1, 64), "The number of llama-server processes for the model.", "1")
    ] = None
    keep_slots: Annotated[
        bool | None,
        Key(Boolean(), "Save the model's conversation caches on disk while it is unloaded.", "slots.keep"),
    ] = None

    max_concurrent: Annotated[
        int | None,
        Key(Integer(1), "The number of requests that may run at the same time.", "the number of slots"),
    ] = None
    max_queued: Annotated[
        int | None,
        Key(
            Integer(0),
            "The number of requests that may wait in the queue. Further requests are refused.",
            "256",
        ),
    ] = None
    wait_timeout_s: Annotated[
        float | None,
        Key(Time(), "The longest wait of a request while the model loads, restarts or is busy.", "2m"),
    ] = None
    drain_timeout_s: Annotated[
        float | None,
        Key(Time(), "The time that running requests have to finish before the model is unloaded.", "30s"),
    ] = None


class ModelEntry(ModelKeys, frozen=True, kw_only=True):
    """A model by its name. Without path, repo and url, llamasup finds it in models_dir or caches."""

    path: Annotated[
        str | None,
        Key(
            FilePath("the path of a .gguf file, or demo", literal=("demo",), as_text=True),
            "The model file. Of a split model, any part.",
            "found by name",
        ),
    ] = None
    repo: Annotated[
        str | None, Key(Repo(), "The repository on the hub to download the model from.", "none")
    ] = None
    url: Annotated[str | None, Key(Url(), "The URL to download the model from.", "none")] = None
    aliases: Annotated[tuple[str, ...], Key(Many(Name()), "Other names of the model.", "none")] = ()
    where: str = ""
    """FILE:LINE of the entry."""

    @property
    def source(self) -> str | None:
        """An absolute path, ``demo``, ``org/repo[:quant]`` or a URL; None: found in models_dir or a cache."""
        return self.path or self.repo or self.url

    @property
    def options(self) -> ModelOptions:
        return model_options(self)


def model_options(keys: ModelKeys) -> ModelOptions:
    return ModelOptions(**{field: getattr(keys, field) for field in ModelKeys.__struct_fields__})


class Auth(_Keys, frozen=True, kw_only=True):
    """API keys. ``$LLAMASUP_API_KEY`` is a valid key too."""

    api_key_file: Annotated[
        Path | None,
        Key(
            FilePath("the path of a key file", hidden=True),
            "The file of API keys, written by llamasup key.",
            "none",
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool, Key(Boolean(), "Allow listening on addresses that other machines can reach, without a key.")
    ] = False


class Http(_Keys, frozen=True, kw_only=True):
    """Connections of clients, and logs of requests."""

    allow_hosts: Annotated[
        tuple[str, ...],
        Key(
            Many(HostName()),
            "Further names that the Host header may have. localhost and the address are always allowed.",
            "none",
        ),
    ] = ()
    allow_origins: Annotated[
        tuple[str, ...], Key(Many(Origin()), "Origins of web pages that may send requests.", "none")
    ] = ()
    remote_media: Annotated[
        tuple[str, ...],
        Key(
            Many(MediaHost()), "Hosts from which llama-server may fetch the media URLs of requests.", "false"
        ),
    ] = ()
    tls_cert: Annotated[
        Path | None,
        Key(FilePath("the path of a PEM file"), "The certificate and its chain, to serve https.", "none"),
    ] = None
    tls_key: Annotated[
        Path | None, Key(FilePath("the path of a PEM file"), "The private key of the certificate.", "none")
    ] = None
    stream_keepalive: Annotated[
        bool,
        Key(Boolean(), "Send SSE comments while a stream waits, so that no proxy on the way closes it."),
    ] = False
    request_timeout_s: Annotated[
        float | None, Key(Time(zero_is_none=True), "The longest time for a request.", "no limit")
    ] = None
    access_log: Annotated[
        Path | None,
        Key(
            FilePath("a path, or - for standard error", literal=("-",)),
            "The log file with one line of JSON for each request.",
            "none",
        ),
    ] = None
    slow_request_s: Annotated[
        float | None,
        Key(
            Time(zero_is_none=True),
            "Log requests whose response takes longer than this to begin.",
            "no requests are logged",
        ),
    ] = None


class Downloads(_Keys, frozen=True, kw_only=True):
    """Downloads of models."""

    on_demand: Annotated[bool, Key(Boolean(), "Download each org/repo[:quant] that a request names.")] = False
    folder: Annotated[
        Path | None,
        Key(
            FilePath("a folder"),
            "The folder for downloaded files.",
            "the first of models_dir, else the folder of llamasup pull",
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        Key(Endpoint(), "The URL of the hub or of a mirror.", "$HF_ENDPOINT, else https://huggingface.co"),
    ] = None
    token_file: Annotated[
        Path | None,
        Key(
            FilePath("the path of a file with a token", hidden=True),
            "The file with the token for the hub.",
            "$HF_TOKEN, if set",
        ),
    ] = None
    private_addresses: Annotated[
        bool, Key(Boolean(), "Allow downloads from private addresses, and over http.")
    ] = False
    parallel: Annotated[int, Key(Integer(1, 16), "The number of connections for one file.")] = 4


class Slots(_Keys, frozen=True, kw_only=True):
    """Conversation caches of unloaded models."""

    keep: Annotated[
        bool, Key(Boolean(), "Save the caches when a model is unloaded, and restore them when it is loaded.")
    ] = False
    disk: Annotated[Size, Key(SizeText(percent=False), "The disk space for all caches together.")] = Size(
        bytes=MAX_BYTES
    )


# --- the config --------------------------------------------------------------------------------------

_LOOPBACK: Final = (TcpAddress("127.0.0.1", 8080),)


class Config(_Keys, frozen=True, kw_only=True):
    """A configuration. Paths are absolute, times in seconds."""

    listen: Annotated[
        tuple[Address, ...],
        Key(
            Many(Listen()),
            "The addresses for clients. All TCP addresses have the same port.",
            "127.0.0.1:8080",
        ),
    ] = _LOOPBACK
    runtime: Annotated[
        str | None,
        Key(RuntimeName(), "The llama-server to use. auto: the first that llamasup finds.", "auto"),
    ] = None
    models_dir: Annotated[
        tuple[Path, ...],
        Key(
            Many(FilePath("a folder")),
            "Folders of models to serve. llamasup watches them for changes.",
            "none",
        ),
    ] = ()
    caches: Annotated[
        tuple[Cache, ...],
        Key(Many(OneOf(get_args(Cache))), "Caches of other programs with models to serve.", "none"),
    ] = ()
    memory: Annotated[Memory, Key(Section(Memory), "The most memory that all models together may use.")] = (
        Memory()
    )
    max_loaded: Annotated[
        int | None,
        Key(Integer(1), "The number of models that may be loaded at the same time.", "as many as fit"),
    ] = None
    default_model: Annotated[
        str | None,
        Key(Name(), "The model for requests that name no model.", "the only model, if there is one"),
    ] = None
    swap_after_s: Annotated[
        float,
        Key(Time(), "How long a request for an unloaded model waits before busy models have to make room."),
    ] = 5.0
    defaults: Annotated[ModelKeys, Key(Section(ModelKeys), "Settings for all models.")] = ModelKeys()
    models: Annotated[
        Mapping[str, ModelEntry],
        Key(
            Named(Section(ModelEntry), pattern=True),
            "Models by name. A name with * or ? is a rule for all matching models; the last rule wins.",
            "the models that llamasup finds",
        ),
    ] = {}
    groups: Annotated[
        Mapping[str, tuple[str, ...]],
        Key(
            Named(Many(Name(pattern=True), or_one=False)),
            "Groups of models. On each device, at most one model of a group is loaded.",
            "none",
        ),
    ] = {}
    auth: Annotated[Auth, Key(Section(Auth), "API keys.")] = Auth()
    http: Annotated[Http, Key(Section(Http), "Connections of clients, and logs of requests.")] = Http()
    downloads: Annotated[Downloads, Key(Section(Downloads), "Downloads of models.")] = Downloads()
    slots: Annotated[Slots, Key(Section(Slots), "Conversation caches of unloaded models.")] = Slots()
    watch: Annotated[bool, Key(Boolean(), "Reload the config when this file changes.")] = False

    lines: Mapping[Place, int] = {}
    """The line of each key in the file."""

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
    def default_options(self) -> ModelOptions:
        return model_options(self.defaults).over(ModelOptions(keep_slots=self.slots.keep or None))

    @property
    def rules(self) -> tuple[ModelRule, ...]:
        """Settings of models by name and by pattern, in the order of the file."""
        return tuple(
            ModelRule(name, entry.source, entry.aliases, entry.options, entry.where)
            for name, entry in self.models.items()
        )
