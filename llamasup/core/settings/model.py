"""The settings of a model, each declared once.

From a declaration come the option of ``run`` and ``plan``, the key of a config, the keyword of ``serve`` in
Python, the JSON Schema and the table in docs/configuration.md. ``None`` means that the user did not set it.
"""

# The annotations are values, not strings: the command line reads them at each start.
import os
from typing import Annotated, Final, Literal, Self, get_args

from msgspec import structs

from llamasup.core.settings.address_kinds import RpcWorker, worker_identity
from llamasup.core.settings.declaration import Flag, Setting, SettingGroup, settings_of
from llamasup.core.settings.kinds import (
    Alias,
    Boolean,
    FilePath,
    Integer,
    IntegerOr,
    Many,
    OneOf,
    Repo,
    Text,
    Time,
    Url,
)

FlashAttn = Literal["on", "off", "auto"]
Profile = Literal["latency", "throughput", "memory", "plain"]
Repair = Literal["off", "tools", "json", "both"]
GpuLayers = int | Literal["auto", "all"]

_GGUF: Final = FilePath("the path of a .gguf file", as_text=True)
_GGUF_OR_NONE: Final = FilePath("the path of a .gguf file, or none", literal=("none",), as_text=True)
_LORA: Final = FilePath("the path of a .gguf file, or auto", literal=("auto",), as_text=True)
_MODEL_FILE: Final = FilePath("the path of a .gguf file, or demo", literal=("demo",), as_text=True)
_PEM: Final = FilePath("the path of a PEM file", as_text=True)
_KV_TYPE: Final = Text("a KV cache type such as f16, q8_0 or q4_0", "[a-z][a-z0-9_]{0,15}")
_DEVICE: Final = Text(
    "a device of llama-server --list-devices, such as CUDA0", "[A-Za-z][A-Za-z0-9_.:-]{0,63}"
)


