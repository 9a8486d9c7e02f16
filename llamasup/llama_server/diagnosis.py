"""Why a child ended, and what to do about it.

Decides from how it ended and from the last lines of its output; never restarts, prints or reads anything.
Once clients can reach a server, only those lines count that cannot contain text of a client (``last_words``).
The table below is the documentation: the first rule that matches a line is the cause. The wordings are those
of llama.cpp b11434, run for real wherever tests/fixtures/crashes holds a ``.log`` (``.made.log``: written by
hand from the source), and of older builds where they differ.

A signal that nobody explains is a crash and may be restarted; what lies in the flags, the file, the
architecture or the memory would happen again at once and may not (S4).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llamasup.llama_server.last_words import STAMP, last_words, own_lines
from llamasup.llama_server.plan_limits import Adjustment
from llamasup.system.process.exit import Exit

__all__ = ["Diagnosis", "Phase", "diagnose", "weights_were_read"]

Phase = Literal["starting", "ready", "stopping"]

_MAX_LINES = 8
# Exit codes of docs/design.md §3.
_USAGE, _MODEL_BAD, _MODEL_MISSING, _NO_RUNTIME, _MACHINE, _GAVE_UP = 2, 65, 66, 69, 71, 75


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of an end, for people and for decisions.

    ``cause`` is a stable word (metrics, events); ``message`` says what happened; ``remedy`` what to do.
    ``lines`` are the telling lines of the child's output, oldest first, without their time stamps.
    ``deterministic``: it would happen again at once, so do not restart (S4). ``exit_code`` is llamasup's
    own, should it have to give up on this. ``adjustment``: what the next start will do differently (S5).
    ``weights_read``: the start ended after the weights were read, according to the log.
    """

    cause: str
    message: str
    remedy: str
    lines: tuple[str, ...]
    deterministic: bool
    exit_code: int
    adjustment: Adjustment | None = None
    weights_read: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    """``message`` and ``remedy`` may name the pattern's groups, ``{model}`` and ``{exit}``."""

    cause: str
    pattern: re.Pattern[str]
    message: str
    remedy: str
    exit_code: int
    deterministic: bool = True
    only_starting: bool = True


def _rule(
    cause: str,
    pattern: str,
    message: str,
    remedy: str,
    exit_code: int,
    *,
    again: bool = True,
    late: bool = False,
) -> _Rule:
    """``again``: a restart would meet it again. ``late``: it also ends a server that was ready."""
    return _Rule(cause, re.compile(pattern), message, remedy, exit_code, again, not late)


_SMALLER = "use a smaller --ctx-size, fewer --parallel slots, --kv-type q8_0 or a smaller quantization"
_HOST_MEMORY = f"Free memory, or {_SMALLER}."
_DEVICE_MEMORY = f"Free the device's memory, set fewer --gpu-layers, or {_SMALLER}."
_OTHER_BUILD = "Use a llama-server that was built for this machine (--runtime), or the embedded one."
_DOWNLOAD = "Download it again, and compare its length and checksum with what the publisher says."
_CHECK_FLAG = "Remove or correct it; where llamasup chose it, `llamasup plan` says why."

