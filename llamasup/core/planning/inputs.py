"""The inputs of each decision about a plan: the facts, and the starting values of the profile (pure).

docs/planning.md gives the reasons for the starting values, with the measurements of scripts/bench/plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.settings.model import Profile, Settings
from llamasup.errors import UsageInvalid


class Preferences(Struct, frozen=True):
    """The starting values of a plan; memory, the model and the build can reduce them."""

    ctx_size: int = 8192  # tokens per request while all slots are busy
    parallel: int = 4  # as llama-server's own "auto"
    shared_cells: bool = False  # one pool of KV cells for all slots, whatever their number of tokens
    grows: bool = True  # a longer context for one request, as far as the memory holds it comfortably
    batch: int = 2048
    ubatch: int = 512
    kv_type_on_cpu: str = "f16"
    kv_types_on_device: tuple[str, ...] = (
        "f16",
        "q8_0",
    )  # the first with which all layers fit
    spin_count: int | None = 3000  # of OpenMP's threads at a barrier; None: its default, 300,000
    prompt_cache: bool = True
    checkpoints: bool = True  # all that memory allows; False: none, or few for recurrent states
    lock: bool = True
    repack: bool = True  # rewrite the weights for this CPU, which makes a second copy
    server_defaults: bool = False  # llama-server chooses everything that the user does not set


_PREFERENCES: Mapping[Profile | None, Preferences] = MappingProxyType(
    {
        None: Preferences(),
        "latency": Preferences(parallel=1),
        "throughput": Preferences(ctx_size=4096, parallel=8, shared_cells=True, spin_count=1000),
        "memory": Preferences(
            ctx_size=4096,
            parallel=1,
            grows=False,
            ubatch=128,
            kv_type_on_cpu="q8_0",
            kv_types_on_device=("q8_0",),
            prompt_cache=False,
            checkpoints=False,
            lock=False,
            repack=False,
        ),
        "plain": Preferences(server_defaults=True, grows=False, kv_types_on_device=("f16",), spin_count=None),
    }
)


def preferences(profile: Profile | None) -> Preferences:
    return _PREFERENCES[profile]


class SizeInputs(Struct, frozen=True):
    """The facts and wishes that decide every size.

    ``extra_args`` are the flags of the user and of ``llamasup tune`` for llama-server.
    """

    capabilities: Capabilities
    model: ModelFacts
    serves: ModelClass
    settings: Settings
    extra_args: ExtraArgs
    prefers: Preferences
    bounds: PlanLimits

    @property
    def sets_length(self) -> bool:
        """Whether the user set the length of the context."""
        return self.settings.ctx_size is not None or self.extra_args.has("--ctx-size")


def absolute_path(setting: str, path: str) -> str:
    """Return ``path``, which cannot be read as a flag. The caller has made it absolute: that is an effect."""
    if not PurePath(path).root:
        raise ValueError(f"the path of {setting} must be absolute here: {path!r}")
    return path


def out_of_range(option: str, value: object, allowed: str) -> UsageInvalid:
    """Make the error for a number that is not ``allowed``."""
    return UsageInvalid(f"{option} {value} is out of range", remedy=f"give {allowed}")
