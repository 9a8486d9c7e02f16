"""Reading ``/slots`` and ``/metrics`` of old and new builds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.llama_server.answers import (
    ContextWindow,
    ServerProgress,
    SlotProgress,
    read_progress,
    read_slots,
    read_token_count,
    read_window,
)

# As b11434 answers in the middle of a prompt of 3,962 tokens, after its first batch; parameters left out.
PREFILLING: dict[str, Any] = {
    "id": 1, "n_ctx": 8192, "speculative": False, "is_processing": True, "id_task": 7,
    "n_prompt_tokens": 3962, "n_prompt_tokens_processed": 2048, "n_prompt_tokens_cache": 0,
    "next_token": [{"has_next_token": True, "has_new_line": False, "n_remain": 20, "n_decoded": 0}],
}  # fmt: skip
IDLE: dict[str, Any] = {"id": 0, "n_ctx": 8192, "speculative": False, "is_processing": False}
METRICS = b"""# HELP llamacpp:n_decode_total Total number of llama_decode() calls
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 12
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 3962
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 1.44589e+01
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
"""


def read(*slots: dict[str, Any]) -> ServerProgress:
    return read_progress(json.dumps(slots).encode(), None)


def test_slot_at_its_prompt_shows_processed_tokens() -> None:
    assert read(IDLE, PREFILLING) == ServerProgress({"1/7": 2048}, prefilling=True)


def test_generating_slot_counts_prompt_and_answer() -> None:
    generating = {**PREFILLING, "n_prompt_tokens_processed": 3962, "next_token": [{"n_decoded": 5}]}
    assert read(IDLE, generating) == ServerProgress({"1/7": 3967}, prefilling=False)


def test_one_slot_at_its_prompt_is_a_prefill() -> None:
    """All slots are computed in one batch, so none makes progress before it is done."""
    generating = {**PREFILLING, "id": 2, "next_token": [{"n_decoded": 5}]}
    assert read(PREFILLING, generating).prefilling


def test_idle_slots_are_ignored() -> None:
    assert read(IDLE, {**PREFILLING, "is_processing": False}) == ServerProgress({}, prefilling=False)


def test_build_of_2025_is_read() -> None:
    slot = {
        "id": 0,
        "id_task": 3,
        "is_processing": True,
        "next_token": {"n_decoded": 9, "stopped_eos": False},
    }
    assert read(slot) == ServerProgress({"0/3": 9}, prefilling=False)


def test_build_of_2024_is_read() -> None:
    slots = [
        {"id": number, "id_task": 4 + number, "state": number, "next_token": {"n_decoded": 2}}
        for number in (0, 1)
    ]
    assert read(*slots) == ServerProgress({"1/5": 2}, prefilling=False)


def test_metrics_counters_are_summed_without_gauges() -> None:
    work = read_progress(None, METRICS)
    assert work.total == pytest.approx(12 + 3962 + 14.4589)
    assert (work.tokens, work.prefilling) == ({}, None)


@pytest.mark.parametrize(
    "slots", [None, b"", b"\xff", b"{}", b'[{"id": "x"}]', b'[{"next_token": 3}]', b"[1]"]
)
@pytest.mark.parametrize(
    "metrics", [None, b"", b"\x00\xff", b"llamacpp:n_decode_total many\n", b"llamacpp:n_decode_total 1e\n"]
)
def test_invalid_bodies_are_ignored(slots: bytes | None, metrics: bytes | None) -> None:
    assert read_progress(slots, metrics) == ServerProgress()


def test_deeply_nested_brackets_are_ignored() -> None:
    """A skipped field of the decoder raises RecursionError, which is no DecodeError."""
    assert read_progress(b'[{"params":' + b"[" * 100_000, None) == ServerProgress()


def test_working_slots_come_in_the_order_of_their_tasks() -> None:
    """b11434 counts the tokens of the answer in ``n_prompt_tokens`` as well."""
    generating = {
        **PREFILLING,
        "id": 0,
        "id_task": 9,
        "n_prompt_tokens": 1583,
        "n_prompt_tokens_processed": 20,
        "n_prompt_tokens_cache": 7,
        "next_token": [{"n_decoded": 1556}],
    }
    slots = json.dumps([generating, IDLE, PREFILLING]).encode()
    assert read_slots(slots) == (SlotProgress(7, 3962, 2048, 0), SlotProgress(9, 27, 27, 1556))


def test_working_slot_of_an_old_build_shows_only_the_answer() -> None:
    slot = {"id": 0, "id_task": 3, "is_processing": True, "next_token": {"n_decoded": 9}}
    assert read_slots(json.dumps([slot]).encode()) == (SlotProgress(3, None, None, 9),)


@pytest.mark.parametrize("slots", [None, b"", b"{}", b"[1]"])
def test_invalid_slots_are_no_answer(slots: bytes | None) -> None:
    assert read_slots(slots) is None


def test_window_is_the_context_of_a_slot() -> None:
    assert read_window(b'[{"id":0,"n_ctx":256,"speculative":false},{"n_ctx":256}]') == ContextWindow(256, 256)
    assert read_window(b'[{"n_ctx":256,"speculative":true}]') == ContextWindow(256, 208)
    for nothing in (None, b"", b"[]", b"{}", b"[{}]", b'[{"n_ctx":0}]', b'[{"n_ctx":"a"}]', b"[" * 5000):
        assert read_window(nothing) is None


def test_tokens_of_a_text_are_counted() -> None:
    assert read_token_count(b'{"tokens":[1,{"id":2,"piece":"a"}]}') == 2
    for nothing in (b"", b"{}", b'{"tokens":3}'):
        assert read_token_count(nothing) is None
