"""The settings of a model, each declared once.

From a declaration come the option of ``run`` and ``plan``, the key of a config, the keyword of ``serve`` in
Python, the JSON Schema and the list in docs/configuration.md. ``None`` means that the user did not set it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self, get_args

from msgspec import Struct, structs

from llamasup.core.settings.declaration import Flag, SettingGroup, setting, settings_of
from llamasup.core.settings.kinds import (
    Alias,
    Boolean,
    FilePath,
    Integer,
    IntegerOr,
    Many,
    OneOf,
    Repo,
    RpcWorker,
    Text,
    Time,
    Url,
)
from llamasup.errors import Conflict

SLOTS_BYTES: Final = 10 << 30
"""The default limit for all saved slots: ten conversations of 8,192 tokens with a model of 8 billion
parameters (128 KiB per token in f16).
"""

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


def worker_identity(text: str) -> object:
    """Return a key that is equal for two valid addresses of one RPC worker."""
    from llamasup.core.http.address import parse_worker

    return parse_worker(text).identity


class ModelSettings(SettingGroup, frozen=True, kw_only=True):
    """Settings of models. They apply to all models, or to those of an entry in ``models``."""

    ctx_size: int | None = setting(
        Integer(1),
        "The context of one request, in tokens.",
        "the largest that the model and the memory allow",
        flag=Flag(metavar="TOKENS", help="Context size of one request.", checked=False),
    )
    parallel: int | None = setting(
        Integer(1, 1024),
        "Slots: how many requests run at the same time.",
        "planned",
        flag=Flag(help="Number of slots: how many requests run at the same time.", checked=False),
    )
    gpu_layers: GpuLayers | None = setting(
        IntegerOr(0, ("auto", "all")),
        "Layers on the GPU. auto: as many as fit.",
        "auto",
        flag=Flag(noun="a number of layers", help="Number of layers on the GPU."),
    )
    threads: int | None = setting(
        Integer(1, 4096),
        "CPU threads for computing.",
        "planned",
        flag=Flag(help="Number of CPU threads.", checked=False),
    )
    kv_type: str | None = setting(
        _KV_TYPE,
        "The type of the KV cache.",
        "planned",
        flag=Flag(metavar="TYPE", help="Type of the KV cache, such as q8_0 or f16.", checked=False),
    )
    flash_attn: FlashAttn | None = setting(
        OneOf(get_args(FlashAttn)),
        "Flash attention. auto: on where it is supported.",
        "auto",
        flag=Flag(help="Use flash attention."),
    )
    draft_model: str | None = setting(
        _GGUF,
        "The draft model for speculative decoding.",
        "none",
        flag=Flag(help="Small model for speculative decoding."),
    )
    mmproj: str | None = setting(
        _GGUF_OR_NONE,
        "The multimodal projector. none: load no projector.",
        "the one in the model's folder",
        flag=Flag(help="Projector for images or sound."),
    )
    profile: Profile | None = setting(
        OneOf(get_args(Profile)),
        "The planning goal. plain: pass only the flags that you set.",
        "no profile",
        flag=Flag(first=True, help="What to optimize for; plain passes only the flags that you set."),
    )
    loras: tuple[str, ...] | None = setting(
        Many(_LORA), "LoRA adapters. auto: those in the model's folder, for requests that name them.", "none"
    )
    devices: tuple[str, ...] | None = setting(Many(_DEVICE), "The GPUs that the model may use.", "all")
    rpc: tuple[str, ...] | None = setting(
        Many(RpcWorker(), identity=worker_identity),
        "RPC workers, which hold a part of the layers. tls://: through a tunnel.",
        "none",
        flag=Flag(metavar="HOST:PORT", help="Also place layers on this RPC worker."),
    )
    rpc_ca: str | None = setting(
        _PEM,
        "The CA of workers with tls://.",
        "none",
        flag=Flag(help="PEM file of the CA of workers with tls://."),
    )
    rpc_cert: str | None = setting(
        _PEM,
        "The certificate for workers with tls://.",
        "none",
        flag=Flag(help="PEM file of the certificate for workers with tls://."),
    )
    rpc_key: str | None = setting(
        _PEM,
        "The private key of rpc_cert.",
        "none",
        flag=Flag(help="PEM file of the private key for workers with tls://."),
    )
    extra: tuple[str, ...] | None = setting(
        Many(Text(), or_one=False), "Flags for llama-server, passed on unchanged.", "none", names="flags"
    )
    nice: int | None = setting(
        Integer(0, 19),
        "The nice value of llama-server, at least that of llamasup. 19 yields the CPU most.",
        "that of llamasup",
        flag=Flag(help="Nice value of llama-server: 19 yields the CPU to other programs most."),
    )
    check_memory: bool | None = setting(
        Boolean(),
        "Refuse a start if the estimated memory does not fit.",
        default=True,
        flag=Flag(
            name="no-memory-check",
            help="Start even if the model does not seem to fit in memory.",
            on=False,
        ),
    )
    warm_up: bool | None = setting(
        Boolean(),
        "Generate one token after each start, before the first request.",
        default=True,
        flag=Flag(
            of_service=True,
            name="no-warmup",
            help="Do not generate a test token after a start.",
            on=False,
        ),
    )

    ttl_s: float | None = setting(
        Time(never=True),
        "Unload the model after this time without requests.",
        default=float("inf"),
        of_name=True,
    )
    pin: bool | None = setting(
        Boolean(),
        "Keep the model loaded even if another model needs its memory.",
        default=False,
        of_name=True,
    )
    preload: bool | None = setting(
        Boolean(), "Load the model when llamasup starts.", default=False, of_name=True
    )
    replicas: int | None = setting(
        Integer(1, 64), "llama-server processes for the model.", default=1, of_name=True
    )
    keep_slots: bool | None = setting(
        Boolean(),
        "Save the model's conversation caches on disk while it is unloaded.",
        "slots.keep",
        flag=Flag(help="Save the slots' caches to disk while the model is unloaded."),
        of_name=True,
    )

    max_concurrent: int | None = setting(
        Integer(1),
        "How many requests may run at the same time.",
        "the number of slots",
        flag=Flag(of_service=True, help="Limit of concurrent requests. Default: the number of slots."),
        of_name=True,
    )
    max_queued: int | None = setting(
        Integer(0),
        "How many requests may wait. Further requests are refused.",
        default=256,
        flag=Flag(of_service=True, help="Limit of queued requests. Further requests are refused."),
        of_name=True,
    )
    wait_timeout_s: float | None = setting(
        Time(),
        "The longest wait of a request for a loading or busy model.",
        default=120.0,
        flag=Flag(
            of_service=True,
            help="How long a request may wait for a busy or loading model; 0: do not wait.",
        ),
        of_name=True,
    )
    continue_streams: bool | None = setting(
        Boolean(),
        "Continue a streamed answer on the next llama-server after a crash.",
        default=False,
        flag=Flag(of_service=True, help="Continue a streamed answer after its llama-server exits."),
        of_name=True,
    )
    repair: Repair | None = setting(
        OneOf(get_args(Repair)),
        "Repair malformed tool calls, JSON that does not match its schema, or both.",
        default="off",
        flag=Flag(
            of_service=True,
            help="Repair tool calls, or JSON that does not match its schema, or both.",
        ),
        of_name=True,
    )
    drain_timeout_s: float | None = setting(
        Time(),
        "How long an unload waits for running requests to finish.",
        default=30.0,
        flag=Flag(of_service=True, help="How long a stop waits for requests in flight to finish."),
        of_name=True,
    )

    @property
    def files(self) -> tuple[str, ...]:
        """The absolute paths of other files in these settings."""
        named = (self.mmproj, self.draft_model, *(self.loras or ()))
        return tuple(path for path in named if path is not None and os.path.isabs(path))  # noqa: PTH117

    def over(self, base: ModelSettings) -> Self:
        """Fill the settings that are not set from ``base``."""
        unset = [field for field in ModelSettings.__struct_fields__ if getattr(self, field) is None]
        return structs.replace(self, **{field: getattr(base, field) for field in unset})


OF_NAME: Final = tuple(field for field, setting in settings_of(ModelSettings).values() if setting.of_name)
"""The settings of a name. The others decide how the model's processes start."""


