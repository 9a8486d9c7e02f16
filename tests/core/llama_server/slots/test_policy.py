"""When slots are saved, which plan may restore them, and which are removed first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.answers import SlotAnswer, read_slot_answer
from llamasup.core.llama_server.argv_builder import Reason
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.slots.policy import (
    SavedSet,
    SavedSlot,
    SlotHome,
    file_name,
    is_current,
    is_slot_file,
    list_name,
    sets_to_remove,
    slot_key,
)
from llamasup.core.planning.plan import LaunchPlan
from tests.core.planning.plans import BUILDS, NEW, bert, capabilities, planned, reason, value

FILE = ("/models/tiny.gguf", 1000, 7)
KEY, TOKEN = "0" * 32, "f" * 16


def saved(number: int, size_bytes: int) -> SavedSet:
    slot = SavedSlot(0, file_name(KEY, f"{number:016x}", 0), 100, size_bytes, 1)
    return SavedSet(KEY, f"{number:016x}", number, (FILE,), (slot,))


def key(*flags: tuple[str, str | None], runtime: str = "build 1", file: tuple[str, int, int] = FILE) -> str:
    return slot_key(runtime, [file], [Reason(flag, value, "") for flag, value in flags])


# --- what fits --------------------------------------------------------------------------------------


def test_key_ignores_order_address_and_threads() -> None:
    base = key(("--ctx-size", "4096"), ("--flash-attn", "on"))
    assert base == key(("--flash-attn", "on"), ("--ctx-size", "4096"))
    assert base == key(
        ("--ctx-size", "4096"),
        ("--flash-attn", "on"),
        *((flag, "1") for flag in ("--host", "--port", "--threads", "--cache-ram", "--verbosity")),
        ("--ctx-checkpoints", "6"),
        ("--slot-save-path", "/elsewhere"),
    )
    left_out = Reason("--mlock", None, "left out", passed=False)
    flags = [Reason("--ctx-size", "4096", ""), Reason("--flash-attn", "on", ""), left_out]
    assert base == slot_key("build 1", [FILE], flags)


@pytest.mark.parametrize(
    "other",
    [
        key(("--ctx-size", "8192")),
        key(("--ctx-size", "4096"), ("--cache-type-k", "q8_0")),
        key(("--ctx-size", "4096"), ("--kv-unified", None)),
        key(("--ctx-size", "4096"), ("--lora", "/a.gguf")),
        key(("--ctx-size", "4096"), runtime="build 2"),
        key(("--ctx-size", "4096"), file=("/models/tiny.gguf", 1000, 8)),
        key(("--ctx-size", "4096"), file=("/models/other.gguf", 1000, 7)),
        key(),
    ],
)
def test_key_depends_on_context_cache_build_and_files(other: str) -> None:
    assert key(("--ctx-size", "4096")) != other


def test_set_is_current_while_its_model_files_are_unchanged() -> None:
    two = replace(saved(1, 10), files=(FILE, ("/models/mmproj.gguf", 5, 5)))
    there = {path: (path, size, mtime) for path, size, mtime in two.files}
    assert is_current(two, there.get)
    assert not is_current(two, (there | {"/models/mmproj.gguf": ("/models/mmproj.gguf", 5, 6)}).get)
    assert not is_current(two, {"/models/tiny.gguf": FILE}.get)


# --- names ------------------------------------------------------------------------------------------


def test_only_names_of_slot_files_match() -> None:
    assert is_slot_file(file_name(KEY, TOKEN, 0))
    assert is_slot_file(list_name(KEY, TOKEN))
    for name in (
        "",
        "slot.kv",
        f"../{list_name(KEY, TOKEN)}",
        f"{list_name(KEY, TOKEN)}\n",
        f"{KEY}-{TOKEN}.kv",
    ):
        assert not is_slot_file(name)


# --- what goes --------------------------------------------------------------------------------------


def test_oldest_sets_are_removed_until_the_rest_fits() -> None:
    sets = [saved(3, 30), saved(1, 10), saved(2, 20)]
    assert sets_to_remove(sets, 60) == ()
    assert sets_to_remove(sets, 59) == (saved(1, 10),)
    assert sets_to_remove(sets, 49) == (saved(2, 20), saved(1, 10))
    assert sets_to_remove(sets, 0) == (saved(3, 30), saved(2, 20), saved(1, 10))


def test_number_of_sets_is_limited() -> None:
    assert sets_to_remove([saved(number, 1) for number in range(300)], 1000) == tuple(
        saved(number, 1) for number in reversed(range(44))
    )


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(-10, 500))
def test_remaining_sets_fit_and_are_the_newest(sizes: list[int], most_bytes: int) -> None:
    sets = [saved(number, size) for number, size in enumerate(sizes)]
    removed = sets_to_remove(sets, most_bytes)
    remaining = [saved for saved in sets if saved not in removed]
    assert sum(saved.size_bytes for saved in remaining) <= max(0, most_bytes)
    assert (
        not remaining
        or not removed
        or min(saved.saved_ns for saved in remaining) > max(saved.saved_ns for saved in removed)
    )


def test_set_sums_bytes_and_tokens() -> None:
    slots = (*saved(1, 10).slots, *saved(2, 20).slots)
    both = replace(saved(1, 10), slots=slots)
    assert (both.size_bytes, both.tokens) == (30, 200)


# --- answers ----------------------------------------------------------------------------------------


def test_slot_answer_has_tokens_or_a_problem() -> None:
    done = {"id_slot": 0, "filename": "a", "n_saved": 458, "n_written": 241928}
    assert read_slot_answer(200, json.dumps(done).encode(), "n_saved") == SlotAnswer(458)
    refused = {"error": {"code": 400, "message": "Unable to restore slot", "type": "invalid_request_error"}}
    assert read_slot_answer(400, json.dumps(refused).encode(), "n_restored") == SlotAnswer(
        problem="Unable to restore slot"
    )


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error":"no"}', b'{"n_saved":"many"}', b"[" * 9999]
)
def test_invalid_slot_answer_is_a_problem(body: bytes) -> None:
    for status in (200, 500):
        assert read_slot_answer(status, body, "n_saved").problem.startswith(f"it answered {status}: ")


# --- flags ------------------------------------------------------------------------------------------

HOME = SlotHome("/cache/slots", (("/models/example-8b.gguf", 5, 7),))


def keeping(build: str | Capabilities = NEW, *args: Any, **rest: Any) -> LaunchPlan:
    options: dict[str, Any] = {"keep_slots": True, "slot_home": HOME}
    return planned(build, *args, **(options | rest))


def without(*flags: str) -> Capabilities:
    known = capabilities(NEW)
    options = tuple(option for option in known.options if not set(flags) & set(option.spellings))
    return replace(known, options=options)


def test_slots_are_not_saved_by_default() -> None:
    plan = planned(slot_home=HOME)
    assert plan.slots is None
    assert all(reason.flag != "--slot-save-path" for reason in plan.reasons)


@pytest.mark.parametrize("build", BUILDS)
def test_every_build_can_save_slots(build: str) -> None:
    plan = keeping(build)
    assert value(plan, "--slot-save-path") == "/cache/slots"
    assert plan.slots is not None
    assert (plan.slots.folder, plan.slots.files, plan.slots.count) == (HOME.folder, HOME.files, plan.parallel)
    assert "--no-cache-idle-slots" not in plan.argv  # slots with cells of their own keep what they hold


def test_shared_idle_slots_are_not_cleared() -> None:
    assert keeping(profile="throughput").argv.count("--no-cache-idle-slots") == 1  # also for its shared cells
    older = keeping(without("--no-cache-idle-slots"), profile="throughput")
    assert "--no-cache-idle-slots" not in older.argv
    assert older.slots is not None


def test_plain_profile_passes_the_slot_flags() -> None:
    assert value(keeping(profile="plain"), "--slot-save-path") == "/cache/slots"


def test_slots_of_other_settings_are_not_restored() -> None:
    plans = [
        keeping(),
        keeping(ctx_size=4096),
        keeping(kv_type="q8_0"),
        keeping(slot_home=replace(HOME, files=(("/models/example-8b.gguf", 5, 8),))),
    ]
    keys = [plan.slots.key for plan in plans if plan.slots is not None]
    assert len(set(keys)) == len(plans)
    again = keeping(threads=3)
    assert again.slots is not None
    assert again.slots.key == keys[0]


@pytest.mark.parametrize(
    ("version", "are_kept"),
    [
        ("10114 (ed7adbfef)", True),
        ("0.6.0 (build 11434, commit abcdef0)", True),
        ("0.6.0-dev", False),
        ("b11434", False),
        ("unknown", False),
    ],
)
def test_rebuild_of_the_same_commit_keeps_the_slots(version: str, are_kept: bool) -> None:
    known = replace(capabilities(NEW), version=version)
    before, after = (keeping(replace(known, build=build)).slots for build in ("1111", "2222"))
    assert before is not None
    assert after is not None
    assert (before.key == after.key) is are_kept
    other = keeping(replace(known, version="10115 (0123456)")).slots
    assert other is not None
    assert other.key != before.key


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (keeping(without("--slot-save-path")), "this build cannot save slots"),
        (keeping(NEW, bert()), "encoder models have no conversations to save"),
        (keeping(NEW, bert(ModelClass.RERANKER)), "reranker models have no conversations to save"),
        (keeping(slot_home=None), "there is no usable cache folder for conversations"),
        (
            keeping(adapters=("/loras/poet.gguf",)),
            "a slot depends on the adapters of its last request, which llama-server does not report",
        ),
    ],
)
def test_unsupported_slot_flags_are_left_out_with_a_reason(plan: LaunchPlan, why: str) -> None:
    assert plan.slots is None
    assert "--slot-save-path" not in plan.argv
    assert reason(plan, "--slot-save-path") == f"left out: {why}"


def test_users_own_slot_folder_is_not_managed() -> None:
    plan = keeping(extra=("--slot-save-path", "/mine"))
    assert plan.slots is None
    assert value(plan, "--slot-save-path") == "/mine"