class ModelSettings(SettingGroup, frozen=True, kw_only=True):
    """Settings of models. They apply to all models, or to those of an entry in ``models``."""

    ctx_size: Annotated[
        int | None,
        Setting(
            Integer(1),
            "The context of one request, in tokens.",
            "the largest that the model and the memory allow",
            flag=Flag(metavar="TOKENS", help="Context size of one request.", checked=False),
        ),
    ] = None
    parallel: Annotated[
        int | None,
        Setting(
            Integer(1, 1024),
            "The number of slots: how many requests the server computes at the same time.",
            "planned",
            flag=Flag(help="Number of slots: how many requests run at the same time.", checked=False),
        ),
    ] = None
    gpu_layers: Annotated[
        GpuLayers | None,
        Setting(
            IntegerOr(0, ("auto", "all")),
            "The number of layers on the GPU. auto: as many as fit.",
            "auto",
            flag=Flag(noun="a number of layers", help="Number of layers on the GPU."),
        ),
    ] = None
    threads: Annotated[
        int | None,
        Setting(
            Integer(1, 4096),
            "CPU threads for computing.",
            "planned",
            flag=Flag(help="Number of CPU threads.", checked=False),
        ),
    ] = None
    kv_type: Annotated[
        str | None,
        Setting(
            _KV_TYPE,
            "The type of the KV cache.",
            "planned",
            flag=Flag(metavar="TYPE", help="Type of the KV cache, such as q8_0 or f16.", checked=False),
        ),
    ] = None
    flash_attn: Annotated[
        FlashAttn | None,
        Setting(
            OneOf(get_args(FlashAttn)),
            "Whether to use flash attention. auto: on where it is supported.",
            "auto",
            flag=Flag(help="Use flash attention."),
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        Setting(
            _GGUF,
            "The draft model for speculative decoding.",
            "none",
            flag=Flag(help="Small model for speculative decoding."),
        ),
    ] = None
    mmproj: Annotated[
        str | None,
        Setting(
            _GGUF_OR_NONE,
            "The multimodal projector. none: load no projector.",
            "the one in the model's folder",
            flag=Flag(help="Projector for images or sound."),
        ),
    ] = None
    profile: Annotated[
        Profile | None,
        Setting(
            OneOf(get_args(Profile)),
            "The planning goal. plain: pass only the flags that you set.",
            "no profile",
            flag=Flag(first=True, help="What to optimize for; plain passes only the flags that you set."),
        ),
    ] = None
    loras: Annotated[
        tuple[str, ...] | None,
        Setting(
            Many(_LORA),
            "LoRA adapters. auto: those in the model's folder, for requests that name them.",
            "none",
        ),
    ] = None
    devices: Annotated[
        tuple[str, ...] | None, Setting(Many(_DEVICE), "The GPUs that the model may use.", "all")
    ] = None
    rpc: Annotated[
        tuple[str, ...] | None,
        Setting(
            Many(RpcWorker(), identity=worker_identity),
            "RPC workers on other machines, which hold a part of the layers. tls://: through a tunnel.",
            "none",
            flag=Flag(metavar="HOST:PORT", help="Place layers on this RPC worker, too."),
        ),
    ] = None
    rpc_ca: Annotated[
        str | None,
        Setting(
            _PEM,
            "The CA that signed the certificates of workers with tls://.",
            "none",
            flag=Flag(help="PEM file of the CA of workers with tls://."),
        ),
    ] = None
    rpc_cert: Annotated[
        str | None,
        Setting(
            _PEM,
            "The certificate that llamasup shows to workers with tls://.",
            "none",
            flag=Flag(help="PEM file of the certificate for workers with tls://."),
        ),
    ] = None
    rpc_key: Annotated[
        str | None,
        Setting(
            _PEM,
            "The private key of rpc_cert.",
            "none",
            flag=Flag(help="PEM file of the private key for workers with tls://."),
        ),
    ] = None
    extra: Annotated[
        tuple[str, ...] | None,
        Setting(
            Many(Text(), or_one=False),
            "Flags for llama-server, passed on unchanged.",
            "none",
            names="flags",
        ),
    ] = None
    nice: Annotated[
        int | None,
        Setting(
            Integer(0, 19),
            "The nice value of llama-server: 19 yields the CPU most. It cannot be below that of llamasup.",
            "that of llamasup",
            flag=Flag(help="Nice value of llama-server: 19 yields the CPU to other programs most."),
        ),
    ] = None
    check_memory: Annotated[
        bool | None,
        Setting(
            Boolean(),
            "Refuse a start if the estimated memory does not fit.",
            default=True,
            flag=Flag(
                name="no-memory-check",
                help="Start even if the model does not seem to fit in memory.",
                on=False,
            ),
        ),
    ] = None
    warm_up: Annotated[
        bool | None,
        Setting(
            Boolean(),
            "Generate one token after each start, before the first request is served.",
            default=True,
            flag=Flag(
                of_service=True,
                name="no-warmup",
                help="Do not generate a test token after a start.",
                on=False,
            ),
        ),
    ] = None

    ttl_s: Annotated[
        float | None,
        Setting(
            Time(never=True),
            "Unload the model after this time without requests.",
            default=float("inf"),
            of_name=True,
        ),
    ] = None
    pin: Annotated[
        bool | None,
        Setting(
            Boolean(),
            "Keep the model loaded even if another model needs its memory.",
            default=False,
            of_name=True,
        ),
    ] = None
    preload: Annotated[
        bool | None, Setting(Boolean(), "Load the model when llamasup starts.", default=False, of_name=True)
    ] = None
    replicas: Annotated[
        int | None,
        Setting(
            Integer(1, 64), "The number of llama-server processes for the model.", default=1, of_name=True
        ),
    ] = None
    keep_slots: Annotated[
        bool | None,
        Setting(
            Boolean(),
            "Save the model's conversation caches on disk while it is unloaded.",
            "slots.keep",
            flag=Flag(help="Save the slots' caches to disk while the model is unloaded."),
            of_name=True,
        ),
    ] = None

    max_concurrent: Annotated[
        int | None,
        Setting(
            Integer(1),
            "The number of requests that may run at the same time.",
            "the number of slots",
            flag=Flag(of_service=True, help="Limit of concurrent requests. Default: the number of slots."),
            of_name=True,
        ),
    ] = None
    max_queued: Annotated[
        int | None,
        Setting(
            Integer(0),
            "The number of requests that may wait in the queue. Further requests are refused.",
            default=256,
            flag=Flag(of_service=True, help="Limit of queued requests. Further requests are refused."),
            of_name=True,
        ),
    ] = None
    wait_timeout_s: Annotated[
        float | None,
        Setting(
            Time(),
            "The longest wait of a request while the model loads, restarts or is busy.",
            default=120.0,
            flag=Flag(
                of_service=True,
                help="How long a request may wait for a busy or loading model; 0: do not wait.",
            ),
            of_name=True,
        ),
    ] = None
    continue_streams: Annotated[
        bool | None,
        Setting(
            Boolean(),
            "Continue a streamed answer with the next llama-server if its llama-server ends.",
            default=False,
            flag=Flag(of_service=True, help="Continue a streamed answer after the end of its llama-server."),
            of_name=True,
        ),
    ] = None
    repair: Annotated[
        Repair | None,
        Setting(
            OneOf(get_args(Repair)),
            "Repair malformed tool calls (`tools`), JSON that does not match its schema (`json`), or `both`.",
            default="off",
            flag=Flag(
                of_service=True,
                help="Repair tool calls, or JSON that does not match its schema, or both.",
            ),
            of_name=True,
        ),
    ] = None
    drain_timeout_s: Annotated[
        float | None,
        Setting(
            Time(),
            "The time that running requests have to finish before the model is unloaded.",
            default=30.0,
            flag=Flag(of_service=True, help="How long a stop waits for requests in flight to finish."),
            of_name=True,
        ),
    ] = None

    @property
    def files(self) -> tuple[str, ...]:
        """The absolute paths of other files in these settings."""
        named = (self.mmproj, self.draft_model, *(self.loras or ()))
        return tuple(path for path in named if path is not None and os.path.isabs(path))  # noqa: PTH117

    def over(self, base: "ModelSettings") -> Self:
        """Fill the settings that are not set from ``base``."""
        unset = [field for field in ModelSettings.__struct_fields__ if getattr(self, field) is None]
        return structs.replace(self, **{field: getattr(base, field) for field in unset})


OF_NAME: Final = tuple(field for field, setting in settings_of(ModelSettings).values() if setting.of_name)
"""The settings of a name. The others decide how the model's processes start."""


class ModelEntry(ModelSettings, frozen=True, kw_only=True):
    """A model by its name. Without path, repo and url, llamasup finds it in models_dir or caches."""

    path: Annotated[
        str | None, Setting(_MODEL_FILE, "The model file. Of a split model, any part.", "found by name")
    ] = None
    repo: Annotated[
        str | None, Setting(Repo(), "The repository on the hub to download the model from.", "none")
    ] = None
    url: Annotated[str | None, Setting(Url(), "The URL to download the model from.", "none")] = None
    aliases: Annotated[tuple[str, ...], Setting(Many(Alias()), "Other names of the model.", "none")] = ()
    where: str = ""
    """FILE:LINE of the entry."""

    @property
    def source(self) -> str | None:
        """An absolute path, ``demo``, ``org/repo[:quant]`` or a URL; None: found in models_dir or a cache."""
        return self.path or self.repo or self.url

    @property
    def options(self) -> ModelSettings:
        """Only the settings of the model, without its name and its file."""
        return ModelSettings(**{field: getattr(self, field) for field in ModelSettings.__struct_fields__})


class Settings(ModelSettings, frozen=True, kw_only=True):
    """The settings of one process, for the planner.

    ``alias``: its name, or names with commas. ``adapters``: paths of LoRA adapters that requests can choose.
    ``extra`` also has the flags for ``devices`` and ``loras``.
    """

    alias: str | None = None
    check_memory: bool = True
    keep_slots: bool | None = False
    adapters: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
