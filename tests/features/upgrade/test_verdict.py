"""The verdict about a new build: each kind of bad build by its figures, and how long a proof takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.errors import UsageInvalid
from llamasup.features.upgrade.verdict import (
    MOST_REQUESTS,
    REQUESTS,
    Accepted,
    Candidate,
    FlagChange,
    Pair,
    PlanChange,
    Refused,
    Step,
    Trial,
    after_crashes,
    agreement,
    choose,
    flag_changes,
    next_step,
    refusal,
    shown_failure,
)

MIB = 1 << 20
SAME = Pair("one two three four", "one two three four", 1.0, 1.0)


def trial(*pairs: Pair, answered: int = REQUESTS, grows: int = 0, memory: int = 100 * MIB) -> Trial:
    used = tuple(memory + number * grows for number in range(answered))
    return Trial(pairs, used, old_memory_bytes=100 * MIB)


def slower(share: float, *, alone: bool = True) -> Pair:
    return replace(SAME, new_s=1.0 / share, alone=alone)


def why_refused(step: Step) -> str:
    assert isinstance(step, Refused), step
    return step.why


# --- how a proof goes on


def test_proof_begins_with_comparisons_and_ends_with_requests_to_the_new_build() -> None:
    assert next_step(Trial()) == "compare"
    assert next_step(trial(*[SAME] * 23, answered=23)) == "compare"
    assert next_step(trial(*[SAME] * 24, answered=24)) == "ask"
    assert next_step(trial(*[SAME] * 24, answered=99)) == "ask"


def test_equal_build_is_accepted_after_a_hundred_requests() -> None:
    step = next_step(trial(*[SAME] * 24))
    assert step == Accepted(
        "it has answered 100 requests with 100% of the speed of the old build and 100% of its text"
    )


def test_undecided_speed_is_compared_longer() -> None:
    noisy = [slower(0.8), slower(1.2)] * 50
    assert next_step(trial(*noisy)) == "compare"
    assert isinstance(next_step(trial(*noisy, slower(1.0), answered=MOST_REQUESTS)), Accepted)


# --- bad builds


@pytest.mark.parametrize("share", [0.5, 0.8, 0.85])
def test_slower_build_is_refused_before_all_requests(share: float) -> None:
    step = next_step(trial(*[slower(share)] * 9, answered=9))
    assert why_refused(step) == f"it has {share:.0%} of the speed of the running build; 90% are needed"


def test_build_that_is_slower_in_the_median_is_refused_in_the_end() -> None:
    noisy = [*[slower(0.88)] * 11, *[slower(1.2)] * 10]
    assert next_step(trial(*noisy)) == "compare"
    step = next_step(trial(*noisy, answered=MOST_REQUESTS))
    assert "88% of the speed" in why_refused(step)
    assert isinstance(step, Refused)
    assert not step.judged  # 21 pairs do not decide it


def test_build_with_a_tenth_less_speed_is_taken() -> None:
    assert isinstance(next_step(trial(*[slower(0.92)] * 30)), Accepted)


def test_pairs_beside_other_requests_say_nothing_about_speed() -> None:
    busy = [slower(0.5, alone=False)] * 30
    assert next_step(trial(*busy[1:], answered=29)) == "compare"
    step = next_step(trial(*busy, answered=30))  # more would not help
    assert isinstance(step, Refused)
    assert not step.judged
    assert "never without other requests" in step.why


def test_few_pairs_without_other_requests_say_nothing_about_speed() -> None:
    step = next_step(trial(*[slower(0.5, alone=False)] * 50, *[SAME] * 5, answered=MOST_REQUESTS))
    assert isinstance(step, Refused)
    assert not step.judged
    assert "never without other requests" in step.why


@pytest.mark.parametrize("number", range(8))
def test_text_verdict_does_not_depend_on_the_prompt_that_differs(number: int) -> None:
    wrong = replace(SAME, new_text="five six")
    pairs = ([SAME] * number + [wrong] + [SAME] * (7 - number)) * 3
    assert all(next_step(trial(*pairs[:count], answered=count)) == "compare" for count in range(1, 24))
    assert isinstance(next_step(trial(*pairs)), Accepted)


def test_other_text_is_refused() -> None:
    wrong = replace(SAME, new_text="five six")
    assert next_step(trial(*[wrong] * 7, answered=7)) == "compare"
    assert "for 0% only; 80% are needed" in why_refused(next_step(trial(*[wrong] * 8, answered=8)))


def test_near_tie_of_two_tokens_is_within_the_tolerance() -> None:
    late = replace(SAME, new_text="one two three five")
    pairs = [*[SAME] * 20, *[late] * 4]
    assert agreement(pairs) > 0.9
    assert isinstance(next_step(trial(*pairs)), Accepted)
    assert agreement([replace(SAME, old_text="", new_text="")]) == 1.0


def test_leak_is_refused_while_the_proof_runs() -> None:
    assert next_step(trial(*[SAME] * 24, answered=50, grows=MIB)) == "ask"
    step = next_step(trial(*[SAME] * 24, answered=58, grows=MIB))
    assert why_refused(step) == (
        "its memory has grown by 34 MiB in 34 requests that repeat; 32 MiB are allowed"
    )


def test_growth_before_the_prompts_repeat_is_no_leak() -> None:
    used = (*range(50 * MIB, 1200 * MIB, 50 * MIB), *[1200 * MIB] * 77)
    grown = Trial((SAME,) * 24, used, old_memory_bytes=1200 * MIB)
    assert isinstance(next_step(grown), Accepted)


def test_much_larger_server_is_refused() -> None:
    assert isinstance(next_step(trial(*[SAME] * 24, memory=250 * MIB)), Accepted)
    step = next_step(trial(*[SAME] * 24, memory=260 * MIB))
    assert why_refused(step) == "its server needs 260 MiB, and that of the running build 100 MiB"


@pytest.mark.parametrize("unmeasured", ["first", "last", "old"])
def test_build_is_not_proven_without_figures_of_its_memory(unmeasured: str) -> None:
    found = trial(*[SAME] * 24)
    match unmeasured:
        case "first":
            found = replace(found, memory_bytes=(None, *found.memory_bytes[1:]))
        case "last":
            found = replace(found, memory_bytes=(*found.memory_bytes[:-1], None))
        case _:
            found = replace(found, old_memory_bytes=None)
    assert next_step(found) == Refused("the memory of the servers could not be measured", judged=False)


def test_crash_is_refused_with_its_request() -> None:
    broken = replace(trial(*[SAME] * 24, answered=49), broken="ended (SIGSEGV)")
    assert why_refused(next_step(broken)) == "its server ended (SIGSEGV) at request 50 of 100"


def test_failure_of_the_running_server_is_no_verdict_about_the_build() -> None:
    step = next_step(replace(trial(SAME, answered=1), interrupted="the running server did not answer"))
    assert step == Refused("the running server did not answer", judged=False)


# --- after the rollout


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [(0, 0, True), (0, 1, True), (0, 2, False), (1, 2, True), (1, 3, False), (5, 10, True), (5, 11, False)],
)
def test_build_is_put_back_if_crashes_rise(old: int, new: int, stays: bool) -> None:
    why = after_crashes(old, new)
    assert (why == "") is stays
    assert stays or f"crashed {new} times" in why


# --- what users see


@pytest.mark.parametrize(
    ("failed", "shown"),
    [
        # ggml-org/llama.cpp#7874, netdur/llama_cpp_dart#81: other text after an update
        (
            Refused("its text differs", answer="hazır(Display\x1b[2JGithub", expected="Yes, I do."),
            ("Its answer: hazır(Display\\x1b[2JGithub", "The answer of the running build: Yes, I do."),
        ),
        # An error object of llama-server, with a line feed
        (
            Refused("its server answered with status 500", answer='{"error":\n{"code":500}}'),
            ('Its answer: {"error":\\n{"code":500}}',),
        ),
        (
            Refused("its server ended", lines=("ggml-backend.cpp:1455: assert\u202e",)),
            (),
        ),  # ollama/ollama#9870
        (Refused("x", judged=False), ()),
        (Refused("x", answer="w" * 501), (f"Its answer: {'w' * 500}…",)),
    ],
)
def test_a_refusal_shows_the_answer_and_the_log(failed: Refused, shown: tuple[str, ...]) -> None:
    error = refusal("b1", failed)
    assert error.cause == ("build_refused" if failed.judged else "build_unproven")
    assert error.details == shown
    assert len(error.lines) == len(failed.lines)
    report = shown_failure(failed)
    assert all(line.isprintable() and len(line) <= 501 for line in (*error.lines, *report["lines"]))
    assert (report["answer"] is None, report["expected"] is None) == (not failed.answer, not failed.expected)


def test_a_report_without_a_refusal_has_the_same_keys() -> None:
    assert shown_failure(None) == {"answer": None, "expected": None, "lines": []}


def test_the_answer_that_differs_most_is_shown() -> None:
    other = replace(SAME, new_text="one two 3")
    step = next_step(trial(*[replace(SAME, new_text="wrong"), *[other] * 7], answered=8))
    assert isinstance(step, Refused)
    assert (step.answer, step.expected) == ("wrong", SAME.old_text)


def test_a_failed_request_keeps_its_answer_and_lines() -> None:
    failed = replace(trial(answered=4), broken="answered with status 500", answer="{}", lines=("a",))
    step = next_step(failed)
    assert isinstance(step, Refused)
    assert (step.answer, step.lines) == ("{}", ("a",))


# --- the plans ------------------------------------------------------------------------------------


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
