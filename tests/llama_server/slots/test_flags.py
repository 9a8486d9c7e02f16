"""Whether a server is told to let its slots be saved, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamasup.gguf.facts import ModelClass
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.slots.policy import SlotHome
from llamasup.planning.plan import LaunchPlan
from tests.planning.plans import BUILDS, NEW, bert, capabilities, planned, reason, value

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
    assert all(each.flag != "--slot-save-path" for each in plan.reasons)


@pytest.mark.parametrize("build", BUILDS)
def test_every_build_can_save_slots(build: str) -> None:
    plan = keeping(build)
    assert value(plan, "--slot-save-path") == "/cache/slots"
    assert plan.slots is not None
    assert (plan.slots.folder, plan.slots.files, plan.slots.count) == (HOME.folder, HOME.files, plan.parallel)
    assert "--no-cache-idle-slots" not in plan.argv  # slots with cells of their own keep what they hold


def test_shared_idle_slots_are_not_cleared() -> None:
    assert "--no-cache-idle-slots" in keeping(profile="throughput").argv
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
