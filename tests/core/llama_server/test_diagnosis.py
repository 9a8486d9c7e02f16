"""The diagnosis of an exit. The logs are real ones except `*.made.log`."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.diagnosis import Diagnosis, Phase, diagnose
from llamasup.core.system.process.child import Exit
from tests.kit.paths import FIXTURES

CRASHES = FIXTURES / "crashes"

# log → phase, cause, deterministic, exit code, what the message or remedy must name
EXPECTED: dict[str, tuple[Phase, str, bool, int, str]] = {
    "assertion.log": ("starting", "assertion", False, 75, "`n_expert_used_max > 0` failed at llama-model"),
    "bad-magic.log": ("starting", "model_corrupt", True, 65, "begins with 'NOPE'"),
    "bad-value-fa.log": ("starting", "flag_invalid", True, 2, "unknown value"),
    "bad-value.log": ("starting", "flag_invalid", True, 2, "'--ctx-size' is not a number"),
    "cut-header.log": ("starting", "model_corrupt", True, 65, "failed to read key-value pairs"),
    "decision-type.log": ("starting", "model_unsupported", True, 65, "decision model type: future-d9"),
    "directory.log": ("starting", "model_corrupt", True, 65, "'/models' is empty, or not a file"),
    "draft-missing.log": ("starting", "model_missing", True, 66, "'/models/nope.gguf'"),
    "draft-vocab-serves-on.log": ("ready", "killed", False, 75, "SIGKILL"),
    "empty.log": ("starting", "model_corrupt", True, 65, "'/models/empty.gguf' is empty"),
    "grammar-bad.log": ("starting", "aborted", True, 75, "error: failed to parse grammar. Check"),
    "thread-limit.log": ("starting", "tasks_limit", True, 71, "could not start another thread"),
    "thread-limit-later.made.log": ("starting", "tasks_limit", True, 71, "could not start another thread"),
    "head-size-q8.log": ("starting", "kv_unsupported", True, 2, "40 is not a multiple of 32"),
    "library-missing.log": ("starting", "library_missing", True, 69, "libllama-server-impl.so"),
    "lora-bad.log": ("starting", "model_unsupported", True, 65, "as a lora adapter"),
    "lora-missing.log": ("starting", "model_missing", True, 66, "The file 'nope.gguf' cannot be opened"),
    "missing-file.log": ("starting", "model_missing", True, 66, "No such file or directory"),
    "missing-tensor.log": ("starting", "model_corrupt", True, 65, "'blk.2.attn_norm.weight' not found"),
    "missing-value.log": ("starting", "flag_invalid", True, 2, "expected value for argument"),
    "mmproj-bad.log": ("starting", "model_unsupported", True, 65, "as a multimodal model"),
    "mmproj-missing.log": ("starting", "model_missing", True, 66, "'/models/nope.gguf'"),
    "out-of-memory-assertion.log": ("starting", "out_of_memory_host", True, 71, "another 19.73 MB"),
    "out-of-memory-kv.log": ("starting", "out_of_memory_host", True, 71, "another 1024.00 MB"),
    "out-of-memory-weights.log": ("starting", "out_of_memory_host", True, 71, "another 324.10 MB"),
    "parallel-zero.log": ("starting", "flag_invalid", True, 2, "'--parallel'"),
    "port-busy.log": ("starting", "port_in_use", False, 71, "127.0.0.1 port 40561"),
    "quantised-v-fa-off.log": ("starting", "kv_unsupported", True, 2, "--flash-attn on"),
    "removed-flag.log": ("starting", "flag_removed", True, 2, "Use --spec-draft-n-max"),
    "removed-mlock.log": ("starting", "flag_unknown", True, 2, "'--mlock'"),
    "signal-ABRT.log": ("ready", "aborted", False, 75, "abort"),
    "signal-ILL.log": ("ready", "illegal_instruction", False, 69, "another processor"),
    "signal-KILL.log": ("ready", "killed", False, 75, "by another program"),
    "signal-SEGV.log": ("ready", "segfault", False, 75, "segmentation fault"),
    "signal-TERM.log": ("ready", "exited", False, 75, "by itself"),
    "socket-stale.log": ("starting", "port_in_use", False, 71, "/run/s2.sock"),
    "truncated.log": ("starting", "model_corrupt", True, 65, "not within the file bounds"),
    "unknown-arch.log": ("starting", "model_unsupported", True, 65, "'xlama'"),
    "static-path-missing.log": ("starting", "flag_invalid", True, 2, "'/nope' given to --path"),
    "unknown-device.log": ("starting", "flag_invalid", True, 2, "invalid device: CUDA0"),
    "unknown-flag.log": ("starting", "flag_unknown", True, 2, "'--frobnicate'"),
    "unreadable.log": ("starting", "model_unreadable", True, 66, "This user may not read"),
    "version1.log": ("starting", "model_unsupported", True, 65, "GGUFv1"),
    "version9.log": ("starting", "model_unsupported", True, 65, "version 9"),
    "xllamacpp-missing-file.log": ("starting", "model_missing", True, 66, "'/models/nope.gguf'"),
    "xllamacpp-out-of-memory-kv.log": ("starting", "out_of_memory_host", True, 71, "another 1024.00 MB"),
    "xllamacpp-quantised-v-fa-off.log": ("starting", "kv_unsupported", True, 2, "flash attention"),
    "xllamacpp-socket-stale.log": ("starting", "port_in_use", False, 71, "/run/x.sock"),
    "xllamacpp-truncated.log": ("starting", "model_corrupt", True, 65, "'/models/truncated.gguf'"),
    "xllamacpp-unknown-arch.log": ("starting", "model_unsupported", True, 65, "'xlama'"),
    "abort-fatal-error.made.log": ("starting", "assertion", False, 75, "ggml-backend.cpp:1455: pre"),
    "bad-alloc.made.log": ("starting", "out_of_memory_host", True, 71, "std::bad_alloc"),
    "bad-environment.made.log": ("starting", "flag_invalid", True, 2, "variable 'LLAMA_ARG_CTX_SIZE'"),
    "cuda-illegal-access.made.log": ("ready", "device_error", False, 75, "illegal memory access"),
    "cuda-library-missing.made.log": ("starting", "library_missing", True, 69, "libcudart.so.12"),
    "cuda-no-kernel-image.made.log": ("starting", "device_unsupported", True, 69, "no kernel image"),
    "cuda-out-of-memory-request.made.log": ("ready", "out_of_memory_device", False, 71, "out of memory"),
    "cuda-out-of-memory-weights.made.log": ("starting", "out_of_memory_device", True, 71, "22118.40 MiB"),
    "draft-vocab-old.made.log": ("starting", "draft_mismatch", True, 65, "not compatible"),
    "embedded-module-missing.made.log": ("starting", "runtime_broken", True, 69, "pip install xllamacpp"),
    "exec-format.made.log": ("starting", "runtime_broken", True, 69, "Exec format error"),
    "glibc-too-old.made.log": ("starting", "library_missing", True, 69, "GLIBC_2.38"),
    "load-failed-silently.made.log": ("starting", "load_failed", True, 65, "'/models/big.gguf'"),
    "macos-library-missing.made.log": ("starting", "library_missing", True, 69, "@rpath/libllama.0.dylib"),
    "old-build-missing-file.made.log": ("starting", "model_missing", True, 66, "'/models/big.gguf'"),
    "old-build-quantised-v.made.log": ("starting", "kv_unsupported", True, 2, "--kv-type f16"),
    "removed-flag-no-advice.made.log": ("starting", "flag_removed", True, 2, "Leave it out"),
    "rpc-worker-absent.log": ("starting", "rpc_worker_lost", False, 75, "127.0.0.1:45999"),
    "rpc-worker-killed-late-line.log": ("ready", "rpc_worker_lost", False, 75, "one of its RPC workers"),
    "rpc-worker-killed-torn-line.made.log": ("ready", "rpc_worker_lost", False, 75, "one of its RPC workers"),
    "rpc-worker-killed.log": ("ready", "rpc_worker_lost", False, 75, "one of its RPC workers"),
    "silent.made.log": ("starting", "unknown", False, 75, "exit code 1"),
    "uncaught-exception.made.log": ("starting", "aborted", True, 75, "unordered_map::at"),
    "unknown-pre-tokenizer.made.log": ("starting", "model_unsupported", True, 65, "'brandnew'"),
    "vulkan-out-of-memory.made.log": ("starting", "out_of_memory_device", True, 71, "4294967296"),
}  # fmt: skip


def read(name: str) -> tuple[Exit, list[str]]:
    lines = (CRASHES / name).read_text().splitlines()
    end = lines[1].removeprefix("# exit: ")
    return Exit(int(end), None) if end.isdigit() else Exit(None, end), lines[2:]


def diagnosis_of(name: str) -> Diagnosis:
    exit, lines = read(name)
    return diagnose(exit, lines, phase=EXPECTED[name][0])


def test_every_recorded_crash_has_an_expected_diagnosis() -> None:
    assert {path.name for path in CRASHES.glob("*.log")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_crash_is_diagnosed(name: str) -> None:
    _, cause, deterministic, exit_code, excerpt = EXPECTED[name]
    diagnosis = diagnosis_of(name)
    assert (diagnosis.cause, diagnosis.deterministic, diagnosis.exit_code) == (
        cause,
        deterministic,
        exit_code,
    )
    assert excerpt in f"{diagnosis.message} {diagnosis.remedy}"
    assert diagnosis.remedy
    assert "{" not in diagnosis.message + diagnosis.remedy


@pytest.mark.parametrize("name", EXPECTED)
def test_relevant_lines_are_few_and_from_the_log(name: str) -> None:
    _, lines = read(name)
    quoted = diagnosis_of(name).lines
    assert len(quoted) <= 8
    assert len(set(quoted)) == len(quoted)
    assert all(any(line.rstrip().endswith(one) for line in lines) for one in quoted)
    assert not any(one.startswith("0.0") for one in quoted)


def test_line_of_the_cause_comes_first() -> None:
    assert diagnosis_of("missing-file.log").lines[0] == (
        "gguf_init_from_file: failed to open GGUF file '/models/nope.gguf' (No such file or directory)"
    )


def test_first_and_last_of_many_lines_are_quoted() -> None:
    lines = ["error: invalid argument: -x", *(f"error {n}" for n in range(100))]
    quoted = diagnose(Exit(1, None), lines, phase="starting").lines
    assert quoted == ("error: invalid argument: -x", *(f"error {n}" for n in range(93, 100)))


def test_cause_without_the_word_error_is_quoted() -> None:
    lines = ["srv: draft model and target: vocabs are not compatible", "srv: failed to start"]
    assert diagnose(Exit(1, None), lines, phase="starting").lines == tuple(lines)


def test_cause_is_quoted_before_other_errors() -> None:
    lines = [
        "error: one",
        "llama-server: /lib/libc.so.6: version `GLIBC_2.38' not found (required by llama-server)",
    ]
    assert diagnose(Exit(1, None), lines, phase="starting").lines == (lines[1], lines[0])


@pytest.mark.parametrize(
    "end", [Exit(0, None), Exit(1, None), Exit(None, "SIGTERM"), Exit(None, "SIGKILL")], ids=str
)
@pytest.mark.parametrize(("phase", "requested"), [("ready", True), ("starting", True), ("stopping", False)])
def test_requested_exit_is_no_failure(end: Exit, phase: Phase, requested: bool) -> None:
    diagnosis = diagnose(end, ["E something failed"], phase=phase, requested=requested)
    assert (diagnosis.cause, diagnosis.exit_code, diagnosis.lines) == ("stopped", 0, ())


def test_crash_while_stopping_is_a_crash() -> None:
    assert diagnose(Exit(None, "SIGSEGV"), [], phase="stopping", requested=True).cause == "segfault"


def test_sigkill_with_an_oom_count_is_out_of_memory() -> None:
    starting = diagnose(Exit(None, "SIGKILL"), [], phase="starting", oom_killed=True)
    assert (starting.cause, starting.deterministic, starting.exit_code) == ("out_of_memory_host", True, 71)
    assert not diagnose(Exit(None, "SIGKILL"), [], phase="ready", oom_killed=True).deterministic


def test_killed_start_quotes_the_errors_before() -> None:
    lines = ["loading", "0.00.001.000 E srv load: failed to warm up", "0.00.002.000 I going on"]
    diagnosis = diagnose(Exit(None, "SIGKILL"), lines, phase="starting")
    assert (diagnosis.cause, diagnosis.lines) == ("killed", ("srv load: failed to warm up",))


DRAFT_ERROR = ["0.00.014.280 E spec common_specu: the target and draft vocabs are not compatible"]
SURVIVED = ["E got exception: std::bad_alloc", *("I srv log_server_r: done request" for _ in range(60))]


@pytest.mark.parametrize(
    ("end", "lines", "phase", "cause", "deterministic"),
    [
        (Exit(None, "SIGTERM"), [], "ready", "killed", False),
        (Exit(None, "SIGBUS"), [], "ready", "bus_error", False),
        (Exit(None, "SIGILL"), [], "starting", "illegal_instruction", True),
        (Exit(1, None), DRAFT_ERROR, "ready", "unknown", False),  # an error of the load
        (Exit(None, "SIGSEGV"), SURVIVED, "ready", "segfault", False),  # an earlier error
    ],
    ids=["SIGTERM", "SIGBUS", "SIGILL", "error of the load", "survived error"],
)
def test_exit_decides_the_cause(
    end: Exit, lines: list[str], phase: Phase, cause: str, *, deterministic: bool
) -> None:
    diagnosis = diagnose(end, lines, phase=phase)
    assert (diagnosis.cause, diagnosis.deterministic) == (cause, deterministic)
    assert cause != "killed" or "SIGTERM" in diagnosis.message


def test_uncaught_exception_of_ready_server_quotes_no_request() -> None:
    lines = ["terminate called after throwing an instance of 'std::runtime_error'", "  what():  my secret"]
    diagnosis = diagnose(Exit(None, "SIGABRT"), lines, phase="ready")
    assert (diagnosis.cause, diagnosis.deterministic) == ("aborted", False)
    assert diagnosis.message == "llama-server ended with an uncaught std::runtime_error."


def test_colors_do_not_hide_the_cause() -> None:
    diagnosis = diagnose(Exit(1, None), ["\x1b[31merror: invalid argument: --x\x1b[0m"], phase="starting")
    assert diagnosis.message == "This llama-server does not know the argument '--x'."
    assert diagnosis.lines == ("error: invalid argument: --x",)


def test_braces_in_a_log_are_not_formatted() -> None:
    diagnosis = diagnose(Exit(1, None), ["error: invalid argument: {model}"], phase="starting")
    assert "'{model}'" in diagnosis.message


def test_exit_is_readable_as_text() -> None:
    assert (str(Exit(3, None)), str(Exit(None, "SIGKILL"))) == ("exit code 3", "SIGKILL")


def test_missing_lora_without_gguf_suffix_is_model_missing() -> None:
    line = "E llama_adapter_lora_init: failed to open 'nope': No such file or directory"
    found = diagnose(Exit(1, None), [line], phase="starting")
    assert (found.cause, found.exit_code) == ("model_missing", 66)
    assert "--lora" in found.remedy


# --- how far a start had come ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        ([], False),
        (["0.00.005 I srv    load_model: loading model '/m.gguf'"], False),
        (["I load_tensors: loading model tensors, this can take a while... (load_mode = mmap)"], False),
        (["I load_tensors:   CPU_Mapped model buffer size =     0.63 MiB"], False),
        (["I llama_context: constructing llama_context"], True),
        (["I cmn          init: llama threadpool init, n_threads = 2"], True),
        (["llama_new_context_with_model: n_ctx      = 8192"], True),
        (
            [
                "I common_init_: fitting params to device memory ...",
                "I llama_context: constructing llama_context",
            ],
            False,
        ),
        (
            [
                "I common_init_: fitting params to device memory ...",
                "I common_fit_params: fitting params to free memory took 0.01 seconds",
                "I llama_context: constructing llama_context",
            ],
            True,
        ),
    ],
)
def test_log_shows_whether_weights_were_read(lines: list[str], read: bool) -> None:
    assert diagnose(Exit(None, "SIGSEGV"), lines, phase="starting").weights_read is read
    assert not diagnose(Exit(None, "SIGSEGV"), lines, phase="ready").weights_read
