"""The diagnosis of an exit: its cause and a remedy, from the exit code or signal and the last log lines.

The first rule of the table below that matches a line gives the cause. The patterns follow llama.cpp b11434,
and older builds where they differ. tests/fixtures/crashes has the logs: real ones, and ``.made.log`` written
after the source. Of a server that clients can reach, only lines without text of a client count
(``trusted_lines.py``).

A cause in the flags, the file, the build or the memory would recur at once, so there is no restart (S4). A
signal without an explanation counts as a crash, and the server is restarted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from llamasup.core.llama_server.plan_limits import Adjustment
from llamasup.core.llama_server.trusted_lines import STAMP, trusted_head, trusted_tail
from llamasup.core.system.process.child import Exit

Phase = Literal["starting", "ready", "stopping"]

WORKER_LOST = "rpc_worker_lost"
"""The cause if llama-server ended because it lost an RPC worker (``rpc/workers.py`` names it)."""

_KILLED = "killed"
_MAX_LINES = 8
# Exit codes (docs/design.md, Exit codes).
_USAGE, _MODEL_BAD, _MODEL_MISSING, _NO_RUNTIME, _MACHINE, _GAVE_UP = 2, 65, 66, 69, 71, 75


class Diagnosis(Struct, frozen=True):
    """The cause of an exit.

    ``cause``: a stable identifier (metrics, events). ``message``: what happened. ``remedy``: what to do.
    ``lines``: the relevant lines of the child's output, oldest first, without time stamps.
    ``deterministic``: it would happen again at once, so there is no restart (S4). ``exit_code``: llamasup's
    own, if it gives up. ``adjustment``: what the next start changes (S5). ``weights_read``: according to the
    log, the weights were read before the exit.
    """

    cause: str
    message: str
    remedy: str
    lines: tuple[str, ...]
    deterministic: bool
    exit_code: int
    adjustment: Adjustment | None = None
    weights_read: bool = False


class _Rule(Struct, frozen=True):
    """A row of the table.

    ``message`` and ``remedy`` may have the pattern's groups, ``{model}``, ``{exit}`` and ``{build}``.
    ``recurs``: a restart would fail again. ``when_ready``: the rule also applies to a ready server.
    """

    cause: str
    pattern: str
    message: str
    remedy: str
    exit_code: int
    recurs: bool = True
    when_ready: bool = False


_SMALLER = "use a smaller --ctx-size, fewer --parallel slots, --kv-type q8_0 or a smaller quantization"
_HOST_MEMORY = f"Free memory, or {_SMALLER}."
_DEVICE_MEMORY = f"Free the device's memory, set fewer --gpu-layers, or {_SMALLER}."
_OTHER_BUILD = "Use a llama-server that was built for this machine (--runtime), or the embedded one."
_DOWNLOAD = "Download it again, and compare its size and checksum with the publisher's."
_CHECK_FLAG = "Remove or correct it. If llamasup chose it, `llamasup plan` shows why."
_WORKER = "Check the worker's log on its machine, its version, and the network between the machines."
_REPORT = "Report it to llama.cpp with these lines, and try another build."
_REPORT_FLAGS = "Report it to llama.cpp with these lines; try another build, or fewer arguments after --."

RAISE_LIMIT = "Raise it: --pids-limit of the container, TasksMax= of the unit, or ulimit -u of the user."

_RULES: tuple[_Rule, ...] = (
    # --- the executable ---
    _Rule("library_missing", r"error while loading shared libraries: (?P<library>[^:\s]+): (?P<why>.+)",
          "The shared library {library} of llama-server cannot be loaded: {why}.",
          "Install the package that brings {library}, or keep llama-server together with its libraries.",
          _NO_RUNTIME),
    _Rule("library_missing", r"Library not loaded: (?P<library>\S+)",
          "The shared library {library} of llama-server cannot be loaded.",
          "Install the package that brings {library}, or keep llama-server together with its libraries.",
          _NO_RUNTIME),
    _Rule("library_missing", r"version [`'](?P<library>\w+_[\d.]+)' not found",
          "llama-server needs {library}, which this system's libraries do not have.",
          _OTHER_BUILD, _NO_RUNTIME),
    _Rule("runtime_broken", r"llamasup: cannot execute (?P<path>.+): (?P<why>[^:]+)$",
          "Cannot execute {path!r}: {why}.", _OTHER_BUILD, _NO_RUNTIME),
    _Rule("runtime_broken", r"ModuleNotFoundError: No module named '(?P<module>[\w.]+)'",
          "The embedded runtime lacks the Python module {module!r}.",
          "Install it in the environment of the embedded runtime: python -m pip install xllamacpp.",
          _NO_RUNTIME),
    # --- the command line ---
    _Rule("flag_unknown", r"error: invalid argument: (?P<flag>.+)",
          "This llama-server does not know the argument {flag!r}.", _CHECK_FLAG, _USAGE),
    _Rule("flag_removed", r'error while handling argument "(?P<flag>.+?)": .* removed\. use (?P<instead>.+)',
          "This llama-server no longer has the argument {flag!r}.", "Use {instead}.", _USAGE),
    _Rule("flag_removed", r'error while handling argument "(?P<flag>.+?)": .* removed',
          "This llama-server no longer has the argument {flag!r}.", "Leave it out.", _USAGE),
    _Rule("flag_invalid", r'error while handling argument "(?P<flag>.+?)": sto[a-z]+$',
          "The value of llama-server's argument {flag!r} is not a number.", _CHECK_FLAG, _USAGE),
    _Rule("flag_invalid", r'error while handling (?P<kind>argument|environment variable) "(?P<flag>.+?)": '
          r"(?:error: )?(?P<why>.+)",
          "llama-server rejects the value of the {kind} {flag!r}: {why}.", _CHECK_FLAG, _USAGE),
    _Rule("flag_invalid", r"static assets path not found: (?P<path>.+)",
          "The folder {path!r} given to --path does not exist.",
          "Correct or remove --path.", _USAGE),
    # --- the address (llama-server does not say why it could not bind) ---
    _Rule("port_in_use", r"couldn't bind HTTP server socket, hostname: (?P<socket>\S+\.sock)\b",
          "llama-server could not listen on the socket {socket}: the file exists already, its folder is "
          "missing, or the path is longer than 107 bytes.",
          "Remove the file if no server uses it any more, or choose another path.", _MACHINE, recurs=False),
    _Rule("port_in_use", r"couldn't bind HTTP server socket, hostname: (?P<host>.*), port: (?P<port>\d+)",
          "llama-server could not listen on {host} port {port}: it is in use, or this user may not use it.",
          "Choose another port (0 for any free one).", _MACHINE, recurs=False),
    # --- memory. Before assertions, because a failed allocation often triggers one ---
    _Rule("out_of_memory_device", r"(?:CUDA|HIP|ROCm|MUSA|SYCL) error: (?P<why>.*out of memory.*)",
          "The device ran out of memory: {why}.", _DEVICE_MEMORY, _MACHINE, when_ready=True),
    _Rule("out_of_memory_device", r"(?P<why>allocating [\d.]+ MiB on device \d+: \w+ failed: out of memory)",
          "The device ran out of memory: {why}.", _DEVICE_MEMORY, _MACHINE, when_ready=True),
    _Rule("out_of_memory_device",
          r"(?P<why>ErrorOutOfDeviceMemory|Device memory allocation of size \d+ failed|"
          r"kIOGPUCommandBufferCallbackErrorOutOfMemory)",
          "The device ran out of memory: {why}.", _DEVICE_MEMORY, _MACHINE, when_ready=True),
    _Rule("out_of_memory_device",
          r"(?:unable|failed) to allocate (?P<device>(?!CPU)[A-Z]\w*\d(?:\[\S+\])?) buffer",
          "{device} ran out of memory.", _DEVICE_MEMORY, _MACHINE, when_ready=True),
    _Rule("out_of_memory_host", r"insufficient memory \(attempted to allocate +(?P<size>[\d.]+) MB\)",
          "The machine ran out of memory: llama-server could not allocate another {size} MB.",
          _HOST_MEMORY, _MACHINE, when_ready=True),
    _Rule("out_of_memory_host", r"(?P<why>std::bad_alloc|Cannot allocate memory|MemoryError)",
          "The machine ran out of memory: {why}.", _HOST_MEMORY, _MACHINE, when_ready=True),
    _Rule("out_of_memory_host",
          r"(?P<why>(?:unable|failed) to allocate (?:\S+ )?(?:buffer|compute buffers).*)",
          "The machine ran out of memory: {why}.", _HOST_MEMORY, _MACHINE),
    # --- the limit of threads (RLIMIT_NPROC, pids.max) ---
    _Rule("tasks_limit",
          r"what\(\): +Resource temporarily unavailable|Thread creation failed|pthread_create failed",
          "llama-server could not start another thread: the limit of processes and threads is reached.",
          RAISE_LIMIT, _MACHINE, when_ready=True),
    # --- the KV cache ---
    _Rule("kv_unsupported",
          r"(?i:quantized V cache requires flash_attn|V cache quantization requires flash_attn)",
          "A quantized V cache needs flash attention, which is off.",
          "Set --flash-attn on, or --kv-type f16.", _USAGE),
    _Rule("kv_unsupported",
          r"(?P<side>[KV]) cache type (?P<type>\S+) with block size (?P<block>\d+) does not divide "
          r"n_embd_head_[kv]=(?P<size>\d+)",
          "The {side} cache cannot be {type}: this model's head size {size} is not a multiple of {block}.",
          "Set --kv-type f16.", _USAGE),
    # --- the model file ---
    _Rule("model_unreadable", r"failed to open GGUF file '(?P<path>.+)' \(Permission denied\)",
          "This user may not read the file {path!r}.", "Change its permissions (chmod +r), or its owner.",
          _MODEL_MISSING),
    _Rule("model_missing", r"failed to open GGUF file '(?P<path>.+)' \((?P<why>.+)\)",
          "The file {path!r} cannot be opened: {why}.", "Check the path.", _MODEL_MISSING),
    _Rule("model_missing", r"failed to load CLIP model from (?P<path>.+)\. Does this file exist\?",
          "The projector {path!r} cannot be opened.", "Check the path given to --mmproj.", _MODEL_MISSING),
    _Rule("model_missing", r"adapter_lora_init: failed to open '(?P<path>.+?)'",
          "The file {path!r} cannot be opened.", "Check the path given to --lora.", _MODEL_MISSING),
    _Rule("model_missing", r"failed to open (?P<quote>'?)(?P<path>.+\.gguf)(?P=quote)",
          "The file {path!r} cannot be opened.", "Check the path.", _MODEL_MISSING),
    _Rule("model_corrupt", r"invalid magic characters:? (?P<magic>.+?)(?:, expected|$)",
          "{model} is not a GGUF file: it begins with {magic}.",
          "Give a .gguf file. A safetensors or old GGML file must be converted first.", _MODEL_BAD),
    _Rule("model_corrupt", r"(?P<why>tensor '.+' data is not within the file bounds)",
          "{model} is shorter than its header says: {why}.", _DOWNLOAD, _MODEL_BAD),
    _Rule("model_corrupt", r"failed to read magic",
          "{model} is empty, or not a file.", "Give the path of a .gguf file.", _MODEL_BAD),
    _Rule("model_unsupported",
          r"(?P<why>this GGUF file is version \d+ but .+|GGUFv1 is no longer supported.*)",
          "{model} has a GGUF version that this llama-server does not read: {why}.",
          "Use a newer llama-server, or a newer conversion of the model.", _MODEL_BAD),
    _Rule("model_corrupt",
          r"gguf_init_from_\w+: (?P<why>(?:failed|invalid|encountered|duplicate|tensor) ?.*)",
          "The header of {model} is damaged: {why}.", _DOWNLOAD, _MODEL_BAD),
    _Rule("model_unsupported", r"unknown model architecture: '(?P<arch>.+)'",
          "This llama-server{build} does not know the architecture {arch!r} of {model}.",
          "Use a newer llama-server, or another model.", _MODEL_BAD),
    _Rule("model_unsupported", r"(?P<why>unknown pre-tokenizer type: '.+'|unknown projector type: .+)",
          "This llama-server does not know a part of {model}: {why}.",
          "Use a newer llama-server, or another model.", _MODEL_BAD),
    _Rule("model_unsupported", r"failed to init decision model: (?P<why>.+)",
          "This llama-server{build} cannot make decisions with {model}: {why}.",
          "Use a newer llama-server, or another model.", _MODEL_BAD),
    _Rule("model_unsupported", r"failed to load (?P<kind>lora adapter|multimodal model),? '(?P<path>.+)'",
          "llama-server cannot use the file {path!r} as a {kind} for this model.",
          "Check that it was made for this model.", _MODEL_BAD),
    _Rule("model_corrupt", r"error loading model: (?P<why>(?!llama_model_loader: failed to load model).+)",
          "llama-server cannot load {model}: {why}.", _DOWNLOAD, _MODEL_BAD),
    # --- the device ---
    _Rule("device_unsupported",
          r"(?P<why>no kernel image is available.*|CUDA driver version is insufficient.*)",
          "llama-server cannot use this device: {why}.", _OTHER_BUILD, _NO_RUNTIME),
    _Rule("device_error", r"(?P<why>(?:CUDA|HIP|ROCm|MUSA|SYCL|Vulkan|Metal) error: .+|ErrorDeviceLost)",
          "The device failed: {why}.",
          "If this happens again, check for hardware errors (dmesg, nvidia-smi), or try another build.",
          _GAVE_UP, recurs=False, when_ready=True),
    # --- the workers of one model over several machines; llama-server does not say which one it lost ---
    # Its logger is a thread, whose lines can tear the message of the abort apart (b11434).
    _Rule(WORKER_LOST,
          r"Remote RPC server crashed|(?:send|recv) failed \(bytes_(?:sent|recv)=\d+, size_to_(?:send|recv)=",
          "llama-server lost one of its RPC workers.", _WORKER, _GAVE_UP, recurs=False, when_ready=True),
    _Rule(WORKER_LOST,
          r"ggml-rpc\.cpp:\d+: (?:Failed to connect to|RPC handshake failed for) (?P<worker>\S+)",
          "llama-server could not use the RPC worker {worker}.", _WORKER, _GAVE_UP, recurs=False,
          when_ready=True),
    # --- llama.cpp's own checks ---
    _Rule("assertion", r"(?P<where>[\w.+-]+:\d+): GGML_ASSERT\((?P<what>.+)\) failed",
          "llama.cpp aborted: the assertion `{what}` failed at {where}.", _REPORT_FLAGS, _GAVE_UP,
          recurs=False, when_ready=True),
    _Rule("assertion", r"(?P<where>[\w.+-]+\.(?:c|cc|cpp|cu|cuh|h|m|metal):\d+): (?P<what>.+)",
          "llama.cpp aborted at {where}: {what}.", _REPORT_FLAGS, _GAVE_UP, recurs=False, when_ready=True),
    _Rule("aborted", r"^ *what\(\): +(?P<what>.+)",
          "llama-server ended with an uncaught error: {what}.",
          "Check the arguments after --. If they are right, report it to llama.cpp with these lines.",
          _GAVE_UP),
    _Rule("aborted", r"terminate called after throwing an instance of '(?P<what>.+)'",
          "llama-server ended with an uncaught {what}.",
          _REPORT, _GAVE_UP, when_ready=True),
    _Rule("aborted", r"uncaught exception of type (?P<what>(?:\w+::)*\w+)",
          "llama-server ended with an uncaught {what}.",
          _REPORT, _GAVE_UP, when_ready=True),
    # --- the draft model (b11434 only logs the mismatch and serves without it; older builds end) ---
    _Rule("draft_mismatch", r"(?P<why>vocabs are not compatible|draft model vocab .*must match.*|"
          r"draft model .*not compatible.*)",
          "The draft model is not compatible with the model: {why}.",
          "Use a draft model of the same family (same tokenizer), or none.", _MODEL_BAD),
    # --- no specific cause ---
    _Rule("load_failed", r"(?P<why>exiting due to model loading error|failed to create_context.*)",
          "llama-server could not load {model}.",
          "The log lines before its end may show why; --log-level debug shows more.", _MODEL_BAD),
)  # fmt: skip

_SIGNALS: dict[str, _Rule] = {
    "SIGILL": _Rule(
        "illegal_instruction", "", "llama-server was built for another processor (illegal instruction).",
        _OTHER_BUILD, _NO_RUNTIME, when_ready=True),
    "SIGSEGV": _Rule(
        "segfault", "", "llama-server crashed (segmentation fault).",
        "With a quantized KV cache, try --kv-type f16 (llama.cpp #28524). "
        "Try another build, and report it to llama.cpp.",
        _GAVE_UP, recurs=False),
    "SIGBUS": _Rule(
        "bus_error", "", "llama-server could not read a part of a memory-mapped file (SIGBUS).",
        "The model file was changed or truncated while in use, or its disk fails: check both.",
        _GAVE_UP, recurs=False),
    "SIGABRT": _Rule(
        "aborted", "", "llama-server aborted without a message (SIGABRT).",
        "Report it to llama.cpp, and try another build.", _GAVE_UP, recurs=False),
    "SIGKILL": _Rule(
        _KILLED, "",
        "llama-server was killed (SIGKILL) by another program, or by the kernel for lack of memory.",
        f"Check `dmesg` for the out-of-memory killer. If it was that: {_SMALLER}.", _GAVE_UP, recurs=False),
}  # fmt: skip
_OOM_KILLED = _Rule(
    "out_of_memory_host", "", "The kernel killed llama-server because the memory ran out.",
    _HOST_MEMORY, _MACHINE, when_ready=True,
)  # fmt: skip
_KILLED_BY = _Rule(
    _KILLED, "", "Another program ended llama-server ({exit}).",
    "Find the program that sent the signal; llamasup did not.", _GAVE_UP, recurs=False,
)  # fmt: skip
_EXITED = _Rule(
    "exited", "", "llama-server ended by itself with exit code 0, although it should serve.",
    "Check whether another program stopped it, and whether the program is a llama-server.",
    _GAVE_UP, recurs=False,
)  # fmt: skip
_UNKNOWN = _Rule(
    "unknown", "", "llama-server ended ({exit}), and its output names no known cause.",
    "Read the end of its log (llamasup logs); --log-level debug shows more.", _GAVE_UP, recurs=False,
)  # fmt: skip

_ANSI = r"\x1b\[[0-9;]*[A-Za-z]"
_RELEVANT = r"^\S* ?E |(?i:error|fail|abort|terminate called|GGML_ASSERT|insufficient|cannot|couldn't)"
_NOISE = r"common_fit_params: encountered an error|RuntimeError: Failed to init server"
# llama-server writes these lines after it has read the weights: at ``-lv 3`` first the line of the threads,
# at ``-lv 4`` first that of the context. Builds of 2024 use other function names.
_CONTEXT = (
    r"constructing llama_context|llama_new_context_with_model: |llama_kv_cache\w*: |threadpool init|"
    r"warming up the model|initializing, n_slots|initializing slots|model loaded"
)
_FITTING = r"fitting params to (?:device memory|free memory took)"
_MODEL = r"failed to load (?:draft )?model, '(?P<path>.+)'"


def diagnose(
    exit: Exit,
    lines: Sequence[str],
    *,
    phase: Phase,
    requested: bool = False,
    oom_killed: bool = False,
    build: str = "",
) -> Diagnosis:
    """Explain ``exit`` by the child's last ``lines`` (oldest first).

    ``requested``: llamasup stopped the child. ``oom_killed``: the kernel counted an out-of-memory kill
    (``oom_kills``). ``build``: the version of the program.
    """
    lines = [re.sub(_ANSI, "", line).rstrip() for line in lines]
    if phase == "starting":
        lines = [*(own := trusted_head(lines)), *trusted_tail(lines[len(own) :])]
    else:
        # Only an abort or an exit code comes with a message.
        lines = trusted_tail(lines) if exit.signal in (None, "SIGABRT") else []
    if (requested or phase == "stopping") and (exit.signal is None or exit.signal in _STOPS):
        return Diagnosis("stopped", f"llama-server was stopped ({exit}).", "", (), False, 0)
    if exit.signal in _STOPS:
        if oom_killed:
            return _apply(_OOM_KILLED, exit, lines, phase)
        return _apply(_SIGNALS.get(exit.signal, _KILLED_BY), exit, lines, phase)
    if exit.code == 0:
        return _apply(_EXITED, exit, lines, phase)
    if exit.signal != "SIGILL":
        for rule in _RULES:
            if not rule.when_ready and phase != "starting":
                continue
            for line in lines:
                if found := re.search(rule.pattern, line):
                    return _apply(rule, exit, lines, phase, found, build)
    return _apply(_SIGNALS.get(exit.signal or "", _UNKNOWN), exit, lines, phase)


# Signals from another program, unlike those for the program's own errors.
_STOPS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


def _apply(
    rule: _Rule,
    exit: Exit,
    lines: Sequence[str],
    phase: Phase,
    found: re.Match[str] | None = None,
    build: str = "",
) -> Diagnosis:
    model = next((m["path"] for line in lines if (m := re.search(_MODEL, line))), None)
    values = {"model": repr(model) if model else "the model file", "exit": str(exit)}
    values["build"] = f" ({build})" if build else ""
    if found is not None:
        values |= {name: value.strip().rstrip(".") for name, value in found.groupdict().items()}
    return Diagnosis(
        cause=rule.cause,
        message=rule.message.format(**values),
        remedy=rule.remedy.format(**values),
        lines=_relevant_lines(lines, found.string if found else None),
        # A server that has served may serve again; only a crash loop ends the restarts (S3).
        deterministic=rule.recurs and phase == "starting",
        exit_code=rule.exit_code,
        weights_read=phase == "starting" and weights_were_read(lines),
    )


def may_be_of_a_request(diagnosis: Diagnosis) -> bool:
    """Return whether a request may be the reason, and not another program or the loss of an RPC worker."""
    return diagnosis.cause not in (_KILLED, WORKER_LOST)


def weights_were_read(lines: Sequence[str]) -> bool:
    """Return whether the log shows that the server has begun to create its context.

    ``--fit`` also creates contexts, before it reads any weights (b11434 logs them at ``-lv 5``).
    """
    fitting = False
    for line in lines:
        if re.search(_FITTING, line):
            fitting = "fitting params to device memory" in line
        elif not fitting and re.search(_CONTEXT, line):
            return True
    return False


def _relevant_lines(lines: Sequence[str], cause: str | None) -> tuple[str, ...]:
    """The first and the last error lines, each once, without time stamps; else the last three lines."""
    relevant = [line for line in lines if re.search(_RELEVANT, line) and not re.search(_NOISE, line)]
    if cause is None and not relevant:
        relevant = [line for line in lines if line][-3:]
    elif cause is not None:
        # Errors before the cause are not part of it.
        relevant = (
            [cause, *relevant[relevant.index(cause) + 1 :]] if cause in relevant else [cause, *relevant]
        )
    unique = list(dict.fromkeys(STAMP.sub("", line) for line in relevant))
    return tuple(unique if len(unique) <= _MAX_LINES else [unique[0], *unique[1 - _MAX_LINES :]])
