"""What can be said of one model among many: how it is started, how long it stays, who may wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

from llamasup.gguf.facts import ModelFacts
from llamasup.llama_server.settings import FlashAttn, GpuLayers, Profile, Settings
from llamasup.models.redaction import redact_paths
from llamasup.planning.projectors import Pairing

__all__ = ["ModelOptions", "ModelSpec", "Stay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """All that a config may say of a model besides where it is. ``None``: nothing is said.

    Times are in seconds; ``ttl_s`` inf: it stays until its memory is needed. ``devices`` are llama-server's
    names (``--list-devices``); empty: whichever there are. ``loras`` are paths,
    or ``auto`` alone: those found beside the model, for requests that ask for them.
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
        """Absolute paths that it names of files beside the model's own."""
        named = (self.mmproj, self.draft_model, *(self.loras or ()))
        return tuple(path for path in named if path is not None and path.startswith("/"))

    def over(self, base: ModelOptions) -> Self:
        """These, and where they say nothing what ``base`` says."""
        unsaid = {
            each.name: getattr(base, each.name) for each in fields(self) if getattr(self, each.name) is None
        }
        return replace(self, **unsaid)


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a model stays loaded, and beside whom.

    ``pin``: it is never unloaded for another one. ``groups``: of the models of one group at most one is
    loaded on a device.
    """

    ttl_s: float = float("inf")
    pin: bool = False
    preload: bool = False
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model that can be served. Equal specs are served by the same process, untouched by a reload.

    ``source``: an absolute path, or ``org/repo:quant`` or a URL that has to be downloaded first.
    ``identity``: of its files (sizes and times), so that a replaced file is a changed model; first its own.
    ``pairing``: the projector beside it, where nothing is said about one.
    ``settings.alias`` is its id. ``replicas`` processes serve it. ``listed`` is what is known of the file
    without starting anything; None: it is not here, or broken (``problem`` says so).
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
        """The path of the one beside it that is its own."""
        return None if self.pairing is None or self.pairing.projector is None else self.pairing.projector.path

    @property
    def started_as(self) -> tuple[object, ...]:
        """All of it that a process is started from: where this is equal, a change touches no process. What
        it is called is not among it: no process ends for a name.
        """
        options = self.options
        own = (options.devices, options.loras, options.warm_up, options.keep_slots)
        settings = replace(self.settings, alias=None)
        return (self.source, settings, self.replicas, self.identity, *own)

    def is_file_of(self, other: ModelSpec) -> bool:
        """Whether both are served from one file, whatever is in it by now."""
        if self.identity and other.identity:
            return self.identity[0][0] == other.identity[0][0]
        return bool(self.source) and self.source == other.source

    def redacted(self, text: str) -> str:
        """``text`` with its files' names where their paths stand: where they lie is nothing to clients. Empty
        where it names other places of this machine.
        """
        source = (self.source,) if self.source.startswith("/") else ()
        return redact_paths(text, (*source, *(path for path, _, _ in self.identity), *self.options.files))

    def public_problem(self, problem: str) -> str:
        """Why it cannot be loaded, as clients hear it."""
        return self.redacted(problem) or f"The model {self.id!r} cannot be loaded: llamasup's log says why"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)
