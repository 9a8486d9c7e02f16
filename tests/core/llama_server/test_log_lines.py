"""The log lines that llamasup reacts to, as llama-server b11434 writes them."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.log_lines import (
    DRAFTED,
    RELEVANT,
    Drafted,
    Ready,
    SizeLogged,
    StageBegan,
    StartupFailure,
    Warned,
    read_drafted,
    read_line,
)


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
