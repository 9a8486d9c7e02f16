"""What each profile prefers, where the user sets nothing by hand. Measured by scripts/bench_plan.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llamasup.core.settings import Profile

__all__ = ["Preferences", "preferences"]


@dataclass(frozen=True, slots=True)
class Preferences:
    """Where a plan starts from; memory, the model and the build may make it less."""

    ctx_size: int = 8192  # tokens per request
    parallel: int = 4  # as llama-server's own "auto" has it
    batch: int = 2048
    ubatch: int = 512
    kv_type: str = "q8_0"
    prompt_cache: bool = True
    lock: bool = True


_PREFERENCES: Mapping[Profile | None, Preferences] = MappingProxyType(
    {
        None: Preferences(),
        "latency": Preferences(parallel=1),
        "throughput": Preferences(parallel=8),
        "memory": Preferences(ctx_size=4096, parallel=1, ubatch=128, prompt_cache=False, lock=False),
    }
)


def preferences(profile: Profile | None) -> Preferences:
    """Those of ``plain`` are llamasup's usual ones: it passes none of them."""
    return _PREFERENCES.get(profile, _PREFERENCES[None])