_RULES: tuple[_Rule, ...] = (
    # --- the executable ---
    _rule("library_missing", r"error while loading shared libraries: (?P<library>[^:\s]+): (?P<why>.+)",
          "The shared library {library} of llama-server cannot be loaded: {why}.",
          "Install the package that brings {library}, or keep llama-server together with its libraries.",
          _NO_RUNTIME),
    _rule("library_missing", r"Library not loaded: (?P<library>\S+)",
          "The shared library {library} of llama-server cannot be loaded.",
          "Install the package that brings {library}, or keep llama-server together with its libraries.",
          _NO_RUNTIME),
    _rule("library_missing", r"version [`'](?P<library>\w+_[\d.]+)' not found",
          "llama-server needs {library}, which this system's libraries do not have.",
          _OTHER_BUILD, _NO_RUNTIME),
    _rule("runtime_broken", r"llamasup: cannot execute (?P<path>.+): (?P<why>[^:]+)$",
          "Cannot execute {path!r}: {why}.", _OTHER_BUILD, _NO_RUNTIME),
    _rule("runtime_broken", r"ModuleNotFoundError: No module named '(?P<module>[\w.]+)'",
          "The embedded runtime lacks the Python module {module!r}.",
          'Install it: pip install "llamasup[embedded]".', _NO_RUNTIME),
    # --- the command line ---
    _rule("flag_unknown", r"error: invalid argument: (?P<flag>.+)",
          "This llama-server does not know the argument {flag!r}.", _CHECK_FLAG, _USAGE),
    _rule("flag_removed", r'error while handling argument "(?P<flag>.+?)": .* removed\. use (?P<instead>.+)',
          "This llama-server no longer has the argument {flag!r}.", "Use {instead}.", _USAGE),
    _rule("flag_removed", r'error while handling argument "(?P<flag>.+?)": .* removed',
          "This llama-server no longer has the argument {flag!r}.", "Leave it out.", _USAGE),
    _rule("flag_invalid", r'error while handling (?P<kind>argument|environment variable) "(?P<flag>.+?)": '
          r"(?:error: )?(?P<why>.+)",
          "llama-server cannot use what the {kind} {flag!r} was given: {why}.", _CHECK_FLAG, _USAGE),
    _rule("flag_invalid", r"static assets path not found: (?P<path>.+)",
          "llama-server cannot serve the folder {path!r} given to --path: it is not there.",
          "Correct or remove --path.", _USAGE),
    # --- the address (llama-server does not say why it could not bind) ---
    _rule("port_in_use", r"couldn't bind HTTP server socket, hostname: (?P<socket>\S+\.sock)\b",
          "llama-server could not listen on the socket {socket}: the file exists already, its folder is "
          "missing, or the path is longer than 107 bytes.",
          "Remove a socket that nobody serves any more, or choose another path.", _MACHINE, again=False),
    _rule("port_in_use", r"couldn't bind HTTP server socket, hostname: (?P<host>.*), port: (?P<port>\d+)",
          "llama-server could not listen on {host} port {port}: somebody else has it, or this user may not.",
          "Choose another port (0 takes any free one).", _MACHINE, again=False),
    # --- memory. Before assertions: a failed allocation is often met by one ---
    _rule("out_of_memory_device", r"(?:CUDA|HIP|ROCm|MUSA|SYCL) error: (?P<why>.*out of memory.*)",
          "The device ran out of memory: {why}.", _DEVICE_MEMORY, _MACHINE, late=True),
    _rule("out_of_memory_device", r"(?P<why>allocating [\d.]+ MiB on device \d+: \w+ failed: out of memory)",
          "The device ran out of memory: {why}.", _DEVICE_MEMORY, _MACHINE, late=True),
    _rule("out_of_memory_device",
          r"(?P<why>ErrorOutOfDeviceMemory|Device memory allocation of size \d+ failed|"
          r"kIOGPUCommandBufferCallbackErrorOutOfMemory)",
          "The device ran out of memory: {why}.", _DEVICE_MEMORY, _MACHINE, late=True),
    _rule("out_of_memory_device", r"(?:unable|failed) to allocate (?P<device>(?!CPU)[A-Z]\w*\d) buffer",
          "The memory of {device} is too small.", _DEVICE_MEMORY, _MACHINE, late=True),
    _rule("out_of_memory_host", r"insufficient memory \(attempted to allocate +(?P<size>[\d.]+) MB\)",
          "The machine's memory is too small: llama-server could not get another {size} MB.",
          _HOST_MEMORY, _MACHINE, late=True),
    _rule("out_of_memory_host", r"(?P<why>std::bad_alloc|Cannot allocate memory|MemoryError)",
          "The machine's memory is too small: {why}.", _HOST_MEMORY, _MACHINE, late=True),
    _rule("out_of_memory_host",
          r"(?P<why>(?:unable|failed) to allocate (?:\S+ )?(?:buffer|compute buffers).*)",
          "The machine's memory is too small: {why}.", _HOST_MEMORY, _MACHINE),
    # --- the KV cache ---
    _rule("kv_unsupported",
          r"(?i:quantized V cache requires flash_attn|V cache quantization requires flash_attn)",
          "A quantised V cache needs flash attention, which is off.",
          "Set --flash-attn on, or --kv-type f16.", _USAGE),
    _rule("kv_unsupported",
          r"(?P<side>[KV]) cache type (?P<type>\S+) with block size (?P<block>\d+) does not divide "
          r"n_embd_head_[kv]=(?P<size>\d+)",
          "The {side} cache cannot be {type}: this model's head size {size} is no multiple of {block}.",
          "Set --kv-type f16.", _USAGE),
    # --- the model file ---
    _rule("model_unreadable", r"failed to open GGUF file '(?P<path>.+)' \(Permission denied\)",
          "The file {path!r} may not be read by this user.", "Give this user the right to read it.",
          _MODEL_MISSING),
    _rule("model_missing", r"failed to open GGUF file '(?P<path>.+)' \((?P<why>.+)\)",
          "The file {path!r} cannot be opened: {why}.", "Check the path.", _MODEL_MISSING),
    _rule("model_missing", r"failed to load CLIP model from (?P<path>.+)\. Does this file exist\?",
          "The projector {path!r} cannot be opened.", "Check the path given to --mmproj.", _MODEL_MISSING),
    _rule("model_missing", r"adapter_lora_init: failed to open '(?P<path>.+?)'",
          "The file {path!r} cannot be opened.", "Check the path given to --lora.", _MODEL_MISSING),
    _rule("model_missing", r"failed to open (?P<quote>'?)(?P<path>.+\.gguf)(?P=quote)",
          "The file {path!r} cannot be opened.", "Check the path.", _MODEL_MISSING),
    _rule("model_corrupt", r"invalid magic characters:? (?P<magic>.+?)(?:, expected|$)",
          "{model} is not a GGUF file: it begins with {magic}.",
          "Give a .gguf file; a safetensors or old GGML file has to be converted.", _MODEL_BAD),
    _rule("model_corrupt", r"(?P<why>tensor '.+' data is not within the file bounds)",
          "{model} is shorter than its header says: {why}.", _DOWNLOAD, _MODEL_BAD),
    _rule("model_corrupt", r"failed to read magic",
          "{model} is empty, or not a file.", "Give the path of a .gguf file.", _MODEL_BAD),
    _rule("model_unsupported",
          r"(?P<why>this GGUF file is version \d+ but .+|GGUFv1 is no longer supported.*)",
          "{model} has a GGUF version that this llama-server does not read: {why}.",
          "Use a newer llama-server, or a newer conversion of the model.", _MODEL_BAD),
    _rule("model_corrupt",
          r"gguf_init_from_\w+: (?P<why>(?:failed|invalid|encountered|duplicate|tensor) ?.*)",
          "The header of {model} is damaged: {why}.", _DOWNLOAD, _MODEL_BAD),
    _rule("model_unsupported", r"unknown model architecture: '(?P<arch>.+)'",
          "This llama-server does not know the architecture {arch!r} of {model}.",
          "Use a newer llama-server, or another model.", _MODEL_BAD),
    _rule("model_unsupported", r"(?P<why>unknown pre-tokenizer type: '.+'|unknown projector type: .+)",
          "This llama-server does not know a part of {model}: {why}.",
          "Use a newer llama-server, or another model.", _MODEL_BAD),
    _rule("model_unsupported", r"failed to load (?P<kind>lora adapter|multimodal model),? '(?P<path>.+)'",
          "The file {path!r} is no {kind} that llama-server can use with this model.",
          "Check that it was made for this model.", _MODEL_BAD),
    _rule("model_corrupt", r"error loading model: (?P<why>(?!llama_model_loader: failed to load model).+)",
          "llama-server cannot load {model}: {why}.", _DOWNLOAD, _MODEL_BAD),
    # --- the device ---
    _rule("device_unsupported",
          r"(?P<why>no kernel image is available.*|CUDA driver version is insufficient.*)",
          "llama-server cannot use this device: {why}.", _OTHER_BUILD, _NO_RUNTIME),
    _rule("device_error", r"(?P<why>(?:CUDA|HIP|ROCm|MUSA|SYCL|Vulkan|Metal) error: .+|ErrorDeviceLost)",
          "The device failed: {why}.",
          "If it happens again, look for hardware errors (dmesg, nvidia-smi); try another llama.cpp build.",
          _GAVE_UP, again=False, late=True),
    # --- llama.cpp's own checks ---
    _rule("assertion", r"(?P<where>[\w.+-]+:\d+): GGML_ASSERT\((?P<what>.+)\) failed",
          "llama.cpp stopped itself: the assertion `{what}` failed at {where}.",
          "Report it to llama.cpp with these lines; try another build or fewer special flags.",
          _GAVE_UP, again=False, late=True),
    _rule("assertion", r"(?P<where>[\w.+-]+\.(?:c|cc|cpp|cu|cuh|h|m|metal):\d+): (?P<what>.+)",
          "llama.cpp stopped itself at {where}: {what}.",
          "Report it to llama.cpp with these lines; try another build or fewer special flags.",
          _GAVE_UP, again=False, late=True),
    _rule("aborted", r"^ *what\(\): +(?P<what>.+)",
          "llama-server gave up on an uncaught error: {what}.",
          "Check the arguments after --, if they are meant; else report it to llama.cpp with these lines.",
          _GAVE_UP),
    _rule("aborted", r"terminate called after throwing an instance of '(?P<what>.+)'",
          "llama-server ended with an uncaught {what}.",
          "Report it to llama.cpp with these lines; try another build.", _GAVE_UP, late=True),
    _rule("aborted", r"uncaught exception of type (?P<what>(?:\w+::)*\w+)",
          "llama-server ended with an uncaught {what}.",
          "Report it to llama.cpp with these lines; try another build.", _GAVE_UP, late=True),
    # --- the draft model (b11434 only logs the mismatch and serves without it; older builds end) ---
    _rule("draft_mismatch", r"(?P<why>vocabs are not compatible|draft model vocab .*must match.*|"
          r"draft model .*not compatible.*)",
          "The draft model does not fit the model: {why}.",
          "Use a draft model of the same family (same tokenizer), or none.", _MODEL_BAD),
    # --- nothing better was said ---
    _rule("load_failed", r"(?P<why>exiting due to model loading error|failed to create_context.*)",
          "llama-server could not load {model}.",
          "The lines above it say why; --log-level debug shows more.", _MODEL_BAD),
)  # fmt: skip

