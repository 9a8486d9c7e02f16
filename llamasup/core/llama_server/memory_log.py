"""The memory that llama-server has allocated: the buffer sizes in its log, from ``-lv 4`` on.

ggml logs its buffers, such as "load_tensors: CUDA0 model buffer size = 4096.00 MiB". Builds before 2025 have
other function names before them, and only "buffer size" for weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct, field

from llamasup.core.llama_server.argv_builder import CommandLine
from llamasup.core.llama_server.help_text import Capabilities

HOST = "CPU"  # the key of host memory in ``by_device``

_BUFFER = re.compile(
    r"(?P<function>\w+): +(?P<buffer>\S+) +(?P<kind>model |LoRA |KV |RS |DSV4 .+? state |compute |output )?"
    r"buffer size = +(?P<mib>\d+\.\d+) MiB"
)
# clip.cpp (the projector) states its weights as a sum, and its device elsewhere.
_PROJECTOR = re.compile(r"\w+: model size: +(?P<mib>\d+\.\d+) MiB")
_PROJECTOR_DEVICE = re.compile(r"CLIP using (?P<device>\S+) backend")
_NEW_CONTEXT = re.compile(r"(?:llama_context|llama_new_context_with_model|llama_init_from_model): n_ctx +=")
# While --fit tries settings it logs the sizes of what it does not load (all of it at -lv 5, b11434).
_FIT_BEGINS = "fitting params to device memory"
_FIT_ENDS = "fitting params to free memory took"

_CACHE_KINDS = ("KV", "RS", "DSV4")
_COMPUTE_KINDS = ("compute", "output")
# A device has several buffer types: CPU_Mapped, CPU_REPACK, CPU_AARCH64, MTL0_Private, …; AMX belongs to
# a CPU. CUDA_Host, Vulkan_Host, ROCm_Host are host memory that a GPU reads.
_HOST_BUFFER = re.compile(r"CPU(?:_\w+)?|AMX|BLAS|\w+_Host")
_BUFFER_KIND = re.compile(r"_(?:Mapped|Private|Shared|REPACK)$")
_MIB = 1 << 20


class ServerSizes(Struct, frozen=True):
    """The bytes over the target model, its draft model and its projector; the log rounds each to 0.01 MiB."""

    weights_bytes: int = 0
    kv_bytes: int = 0  # recurrent states included
    compute_bytes: int = 0  # output buffers included
    by_device: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    @property
    def device_bytes(self) -> int:
        return self.total_bytes - self.by_device.get(HOST, 0)

    @property
    def complete(self) -> bool:
        """Whether the log contains the sizes of the weights and of a context."""
        return self.weights_bytes > 0 and self.compute_bytes > 0


def read_sizes(lines: Iterable[str]) -> ServerSizes:
    """Return the sizes in the log of one start. All zero if the log level is below ``-lv 4``."""
    weights: Counter[str] = Counter()
    caches: Counter[str] = Counter()
    # A context that reserves its compute buffers again (for other batches) logs them again: the last counts.
    compute: dict[tuple[int, str, str, str], int] = {}
    context = 0
    fitting = False
    projector_device = HOST
    for line in lines:
        if _FIT_BEGINS in line or _FIT_ENDS in line:
            fitting = _FIT_BEGINS in line
        elif fitting:
            continue
        elif found := _BUFFER.search(line):
            size_bytes, device = _bytes(found["mib"]), _device(found["buffer"])
            kind = (found["kind"] or "model").split()[0]
            if kind in _CACHE_KINDS:
                caches[device] += size_bytes
            elif kind in _COMPUTE_KINDS:
                compute[context, found["function"], found["buffer"], kind] = size_bytes
            else:
                weights[device] += size_bytes
        elif _NEW_CONTEXT.search(line):
            context += 1
        elif found := _PROJECTOR_DEVICE.search(line):
            projector_device = _device(found["device"])
        elif found := _PROJECTOR.search(line):
            weights[projector_device] += _bytes(found["mib"])
    computed: Counter[str] = Counter()
    for (_, _, buffer, _), size_bytes in compute.items():
        computed[_device(buffer)] += size_bytes
    return ServerSizes(
        weights_bytes=weights.total(),
        kv_bytes=caches.total(),
        compute_bytes=computed.total(),
        by_device=MappingProxyType(dict(weights + caches + computed)),
    )


def _device(buffer: str) -> str:
    """The device as ``--list-devices`` names it, or HOST."""
    return HOST if _HOST_BUFFER.fullmatch(buffer) else _BUFFER_KIND.sub("", buffer)


def _bytes(mib: str) -> int:
    return round(float(mib) * _MIB)


def give_size_log(line: CommandLine, capabilities: Capabilities, *, measured: bool) -> None:
    """Set the log level that shows the sizes.

    Since 2026 the sizes need a log level with thirty more lines per request: set it only where needed.
    """
    option = capabilities.find("--verbosity")
    if option is None or "4: trace" not in option.description:
        return
    if measured:
        line.leave_out("--verbosity", "the memory of this plan has been measured", value="4")
    else:
        why = "the first load of this plan logs its memory, which later plans use"
        line.give("--verbosity", 4, why)
