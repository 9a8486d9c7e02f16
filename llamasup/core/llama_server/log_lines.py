"""The log lines of llama-server that llamasup reacts to at once, as b11434 and older builds write them, and
the lines that may be published.

``read_line`` reads the lines of a start, and ``read_drafted`` the line about drafts that follows a request.

``shareable_lines`` selects lines that cannot quote a request. A server that is not ready yet has no requests,
so all its lines with a time stamp are kept. After that, only lines that report work in numbers are kept, and
the trusted errors at the end.

``read_sizes`` reads the memory that llama-server has allocated: the sizes of its buffers, from ``-lv 4`` on.
ggml logs them as "load_tensors: CUDA0 model buffer size = 4096.00 MiB". Builds before 2025 have other
function names before them, and only "buffer size" for weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from msgspec import Struct, field

from llamasup.core.llama_server.argv_builder import CommandLine
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.trusted_lines import STAMP, quotes_client, trusted_tail


class Ready(Struct, frozen=True):
    """The server says that it listens. Only a hint to probe ``/health`` at once."""


class StartupFailure(Struct, frozen=True):
    """The server still loads, but the start will fail."""

    diagnosis: Diagnosis


class Warned(Struct, frozen=True):
    """The server will serve, but not everything works as configured."""

    message: str
    remedy: str


class SizeLogged(Struct, frozen=True):
    """A line for ``read_sizes``."""


class StageBegan(Struct, frozen=True):
    """A stage of the load begins (``planning/measured/load_times.py``)."""

    stage: Literal["weights", "warm_up"]


StartLogEvent = Ready | StartupFailure | Warned | SizeLogged | StageBegan

_READY = re.compile(r"listening on|server is listening|model loaded")
# After this warning, llama-server continues to load and runs out of memory (#27872). With "already set by
# user", it was not to fit the model at all.
_FIT_FAILED = re.compile(r"failed to fit params to free device memory: (?!.*already set by user)(?P<why>.+)")
_DRAFT_IGNORED = re.compile(
    r"(?P<why>(?:the )?target and draft vocabs are not compatible|"
    r"failed to initialize speculative decoding context.*)"
)
_SIZE = re.compile(r"buffer size|model size|n_ctx +=|CLIP using|fitting params")
# At any log level: "load_model: loading model 'x.gguf'", and once the context has its memory
# "llama threadpool init" and "warming up the model with an empty run".
_WEIGHTS = re.compile(r"load_model: +loading model\b|loading model tensors")
_WARM_UP = re.compile(r"llama threadpool init|warming up the model")

RELEVANT = re.compile(
    "|".join(pattern.pattern for pattern in (_READY, _SIZE, _WEIGHTS, _WARM_UP)).encode()
    + b"|failed to|vocabs are not"
)
"""A filter over bytes that matches every line that ``read_line`` understands."""


def read_line(line: str) -> StartLogEvent | None:
    """Return the meaning of a log line; None for other lines, and for lines that quote a request."""
    if quotes_client(line):
        return None
    if _READY.search(line):
        return Ready()
    if found := _FIT_FAILED.search(line):
        return StartupFailure(
            Diagnosis(
                cause="fit_failed",
                message=f"llama-server reports that the model does not fit: {found['why'].rstrip('.')}.",
                remedy="Free the device's memory, set fewer --gpu-layers, or use a smaller --ctx-size, fewer "
                "--parallel slots or a smaller quantization.",
                lines=(line,),
                deterministic=True,
                exit_code=71,
            )
        )
    if found := _DRAFT_IGNORED.search(line):
        return Warned(
            f"llama-server does not use the draft model: {found['why'].rstrip('.')}.",
            "Use a draft model of the same family (same tokenizer), or none.",
        )
    if _SIZE.search(line):
        return SizeLogged()
    if _WARM_UP.search(line):
        return StageBegan("warm_up")
    return StageBegan("weights") if _WEIGHTS.search(line) else None


# --- drafts ---------------------------------------------------------------------------------------


class Drafted(Struct, frozen=True):
    """The tokens that a draft proposed, and those that the model accepted."""

    proposed: int
    accepted: int

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.proposed + other.proposed, self.accepted + other.accepted)


# b11434: ``0.00.078.626 I slot print_timing: id  0 | task 0 | draft acceptance = 0.57576 (   19 accepted /
# 33 generated), mean len =  4.88``. Older builds write ``draft acceptance rate``.
# The whole line: other lines of a serving llama-server can quote requests.
_DRAFTED = re.compile(
    r"[\d. IT]*slot +print_timing: id +\d+ \| task \d+ \| draft acceptance(?: rate)? = [\d.]+ "
    r"\( *(?P<accepted>\d{1,9}) accepted / *(?P<proposed>\d{1,9}) generated\)(?:, mean len = +[\d.]+)?\s*"
)

DRAFTED = re.compile(b"draft acceptance")
"""A filter over bytes that matches every line that ``read_drafted`` understands."""


def read_drafted(line: str) -> Drafted | None:
    """Return the counts in a log line; None for other lines."""
    found = _DRAFTED.fullmatch(line)
    return None if found is None else Drafted(int(found["proposed"]), int(found["accepted"]))


# --- lines that may be published -------------------------------------------------------------------

# Text, which re compiles and keeps at the first use: no start needs it.
_WORK = (
    r"slot +[\w()]+: id +\d+ \| task -?\d+ \| +(?:"
    r"(?:prompt eval|eval|total) time =[ =|/()\d.,msperotkncd]+"
    r"|graphs reused = +\d+"
    r"|processing task, is_child = \d"
    r"|stop processing: n_tokens = \d+, truncated = \d"
    r"|new prompt, n_ctx_slot = \d+, n_keep = -?\d+, task\.n_tokens = \d+"
    r"|cached n_tokens = \d+, memory_seq_rm \[\d+, end\))"
)
# Long, and in the model's file; and the last letters of a key.
_LEFT_OUT = re.compile(r"llama_model_loader: - kv |api_keys?\b")
# A log whose first time stamp is later begins in the middle: the server may have been ready.
_FIRST_LINE_S = 0.01


def shareable_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the last ``most`` shareable lines, of one or several processes in turn."""
    kept: list[str] = []
    for number, log in enumerate(_logs(lines)):
        began_s = next((at_s for line in log if (at_s := _seconds(line)) is not None), _FIRST_LINE_S)
        kept += _of_process(log, from_start=number > 0 or began_s < _FIRST_LINE_S)
    return kept[-most:]


