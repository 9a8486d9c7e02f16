"""Which model proves a build, and what changes in a plan."""

from __future__ import annotations

from msgspec.structs import replace

from llamasup.errors import UsageInvalid
from llamasup.features.upgrade.verdict import Candidate, FlagChange, PlanChange, choose, flag_changes


def candidate(id_: str, needs: int = 10, **more: object) -> Candidate:
    change = PlanChange(id_, generates=True, needs_after={"ram": needs})
    found = Candidate(change, serves=True, in_flight=0, free={"ram": 100})
    return replace(found, **more)


def test_small_idle_loaded_model_proves_a_build() -> None:
    large, busy = candidate("large", 20), candidate("busy", 5, in_flight=3)
    absent = candidate("absent", 1, serves=False)
    assert choose([large, busy, absent, candidate("small")]) == "small"
    assert choose([large, busy, absent]) == "large"
    assert choose([busy, absent]) == "busy"
    assert choose([absent]) == "absent"


def test_model_must_generate_and_fit_beside_itself_without_workers() -> None:
    embeds = PlanChange("embeds", generates=False, needs_after={"ram": 1})
    unable = [
        candidate("large", 101),
        candidate("other", free={"CUDA0": 100}),
        candidate("remote", has_workers=True),
        candidate("embeds", change=embeds),
    ]
    assert choose(unable) is None
    assert choose([*unable, candidate("a", 100)]) == "a"


def test_changed_flags_are_in_the_order_of_the_command_line() -> None:
    before = {"--ctx-size": "512", "--metrics": "", "--threads": "4"}
    after = {"--ctx-size": "512", "--threads": "8", "--kv-unified": ""}
    assert flag_changes(before, after) == (
        FlagChange("--metrics", "", None),
        FlagChange("--threads", "4", "8"),
        FlagChange("--kv-unified", None, ""),
    )


def test_changes_as_json() -> None:
    change = PlanChange("a", True, (FlagChange("--metrics", "", None),), {"ram": 1}, {"ram": 2})
    assert change.as_json() == {
        "id": "a",
        "flags": [{"flag": "--metrics", "before": "", "after": None}],
        "needs_before": {"ram": 1},
        "needs_after": {"ram": 2},
        "problem": None,
    }
    gone = PlanChange("a", problem=UsageInvalid("It has no --keep", remedy="Leave it out."))
    assert gone.as_json()["problem"] == {"message": "It has no --keep", "remedy": "Leave it out."}