class Engine(Struct, frozen=True, kw_only=True):
    """A program other than llama-server that serves a model. It is equal to one with the same settings.

    ``program``: its name in messages. ``routes``: the paths that it serves; one that ends in ``/*`` stands
    for all paths below it. ``warms_up``: a request proves each of its starts.
    """

    program: str
    routes: tuple[str, ...]
    warms_up: bool = False
    kind: ClassVar[str] = "command"

    def answers(self, path: str) -> bool:
        """Whether it serves this raw path. No spelling of a path leads out of the folder of a route."""
        from llamasup.core.http.routes import is_below

        return path in self.routes or any(
            route.endswith("/*") and is_below(path, route[:-1]) for route in self.routes
        )

    def size(self, spec: Any, budget: Mapping[str, int], environ: Mapping[str, str]) -> Any:
        """Return the ``SizedModel`` of ``spec``. Blocks. Raises a LlamasupError if it can never be loaded."""
        raise NotImplementedError

    def unplanned(self, model: str) -> Conflict:
        """The answer to a request for a plan."""
        return Conflict(
            f"{model!r} is served by {self.program}, a command of the config: it has no plan and no slots, "
            "because llamasup plans only llama-server.",
            remedy="Change its `command` in the config.",
        )


class ModelEntry(ModelSettings, frozen=True, kw_only=True):
    """A model by its name. Without path, repo and url, llamasup finds it in models_dir or caches."""

    path: str | None = setting(_MODEL_FILE, "The model file. Of a split model, any part.", "found by name")
    repo: str | None = setting(Repo(), "The repository on the hub that has the model.", "none")
    url: str | None = setting(Url(), "The URL to download the model from.", "none")
    aliases: tuple[str, ...] = setting(Many(Alias()), "Other names of the model.", "none", unset=())
    where: str = ""
    """FILE:LINE of the entry."""

    @property
    def source(self) -> str | None:
        """An absolute path, ``demo``, ``org/repo[:quant]`` or a URL; None: found in models_dir or a cache."""
        return self.path or self.repo or self.url

    @property
    def engine(self) -> Engine | None:
        """The program that serves the model; None: a llama-server. A feature's entry has one."""
        return None

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


class Repairs(Struct, frozen=True):
    """The repairs that are switched on for a model.

    ``tool_calls``: tool calls of a conversation, and an answer that llama-server refuses because it could not
    parse it. ``json``: an answer that does not match the JSON schema of its request.
    """

    tool_calls: bool = False
    json: bool = False


NO_REPAIRS: Final = Repairs()
_BY_SETTING: Final[Mapping[str | None, Repairs]] = MappingProxyType(
    {
        None: NO_REPAIRS,
        "off": NO_REPAIRS,
        "tools": Repairs(tool_calls=True),
        "json": Repairs(json=True),
        "both": Repairs(tool_calls=True, json=True),
    }
)


def repairs_of(setting: str | None) -> Repairs:
    """Read the setting. None: it is not set. Returns ``NO_REPAIRS`` itself if nothing is repaired."""
    return _BY_SETTING[setting]