def _logs(lines: Sequence[str]) -> Iterator[list[str]]:
    """The lines of each process, whose time stamps begin at zero."""
    log: list[str] = []
    last_s = 0.0
    for line in lines:
        at_s = _seconds(line)
        if at_s is not None:
            if at_s < last_s and log:
                yield log
                log = []
            last_s = at_s
        log.append(line)
    if log:
        yield log


def _seconds(line: str) -> float | None:
    """The time of the line since the start of the server; None without a time stamp."""
    if STAMP.match(line) is None:
        return None
    minutes, seconds, milliseconds, microseconds = line.split(" ", 1)[0].split(".")
    return int(minutes) * 60 + int(seconds) + int(milliseconds) / 1e3 + int(microseconds) / 1e6


def _of_process(log: Sequence[str], *, from_start: bool) -> Iterator[str]:
    served_from = _first_served(log) if from_start else 0
    for line in log[:served_from]:
        if STAMP.match(line) and not _LEFT_OUT.search(line):
            yield line
    for line in log[served_from:]:
        if (stamp := STAMP.match(line)) and re.fullmatch(_WORK, line[stamp.end() :].rstrip()):
            yield line
    yield from trusted_tail(log[served_from:])


def _first_served(log: Sequence[str]) -> int:
    """The index of the first line that may be about a request."""
    for number, line in enumerate(log):
        if quotes_client(line):
            return number
        if isinstance(read_line(line), Ready):
            return number + 1
    return len(log)


# --- the memory ------------------------------------------------------------------------------------

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
