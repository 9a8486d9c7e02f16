"""What each profile starts from, where the user sets nothing by hand.

The numbers behind these choices are in docs/planning.md, measured by scripts/bench_plan.py on a CPU; what
only shows on a GPU is reasoned and says so there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llamasup.llama_server.settings import Profile

__all__ = ["Preferences", "preferences"]


@dataclass(frozen=True, slots=True)
class Preferences:
    """Where a plan starts from; memory, the model and the build may make it less.

    A packed KV cache halves memory and costs a CPU a third of its speed in long contexts; on a device it
    costs little. Threads that spin shortly before they sleep lose little on an idle machine and win much
    beside other programs.
    """

    ctx_size: int = 8192  # tokens per request
    parallel: int = 4  # as llama-server's own "auto" has it
    shared_cells: bool = False  # one pool of KV cells: a request may take what the others leave
    batch: int = 2048
    ubatch: int = 512
    kv_type_on_cpu: str = "f16"
    kv_type_on_device: str = "q8_0"
    spin_count: int | None = 3000  # of OpenMP's threads at a barrier; None: its own, 300,000
    prompt_cache: bool = True
    checkpoints: bool = True
    lock: bool = True
    repack: bool = True  # weights rewritten for this CPU, a second copy of them
    own_choice: bool = False  # whatever is not set by hand is llama-server's to choose


_PREFERENCES: Mapping[Profile | None, Preferences] = MappingProxyType(
    {
        None: Preferences(),
        "latency": Preferences(parallel=1),
        "throughput": Preferences(ctx_size=4096, parallel=8, shared_cells=True, spin_count=1000),
        "memory": Preferences(
            ctx_size=4096,
            parallel=1,
            ubatch=128,
            kv_type_on_cpu="q8_0",
            prompt_cache=False,
            checkpoints=False,
            lock=False,
            repack=False,
        ),
        "plain": Preferences(own_choice=True, kv_type_on_device="f16", spin_count=None),
    }
)


def preferences(profile: Profile | None) -> Preferences:
    return _PREFERENCES[profile]
