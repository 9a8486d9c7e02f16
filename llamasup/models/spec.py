"""The options of one model among many, and the spec that the registry makes of them."""

from __future__ import annotations

from typing import Self

from msgspec import Struct, field
from msgspec.structs import fields, replace

from llamasup.gguf.facts import ModelFacts
from llamasup.llama_server.settings import FlashAttn, GpuLayers, Profile, Settings
from llamasup.models.redaction import redact_paths
from llamasup.planning.projectors import Pairing

__all__ = ["ModelOptions", "ModelSpec", "Stay"]


class ModelOptions(Struct, frozen=True, kw_only=True):
    """The options of a model in a config. ``None``: not set.

    Times are in seconds; ``ttl_s`` inf: loaded until its memory is needed. ``devices``: llama-server's names
    (``--list-devices``); empty: all. ``loras``: paths, or ``auto`` alone: the adapters next to the model, for
    requests that name them.
    """

    ctx_size: int | None = None
    parallel: int | None = None
    gpu_layers: GpuLayers | None = None
    threads: int | None = None
    kv_type: str | None = None
    flash_attn: FlashAttn | None = None
    draft_model: str | None = None
    mmproj: str | None = None
    profile: Profile | None = None
    loras: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None
    extra: tuple[str, ...] | None = None
    check_memory: bool | None = None
    warm_up: bool | None = None

    ttl_s: float | None = None
    pin: bool | None = None
    preload: bool | None = None
    replicas: int | None = None
    keep_slots: bool | None = None

    max_concurrent: int | None = None
    max_queued: int | None = None
    wait_timeout_s: float | None = None
    drain_timeout_s: float | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The absolute paths of other files in these options."""
        named = (self.mmproj, self.draft_model, *(self.loras or ()))
        return tuple(path for path in named if path is not None and path.startswith("/"))

    def over(self, base: ModelOptions) -> Self:
        """These options, with those of ``base`` where they are not set."""
        unset = [option.name for option in fields(self) if getattr(self, option.name) is None]
        return replace(self, **{name: getattr(base, name) for name in unset})


class Stay(Struct, frozen=True):
    """``pin``: never evicted for another model. ``groups``: at most one model of a group is on a device."""

    ttl_s: float = float("inf")
    pin: bool = False
    preload: bool = False
    groups: frozenset[str] = frozenset()


class ModelSpec(Struct, frozen=True):
    """One model that can be served. A reload that makes an equal spec does not touch its processes.

    ``source``: an absolute path, or ``org/repo:quant`` or a URL to download. ``identity``: the states of its
    files, the model's own first; a replaced file makes a changed model. ``pairing``: the projector next to
    it, unless one is configured. ``settings.alias`` is its id. ``listed``: the facts of the file; None: it is
    missing or broken (see ``problem``).
    """

    id: str
    source: str
    aliases: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    options: ModelOptions = field(default_factory=ModelOptions)
    stay: Stay = field(default_factory=Stay)
    replicas: int = 1
    identity: tuple[tuple[str, int, int], ...] = ()
    listed: ModelFacts | None = None
    pairing: Pairing | None = None
    problem: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether it has to be downloaded first."""
        return bool(self.source) and not self.source.startswith("/")

    @property
    def projector(self) -> str | None:
        """The path of its projector, if one was found next to it."""
        return None if self.pairing is None or self.pairing.projector is None else self.pairing.projector.path

    @property
    def started_as(self) -> tuple[object, ...]:
        """The parts that decide how its processes start. Not its names: a rename restarts no process."""
        options = self.options
        own = (options.devices, options.loras, options.warm_up, options.keep_slots)
        settings = replace(self.settings, alias=None)
        return (self.source, settings, self.replicas, self.identity, *own)

    def is_file_of(self, other: ModelSpec) -> bool:
        """Whether both have the same file, whatever its content is now."""
        if self.identity and other.identity:
            return self.identity[0][0] == other.identity[0][0]
        return bool(self.source) and self.source == other.source

    def redacted(self, text: str) -> str:
        """``text`` for clients, with file names instead of paths. Empty if other paths could remain."""
        source = (self.source,) if self.source.startswith("/") else ()
        return redact_paths(text, (*source, *(path for path, _, _ in self.identity), *self.options.files))

    def public_problem(self, problem: str) -> str:
        """Why it cannot be loaded, for clients."""
        return self.redacted(problem) or f"The model {self.id!r} cannot be loaded: llamasup's log says why"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)