_ENDS: dict[str, _Rule] = {
    "SIGILL": _rule(
        "illegal_instruction", "", "llama-server was built for another processor (illegal instruction).",
        _OTHER_BUILD, _NO_RUNTIME, late=True),
    "SIGSEGV": _rule(
        "segfault", "", "llama-server crashed (segmentation fault).",
        "Try --kv-type f16 (llama.cpp #28524), then another build; report it to llama.cpp.",
        _GAVE_UP, again=False),
    "SIGBUS": _rule(
        "bus_error", "", "llama-server could not read a part of a file that it has mapped (SIGBUS).",
        "The model file was changed or cut while in use, or its disk fails.", _GAVE_UP, again=False),
    "SIGABRT": _rule(
        "aborted", "", "llama-server stopped itself (abort) without saying why.",
        "Report it to llama.cpp; try another build.", _GAVE_UP, again=False),
    "SIGKILL": _rule(
        "killed", "", "llama-server was killed from outside (SIGKILL), or by the kernel for want of memory.",
        f"See `dmesg` for the out-of-memory killer; then: {_SMALLER}.", _GAVE_UP, again=False),
}  # fmt: skip
_OOM_KILLED = _rule(
    "out_of_memory_host", "", "The kernel killed llama-server because memory ran out.",
    _HOST_MEMORY, _MACHINE, late=True,
)  # fmt: skip
_KILLED_BY = _rule(
    "killed", "", "llama-server was ended from outside ({exit}).",
    "Find out who sent it; llamasup did not.", _GAVE_UP, again=False,
)  # fmt: skip
_EXITED = _rule(
    "exited", "", "llama-server ended by itself (exit code 0), unasked.",
    "Find out whether somebody stopped it, or its program ends without serving.", _GAVE_UP, again=False,
)  # fmt: skip
_UNKNOWN = _rule(
    "unknown", "", "llama-server ended ({exit}) and did not say why.",
    "Look at its log, and at the lines before its end; --log-level debug shows more.", _GAVE_UP, again=False,
)  # fmt: skip

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TELLING = re.compile(
    r"^\S* ?E |(?i:error|fail|abort|terminate called|GGML_ASSERT|insufficient|cannot|couldn't)"
)
_NOISE = re.compile(r"common_fit_params: encountered an error|RuntimeError: Failed to init server")
# llama-server writes these lines after it has read the weights: at ``-lv 3`` first the line of the threads,
# at ``-lv 4`` first that of the context. Builds of 2024 use other function names.
_CONTEXT = re.compile(
    r"constructing llama_context|llama_new_context_with_model: |llama_kv_cache\w*: |threadpool init|"
    r"warming up the model|initializing, n_slots|initializing slots|model loaded"
)
_FITTING = re.compile(r"fitting params to (?:device memory|free memory took)")
_MODEL = re.compile(r"failed to load (?:draft )?model, '(?P<path>.+)'")


