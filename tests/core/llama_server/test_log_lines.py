"""The log lines that llamasup reacts to, as llama-server b11434 writes them."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.log_lines import (
    DRAFTED,
    RELEVANT,
    Drafted,
    Ready,
    ServerSizes,
    SizeLogged,
    StageBegan,
    StartupFailure,
    Warned,
    read_drafted,
    read_line,
    read_sizes,
    shareable_lines,
)
from tests.kit.paths import FIXTURES


@pytest.mark.parametrize(
    "line",
    [
        "0.00.017.356 I srv  llama_server: model loaded",
        "0.00.017.376 I srv  llama_server: listening on http://127.0.0.1:18231",
        "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
    ],
)
def test_listening_line_is_ready(line: str) -> None:
    assert read_line(line) == Ready()


def test_failed_fit_is_a_startup_failure() -> None:
    parsed = read_line("W common_fit: failed to fit params to free device memory: n_ctx_min is too large")
    assert isinstance(parsed, StartupFailure)
    assert parsed.diagnosis.cause == "fit_failed"
    assert "n_ctx_min is too large" in parsed.diagnosis.message
    assert (parsed.diagnosis.deterministic, parsed.diagnosis.exit_code) == (True, 71)


def test_fit_skipped_for_user_settings_is_no_failure() -> None:
    line = "failed to fit params to free device memory: n_gpu_layers already set by user to 10, abort"
    assert read_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "W srv  load_model: the target and draft vocabs are not compatible",
        "E srv  load_model: failed to initialize speculative decoding context: draft vocab",
    ],
)
def test_unused_draft_model_is_a_warning(line: str) -> None:
    parsed = read_line(line)
    assert isinstance(parsed, Warned)
    assert "does not use the draft model" in parsed.message
    assert parsed.remedy


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("0.00.006.123 I srv    load_model: loading model 'm.gguf'", "weights"),
        ("load_tensors: loading model tensors, this can take a while... (mmap = true)", "weights"),
        ("common_init_from_params: warming up the model with an empty run - please wait ...", "warm_up"),
        ("0.00.412.908 I srv    load_model: llama threadpool init, n_threads = 2", "warm_up"),
    ],
)
def test_stage_of_the_load_is_recognized(line: str, stage: str) -> None:
    event = read_line(line)
    assert isinstance(event, StageBegan)
    assert event.stage == stage
    assert RELEVANT.search(line.encode())


def test_size_lines_are_recognized_and_others_ignored() -> None:
    assert read_line("llama_kv_cache:        CPU KV buffer size =     1.00 MiB") == SizeLogged()
    assert read_line("0.00.008.857 I llama_model_loader: - kv  13: llama.vocab_size u32 = 554") is None


@pytest.mark.parametrize(
    "line",
    [
        "model loaded",
        "failed to fit params to free device memory: x",
        "the target and draft vocabs are not compatible",
        "failed to initialize speculative decoding context: x",
        "CPU compute buffer size = 3.58 MiB",
        "clip_model_loader: model size:         0.05 MiB",
        "llama_context: n_ctx         = 2048",
        "CLIP using CPU backend",
        "fitting params to device memory ...",
    ],
)
def test_filter_matches_every_relevant_line(line: str) -> None:
    assert read_line(line) is not None
    assert RELEVANT.search(line.encode())


DRAFT_LINE = (
    "0.00.078.626 I slot print_timing: id  0 | task 0 | draft acceptance = 0.57576 (   19 accepted /    33 "
    "generated), mean len =  4.88"
)
OLDER_DRAFT_LINE = (
    "slot print_timing: id  0 | task 7 | draft acceptance rate = 0.57576 (   19 accepted /   33 generated)"
)


@pytest.mark.parametrize("line", [DRAFT_LINE, OLDER_DRAFT_LINE])
def test_drafts_of_a_request_are_read(line: str) -> None:
    assert read_drafted(line) == Drafted(proposed=33, accepted=19)
    assert DRAFTED.search(line.encode())


@pytest.mark.parametrize(
    "line",
    [f"prompt: {DRAFT_LINE}", f"{DRAFT_LINE} and more", "slot print_timing: id  0 | task 0 | n_decoded = 3"],
)
def test_other_lines_are_not_about_drafts(line: str) -> None:
    assert read_drafted(line) is None


def test_counts_of_drafts_are_added() -> None:
    assert Drafted(3, 1) + Drafted(5, 5) == Drafted(8, 6)


FIXTURE = FIXTURES / "logs" / "requests-b11434.log"
LINES = FIXTURE.read_text().splitlines()
READY = next(number for number, line in enumerate(LINES) if line.endswith("model loaded"))
WORK = "0.09.000.000 I slot print_timing: id  0 | task 7 |    graphs reused =         31"
QUOTED = ("parse: error parsing grammar: expecting ::= at four", "", "root ::= secret three ", " and four")


def test_start_and_work_are_kept() -> None:
    text = "\n".join(shareable_lines(LINES, 1000))
    assert "build 0 (unknown) with GNU" in text
    assert "CPU compute buffer size =     9.58 MiB" in text
    assert "prompt eval time =       3.63 ms /    36 tokens" in text
    assert "stop processing: n_tokens = 40, truncated = 0" in text


def test_request_and_metadata_of_the_model_are_left_out() -> None:
    assert "root ::= secret three " in LINES
    text = "\n".join(shareable_lines(LINES, 1000))
    assert "secret" not in text
    assert "four" not in text
    assert "chat_template" not in text
    assert "How are you?" not in text  # the example of the chat template has no time stamps


def test_log_that_begins_in_the_middle_shows_only_work() -> None:
    lines = [*LINES[READY - 5 : READY], *QUOTED, "0.08.000.000 I srv  any: text of a request", WORK]
    assert shareable_lines(lines, 1000) == [WORK]


def test_next_process_starts_again() -> None:
    first = ["0.09.000.000 I srv  any: text of a request", WORK]
    assert shareable_lines([*first, *LINES[:3]], 1000) == [WORK, *LINES[:3]]
    assert shareable_lines(["no time stamp", *LINES[:1]], 9) == LINES[:1]


def test_quoted_request_ends_the_start() -> None:
    """Only ``wrap`` forwards requests to a server that loads."""
    quoted = "0.00.009.000 W srv  init: (CORS) skip secret origin"
    lines = [LINES[0], quoted, "0.00.009.500 I srv  any: another secret", WORK]
    assert shareable_lines(lines, 1000) == [LINES[0], WORK]


def test_trusted_error_at_the_end_is_kept() -> None:
    error = "0.09.500.000 E ggml: CUDA error: out of memory"
    assert shareable_lines([WORK, error], 1000) == [WORK, "ggml: CUDA error: out of memory"]


@pytest.mark.parametrize("most", [1, 7])
def test_only_the_last_lines_are_kept(most: int) -> None:
    everything = shareable_lines(LINES, 1000)
    assert shareable_lines(LINES, most) == everything[-most:]


def test_line_about_keys_is_left_out() -> None:
    keys = "0.00.002.700 I srv          init: api_keys: ****ame1"
    assert shareable_lines([LINES[0], keys, LINES[1]], 10) == LINES[:2]


def test_empty_log() -> None:
    assert shareable_lines([], 10) == []


LOGS = FIXTURES / "sizes"
MIB = 1 << 20


def mib(size_bytes: int) -> float:
    return round(size_bytes / MIB, 2)


def in_mib(sizes: ServerSizes) -> tuple[float, float, float]:
    return mib(sizes.weights_bytes), mib(sizes.kv_bytes), mib(sizes.compute_bytes)


def test_sizes_of_model_and_draft_model_add_up() -> None:
    sizes = read_sizes((LOGS / "draft.log").read_text().splitlines())
    assert in_mib(sizes) == (2 * 0.63, 2 * 2.00, 2 * 3.58)
    assert sizes.by_device == {"CPU": sizes.total_bytes}
    assert sizes.complete


def test_sizes_of_fit_attempts_do_not_count() -> None:
    """At -lv 5 it logs a whole load of which nothing is allocated; the end logs one size again."""
    log = (LOGS / "debug.log").read_text()
    assert log.count("compute buffer size =") == 2
    assert in_mib(read_sizes(log.splitlines())) == (0.63, 1.53, 13.01)


# llama.cpp's own lines as issues and pull requests quote them, oldest first.
OTHERS = {
    "2024, two GPUs (#6122)": (
        """
        llm_load_tensors:        CPU buffer size =  1640.62 MiB
        llm_load_tensors:      CUDA0 buffer size =  5434.38 MiB
        llm_load_tensors:      CUDA1 buffer size = 13989.53 MiB
        llama_new_context_with_model: n_ctx      = 4096
        llama_kv_cache_init:      CUDA0 KV buffer size =  1536.00 MiB
        llama_kv_cache_init:      CUDA1 KV buffer size =  3584.00 MiB
        llama_new_context_with_model: KV self size  = 5120.00 MiB, K (f16): 2560.00 MiB, V (f16): 2560.00 MiB
        llama_new_context_with_model:  CUDA_Host  output buffer size =     1.95 MiB
        llama_new_context_with_model:      CUDA0 compute buffer size =   672.01 MiB
        llama_new_context_with_model:      CUDA1 compute buffer size =   672.02 MiB
        """,
        (21064.53, 5120.00, 1345.98),
        {"CPU": 1642.57, "CUDA0": 7642.39, "CUDA1": 18245.55},
    ),
    "February 2025": (
        """
        load_tensors:   CPU_Mapped model buffer size =   644.14 MiB
        load_tensors:  MTL0_Mapped model buffer size = 14803.73 MiB
        llama_init_from_model: n_ctx         = 4096
        llama_kv_cache_init:       MTL0 KV buffer size =   144.00 MiB
        llama_init_from_model: KV self size  =  144.00 MiB, K (f16):   72.00 MiB, V (f16):   72.00 MiB
        llama_init_from_model:        CPU  output buffer size =     0.58 MiB
        llama_init_from_model:       MTL0 compute buffer size =   300.75 MiB
        llama_init_from_model:        CPU compute buffer size =    12.01 MiB
        """,
        (15447.87, 144.00, 313.34),
        {"CPU": 656.73, "MTL0": 15248.48},
    ),
    "April 2025": (
        """
        init: kv_size = 4096, offload = 1, type_k = 'f16', type_v = 'f16', n_layer = 28, can_shift = 1
        init:      ROCm0 KV buffer size =   448.00 MiB
        llama_context: KV self size  =  448.00 MiB, K (f16):  224.00 MiB, V (f16):  224.00 MiB
        llama_context:      ROCm0 compute buffer size =   298.75 MiB
        llama_context:  ROCm_Host compute buffer size =    10.01 MiB
        """,
        (0, 448.00, 308.76),
        {"CPU": 10.01, "ROCm0": 746.75},
    ),
    "the formats of b11434": (
        """
        0.00.012.611 I load_tensors:       Vulkan0 model buffer size =   100.00 MiB
        0.00.012.611 I load_tensors:    CPU_REPACK model buffer size =    10.00 MiB
        0.00.012.700 I llama_adapter_lora_init_impl:    Vulkan0 LoRA buffer size =     1.50 MiB
        0.00.012.885 I llama_context: n_ctx                 = 32768
        0.00.013.000 I llama_memory_recurrent:    Vulkan0 RS buffer size =     2.00 MiB
        0.00.013.000 I llama_dsv4_comp_state:    Vulkan0 DSV4 csa lid state buffer size =     4.00 MiB
        0.00.023.338 I sched_reserve:    Vulkan0 compute buffer size =    33.58 MiB
        0.00.023.338 I sched_reserve: Vulkan_Host compute buffer size =     2.58 MiB
        """,
        (111.50, 6.00, 36.16),
        {"CPU": 12.58, "Vulkan0": 141.08},
    ),
}


@pytest.mark.parametrize("build", OTHERS)
def test_lines_of_other_builds_and_devices_are_read(build: str) -> None:
    log, expected, by_device = OTHERS[build]
    sizes = read_sizes(log.splitlines())
    assert in_mib(sizes) == pytest.approx(expected, abs=0.01)
    assert {device: mib(size) for device, size in sizes.by_device.items()} == pytest.approx(
        by_device, abs=0.01
    )


def test_last_reservation_of_a_context_counts() -> None:
    """That for multi-token prediction does, beside the target's (b11434)."""
    log = (LOGS / "mtp.log").read_text()
    assert [log.count(f"{mib} MiB") for mib in ("compute buffer size =     3.40", "2.77")] == [1, 2]
    assert in_mib(read_sizes(log.splitlines())) == (1.03, 0.71, 3.40 + 2.77)


def test_projector_is_counted() -> None:
    sizes = read_sizes((LOGS / "projector.log").read_text().splitlines())
    assert in_mib(sizes) == (0.63 + 0.16, 1.00, 3.58 + 0.05)


def test_projector_is_counted_on_its_device() -> None:
    log = """
        clip_ctx: CLIP using CUDA0 backend
        load_hparams: model size:         854.99 MiB
        load_hparams: metadata size:      0.18 MiB
        alloc_compute_meta:      CUDA0 compute buffer size =   100.00 MiB
        alloc_compute_meta:        CPU compute buffer size =     4.00 MiB
        """
    sizes = read_sizes(log.splitlines())
    assert in_mib(sizes) == (854.99, 0, 104)
    assert {device: mib(size) for device, size in sizes.by_device.items()} == {"CPU": 4, "CUDA0": 954.99}
    assert mib(sizes.device_bytes) == 954.99


def test_log_without_sizes_is_incomplete() -> None:
    sizes = read_sizes(["0.00.030.184 I srv  llama_server: model loaded"])
    assert (sizes.total_bytes, dict(sizes.by_device), sizes.complete) == (0, {}, False)
