"""Upper bounds on what a plan chooses, and the step from one plan to a smaller one.

Settings of the user are never bounded (S5).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.settings.model import Settings

# Below this a chat with a system prompt and tools does not fit: never chosen, but the user can set it.
MIN_CTX_SIZE = 2048


class PlanLimits(Struct, frozen=True):
    """The bounds of one plan; ``None`` is no bound.

    ``why``: the reason for whatever these bounds make smaller.
    """

    parallel: int | None = None
    ctx_size: int | None = None  # tokens per request
    kv_type: str | None = None
    flash_attn_off: bool = False
    gpu_layers: int | None = None
    drafts_off: bool = False  # the model's own layers for drafts are not used
    bare: bool = False  # llamasup adds only the flags that are needed
    why: str = ""

    @property
    def against_memory(self) -> PlanLimits:
        """The bounds that reduce the memory of a plan."""
        kv_type = None if self.kv_type == "f16" else self.kv_type
        return replace(self, kv_type=kv_type, flash_attn_off=False, drafts_off=False, bare=False, why="")

    @property
    def against_crashes(self) -> PlanLimits:
        """The bounds that avoid the kernels of a packed KV cache and of flash attention, and llamasup's own
        flags.
        """
        kv_type = self.kv_type if self.kv_type == "f16" else None
        return PlanLimits(
            kv_type=kv_type, flash_attn_off=self.flash_attn_off, drafts_off=self.drafts_off, bare=self.bare
        )

    @property
    def without_own_flags(self) -> bool:
        """Whether a start failed with a flag that llamasup added by itself."""
        return self.drafts_off or self.bare


class Change(Struct, frozen=True):
    """One setting that differs from one plan to the next, with its values for messages."""

    setting: str  # as llamasup's own option: "--parallel"
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.setting} {self.after} instead of {self.before}"


class Reduction(Struct, frozen=True):
    """A setting that a plan has smaller than llamasup prefers, or than the user asked for. ``why``: a clause.
    ``fixed``: more memory would not change it.
    """

    change: Change
    why: str
    fixed: bool = False


class Adjustment(Struct, frozen=True):
    """A fallback step: what the next start changes."""

    step: int
    most_steps: int
    changes: tuple[Change, ...]
    bounds: PlanLimits

    def __str__(self) -> str:
        changes = ", ".join(str(change) for change in self.changes)
        return f"{changes} (step {self.step} of {self.most_steps})"


def adjustable_of(settings: Settings, extra_args: ExtraArgs) -> frozenset[str]:
    """Return the options that a smaller plan may change: the user set them neither here nor after ``--``."""
    if settings.profile == "plain":
        return frozenset()  # llama-server chooses them all
    passed: Mapping[str, tuple[object, tuple[str, ...]]] = {
        "--parallel": (settings.parallel, ("--parallel",)),
        "--ctx-size": (settings.ctx_size, ("--ctx-size",)),
        "--kv-type": (settings.kv_type, ("--cache-type-k", "--cache-type-v")),
        "--flash-attn": (settings.flash_attn, ("--flash-attn",)),
        "--spec-type": (settings.draft_model, ("--spec-type", "--model-draft")),
        "--profile": (None, ()),
        "--gpu-layers": (None if settings.gpu_layers == "auto" else settings.gpu_layers, ("--gpu-layers",)),
    }
    return frozenset(
        option
        for option, (setting, flags) in passed.items()
        if setting is None and not any(extra_args.has(flag) for flag in flags)
    )