def diagnose(
    exit: Exit, lines: Sequence[str], *, phase: Phase, asked: bool = False, oom_killed: bool = False
) -> Diagnosis:
    """Explain ``exit`` by the child's last ``lines`` (oldest first).

    ``asked``: the supervisor had told it to stop. ``oom_killed``: the kernel's own count says that its
    out-of-memory killer struck (cgroup ``memory.events``).
    """
    lines = [_ANSI.sub("", line).rstrip() for line in lines]
    if phase == "starting":
        lines = [*(own := own_lines(lines)), *last_words(lines[len(own) :])]
    else:
        # An abort or an exit code comes with messages; other signals end a server without one.
        lines = last_words(lines) if exit.signal in (None, "SIGABRT") else []
    if (asked or phase == "stopping") and (exit.signal is None or exit.signal in _STOPS):
        return Diagnosis("stopped", f"llama-server was stopped ({exit}).", "", (), False, 0)
    if exit.signal in _STOPS:
        if oom_killed:
            return _apply(_OOM_KILLED, exit, lines, phase)
        return _apply(_ENDS.get(exit.signal, _KILLED_BY), exit, lines, phase)
    if exit.code == 0:
        return _apply(_EXITED, exit, lines, phase)
    if exit.signal != "SIGILL":
        for rule in _RULES:
            if rule.only_starting and phase != "starting":
                continue
            for line in lines:
                if found := rule.pattern.search(line):
                    return _apply(rule, exit, lines, phase, found)
    return _apply(_ENDS.get(exit.signal or "", _UNKNOWN), exit, lines, phase)


# The signals that somebody sends, as opposed to those that a program earns.
_STOPS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


def _apply(
    rule: _Rule, exit: Exit, lines: Sequence[str], phase: Phase, found: re.Match[str] | None = None
) -> Diagnosis:
    model = next((m["path"] for line in lines if (m := _MODEL.search(line))), None)
    values = {"model": repr(model) if model else "the model file", "exit": str(exit)}
    if found is not None:
        values |= {name: value.strip().rstrip(".") for name, value in found.groupdict().items()}
    return Diagnosis(
        cause=rule.cause,
        message=rule.message.format(**values),
        remedy=rule.remedy.format(**values),
        lines=_telling(lines, found.string if found else None),
        # What served before may serve again: then only a crash loop is the end of it (S3).
        deterministic=rule.deterministic and phase == "starting",
        exit_code=rule.exit_code,
        weights_read=phase == "starting" and weights_were_read(lines),
    )


def weights_were_read(lines: Sequence[str]) -> bool:
    """Whether the server with this log had begun to create its context, or was further.

    ``--fit`` also creates contexts, before it reads any weights (b11434 logs them at ``-lv 5``).
    """
    fitting = False
    for line in lines:
        if _FITTING.search(line):
            fitting = "fitting params to device memory" in line
        elif not fitting and _CONTEXT.search(line):
            return True
    return False


def _telling(lines: Sequence[str], cause: str | None) -> tuple[str, ...]:
    """The lines that say what went wrong: the first one and the last ones, each text once, no time stamps.

    Where no line tells anything, the last three, for the reader to see how far it came.
    """
    telling = [line for line in lines if _TELLING.search(line) and not _NOISE.search(line)]
    if cause is None and not telling:
        telling = [line for line in lines if line][-3:]
    elif cause is not None:
        # What came before the cause is another story.
        telling = [cause, *telling[telling.index(cause) + 1 :]] if cause in telling else [cause, *telling]
    unique = list(dict.fromkeys(STAMP.sub("", line) for line in telling))
    return tuple(unique if len(unique) <= _MAX_LINES else [unique[0], *unique[1 - _MAX_LINES :]])
