"""The search: what is measured next, and what each measurement changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

import pytest

from llamasup.core.planning.measured.paired import MIN_PAIRS, Verdict
from llamasup.core.planning.measured.tuned import Changes
from llamasup.features.tuning.candidates import Candidate
from llamasup.features.tuning.search import (
    COMBINATION,
    MOST_ROUNDS,
    Done,
    ProofRound,
    Screen,
    Search,
    begin,
    begin_proof,
    failed,
    hurry,
    next_step,
    observed,
    proven,
    reopened,
    result,
    trials,
    worth_proving,
)
from tests.kit.extent import examples


def candidate(name: str, group: str | None = None, *, lossy: bool = False) -> Candidate:
    return Candidate(group or name, Changes(((f"--{name}", None),)), "for the test", lossy)


A, B, C = candidate("a"), candidate("b"), candidate("c")


def run(search: Search, gains: Mapping[str, float], *, seed: int = 0, noise: float = 0.01) -> Search:
    """Carry out all steps on a machine where changes have these gains, which multiply."""
    random = Random(seed)
    while not isinstance(step := next_step(search), Done):
        gain = sum(math.log(gains.get(flag, 1.0)) for flag, _ in step.candidate.changes.flags)
        pairs = step.pairs if isinstance(step, Screen) else 1
        search = observed(search, step.candidate, [gain + random.gauss(0, noise) for _ in range(pairs)])
    return search


def taken(search: Search) -> str | None:
    proof = result(search)
    return None if proof is None else proof.candidate.name


def steps_until_proof(search: Search, gain: float = 0.1) -> Search:
    while isinstance(step := next_step(search), Screen):
        search = observed(search, step.candidate, [gain] * step.pairs)
    return search


def test_the_candidates_are_screened_in_their_order_with_three_pairs() -> None:
    search = begin([A, B])
    assert next_step(search) == Screen(A, 3)
    search = observed(search, A, [0.1, 0.1])
    assert next_step(search) == Screen(A, 1)
    search = observed(search, A, [0.1])
    assert next_step(search) == Screen(B, 3)


def test_without_candidates_the_search_is_done() -> None:
    assert isinstance(next_step(begin([])), Done)


def test_one_candidate_with_pairs_that_contradict_each_other_is_measured_again() -> None:
    for ratios in ([1.0, -0.1, -0.1], [0.005, -0.1, 0.1]):
        search = observed(begin([A]), A, ratios)
        assert next_step(search) == Screen(A, 3)
        search = observed(search, A, [0.2] * 3)
        assert next_step(search) == ProofRound(A, 1)
    assert isinstance(next_step(observed(begin([A]), A, [-0.1, -0.1, 0.1])), Done)


def test_the_only_better_change_is_taken() -> None:
    found = run(begin([A, B, C]), {"--a": 0.9, "--b": 1.2, "--c": 1.0})
    assert taken(found) == "--b"
    proof = result(found)
    assert proof is not None
    assert proven(proof).lower > 1
    assert proven(proof).gain == pytest.approx(1.2, abs=0.02)


def test_the_better_changes_of_different_groups_are_taken_together() -> None:
    assert taken(run(begin([A, B, C]), {"--a": 1.1, "--b": 1.2})) == "--b --a"


def test_of_one_group_only_the_best_is_taken() -> None:
    many = [candidate("x", "threads"), candidate("y", "threads"), candidate("z", "threads")]
    assert taken(run(begin(many), {"--x": 1.1, "--y": 1.3, "--z": 1.2})) == "--y"


def test_changes_that_hinder_each_other_are_not_taken_together() -> None:
    search = begin([A, B])
    while isinstance(step := next_step(search), Screen | ProofRound):
        together = step.candidate.group == COMBINATION
        pairs = step.pairs if isinstance(step, Screen) else 1
        search = observed(search, step.candidate, [-0.1 if together else 0.2] * pairs)
    assert taken(search) == "--a"
    assert search.proofs[1].ratios == ()


def test_if_the_best_single_change_is_not_proven_the_combination_is_tried() -> None:
    search = begin([A, B])
    while isinstance(step := next_step(search), Screen):
        search = observed(
            search, step.candidate, [0.1 if step.candidate.group == COMBINATION else 0.2] * step.pairs
        )
    for _ in range(MIN_PAIRS):
        search = observed(search, A, [-0.1])
    step = next_step(search)
    assert isinstance(step, ProofRound)
    assert (step.candidate.name, step.number) == ("--a --b", 1)
    for _ in range(MIN_PAIRS):
        search = observed(search, step.candidate, [-0.1])
    assert isinstance(next_step(search), Done)
    assert result(search) is None


def test_a_search_can_begin_with_a_proof() -> None:
    search = begin_proof(A)
    assert next_step(search) == ProofRound(A, 1)
    assert taken(run(search, {"--a": 1.2})) == "--a"
    assert isinstance(next_step(failed(search, A, "it ended")), Done)


def test_a_proof_uses_only_its_own_measurements() -> None:
    search = steps_until_proof(begin([A]))
    assert next_step(search) == ProofRound(A, 1)
    search = observed(search, A, [0.1] * (MIN_PAIRS - 1))
    assert next_step(search) == ProofRound(A, MIN_PAIRS)
    assert taken(observed(search, A, [0.1])) == "--a"


def test_the_same_configuration_is_taken_in_at_most_the_stated_share() -> None:
    many = [candidate(f"c{number}", f"group{number % 4}") for number in range(12)]
    runs = examples(1000)
    wins = sum(taken(run(begin(many), {}, seed=seed, noise=0.3)) is not None for seed in range(runs))
    assert wins / runs <= 0.025


def test_a_planted_gain_is_found_among_many() -> None:
    many = [candidate(f"c{number}", f"group{number % 4}") for number in range(12)]
    found = [taken(run(begin(many), {"--c5": 1.2}, seed=seed, noise=0.05)) or "" for seed in range(100)]
    assert sum("--c5" in name for name in found) >= 95


def test_a_much_slower_candidate_is_out_after_two_pairs() -> None:
    search = observed(begin([A, B]), A, [-0.8, -0.9])
    assert search.entries[0].why == "much worse than the default"
    assert next_step(search) == Screen(B, 3)


@pytest.mark.parametrize("ratios", [[-0.8], [0.2, -5.0]])
def test_one_bad_moment_does_not_end_the_screening_of_a_better_candidate(ratios: list[float]) -> None:
    search = observed(begin([A, B]), A, ratios)
    assert search.entries[0].state == "open"


def test_a_candidate_whose_pairs_contradict_each_other_is_measured_again() -> None:
    search = begin([A, B])
    search = observed(observed(search, A, [-5.0, 1.5, -0.1]), B, [0.1] * 3)
    assert next_step(search) == Screen(A, 3)
    search = observed(observed(search, A, [1.5] * 3), B, [0.1] * 3)
    assert next_step(search) == Screen(A, 6)


def test_in_the_end_it_is_taken_only_if_it_is_better_in_most_pairs() -> None:
    search = begin([A])
    while isinstance(step := next_step(search), Screen):
        search = observed(search, A, ([1.5, -0.1, -0.1] * 4)[: step.pairs])
    assert search.phase == "done"


def test_only_a_candidate_that_looks_better_is_worth_a_proof() -> None:
    assert not worth_proving(begin([A]))
    assert not worth_proving(observed(begin([A, B]), A, [0.001] * 3))
    assert worth_proving(observed(begin([A, B]), A, [0.1] * 3))


def test_a_crash_is_an_answer() -> None:
    search = failed(begin([A, B]), A, "it ended with SIGSEGV")
    assert search.entries[0].state == "failed"
    assert search.entries[0].why == "it ended with SIGSEGV"
    assert next_step(search) == Screen(B, 3)


def test_a_change_that_alters_answers_is_out() -> None:
    search = failed(begin([A]), A, "0.2 nats", "lossy")
    assert search.entries[0].state == "lossy"
    assert isinstance(next_step(search), Done)


def test_a_combination_that_crashes_leaves_its_best_part() -> None:
    search = begin([A, B])
    while isinstance(step := next_step(search), Screen) and step.candidate.group != COMBINATION:
        search = observed(search, step.candidate, [0.2 if step.candidate == A else 0.1] * step.pairs)
    assert isinstance(step, Screen)
    search = failed(search, step.candidate, "out of memory")
    assert [proof.candidate for proof in search.proofs] == [A]


def test_changes_that_contradict_each_other_are_not_joined() -> None:
    off = Candidate("flash", Changes((("--flash-attn", "off"),)), "for the test", lossy=True)
    packed = Candidate("kv", Changes((("--cache-type-v", "q8_0"),)), "for the test", lossy=True)
    gains = {"--flash-attn": 1.1, "--cache-type-v": 1.3, "--a": 1.2}
    assert taken(run(begin([off, packed, A]), gains)) == "--cache-type-v q8_0 --a"
    assert taken(run(begin([off, packed]), gains)) == "--cache-type-v q8_0"


def test_a_combination_that_crashes_is_tried_without_its_weakest_part() -> None:
    search = begin([A, B, C])
    gains = {A.name: 0.2, B.name: 0.1, C.name: 0.3}
    while isinstance(step := next_step(search), Screen) and step.candidate.group != COMBINATION:
        search = observed(search, step.candidate, [gains[step.candidate.name]] * step.pairs)
    assert step.candidate.name == "--c --a --b"  # type: ignore[union-attr]
    search = failed(search, step.candidate, "it ended")  # type: ignore[union-attr]
    step = next_step(search)
    assert isinstance(step, Screen)
    assert (step.candidate.name, step.pairs) == ("--c --a", 6)
    search = failed(search, step.candidate, "it ended")
    assert [proof.candidate for proof in search.proofs] == [C]


def test_a_crash_in_the_only_proof_ends_the_search() -> None:
    search = failed(steps_until_proof(begin([A])), A, "it ended")
    assert isinstance(next_step(search), Done)
    assert search.proofs[0].why == "it ended"


def test_no_gain_in_half_of_the_rounds_ends_a_proof() -> None:
    search = steps_until_proof(begin([A]))
    for number in range(MIN_PAIRS):
        search = observed(search, A, [0.3 if number % 2 else -0.3])
    assert search.phase == "done"
    assert search.proofs[0].why == "no gain in half of the rounds"


def test_a_proof_has_a_limit() -> None:
    search = steps_until_proof(begin([A]))
    for number in range(MOST_ROUNDS):
        search = observed(search, A, [-0.3 if number % 5 > 2 else 0.3])
    assert search.proofs[0].why == "not proven in 40 rounds"
    assert search.proofs[0].verdict is Verdict.NOT_BETTER


def test_successive_halving_gives_most_pairs_to_the_best() -> None:
    many = [candidate(f"c{number}", f"group{number}") for number in range(16)]
    search = run(begin(many), {f"--c{number}": 1 + number / 100 for number in range(16)}, noise=0.001)
    pairs = [len(entry.ratios) for entry in search.entries]
    assert pairs[0] == 3
    assert pairs[-1] == 12
    assert sum(count > 3 for count in pairs) == 8
    assert sum(count > 6 for count in pairs) == 5


def test_the_best_of_each_group_stays_before_the_second_of_another() -> None:
    same = [candidate(f"t{number}", "threads") for number in range(8)]
    search = begin([*same, A])
    while isinstance(step := next_step(search), Screen) and step.pairs == 3 and search.rung == 0:
        search = observed(search, step.candidate, [0.1 if step.candidate == A else 0.2] * 3)
    assert search.entries[-1].state == "open"


# --- without time --------------------------------------------------------------------------------


def test_in_a_hurry_what_was_not_tried_is_out() -> None:
    search = hurry(observed(begin([A, B]), A, [0.1, 0.1, 0.1]))
    assert next_step(search) == ProofRound(A, 1)
    assert search.entries[1].why == "no time to try it"


def test_a_later_call_tries_what_had_no_time() -> None:
    search = hurry(observed(begin([A, B]), A, [0.1, 0.1, 0.1]))
    search = reopened(observed(search, A, [0.1, 0.2]))
    assert next_step(search) == Screen(B, 3)
    # The proof that has begun goes on, if its candidate is still the best.
    on = observed(search, B, [-0.1] * 3)
    assert next_step(on) == ProofRound(A, 3)
    assert on.proofs[0].ratios == (0.1, 0.2)


def test_a_begun_proof_that_others_replace_counts_as_one_of_two() -> None:
    search = reopened(observed(hurry(observed(begin([A, B]), A, [0.1] * 3)), A, [0.1]))
    while isinstance(step := next_step(search), Screen):
        gain = {A.name: -0.1, B.name: 0.3}.get(step.candidate.name, 0.0)
        search = observed(search, step.candidate, [gain] * step.pairs)
    # The combination is worse than B alone.
    assert [(one.candidate.name, one.why) for one in search.proofs] == [
        ("--a", "others were better"),
        ("--b", ""),
    ]
    assert taken(run(search, {"--b": 1.3})) == "--b"


def test_a_search_with_two_begun_proofs_or_without_untried_candidates_just_goes_on() -> None:
    search = observed(begin([A, B, C]), A, [0.1] * 3)
    search = hurry(observed(search, B, [0.2] * 3))  # C is not tried
    for _ in range(MIN_PAIRS):
        search = observed(search, search.proofs[0].candidate, [-0.1])
    assert reopened(search).phase == "screen"
    search = observed(search, search.proofs[1].candidate, [0.1])
    assert reopened(search) is search
    assert reopened(begin([A])) == begin([A])


def test_if_the_only_proof_left_was_lost_before_the_search_is_done() -> None:
    search = observed(begin([A, B, C]), A, [0.1] * 3)
    search = hurry(search)
    lost = failed(search, A, "it ended")
    assert lost.phase == "done"
    assert reopened(lost) is lost


def test_in_a_hurry_better_changes_are_joined_unmeasured() -> None:
    search = observed(observed(begin([A, B, C]), A, [0.1] * 3), B, [0.2] * 3)
    search = hurry(search)
    assert [proof.candidate.name for proof in search.proofs] == ["--b --a", "--b"]


def test_in_a_hurry_a_combination_goes_to_its_proof() -> None:
    search = begin([A, B])
    while search.phase == "screen":
        step = next_step(search)
        assert isinstance(step, Screen)
        search = observed(search, step.candidate, [0.1] * step.pairs)
    assert search.phase == "combine"
    step = next_step(search)
    search = observed(search, step.candidate, [0.1, 0.1])  # type: ignore[union-attr]
    assert next_step(search) == Screen(step.candidate, 4)  # type: ignore[union-attr]
    assert isinstance(next_step(hurry(search)), ProofRound)


def test_a_proof_is_not_hurried() -> None:
    search = steps_until_proof(begin([A]))
    assert hurry(search) is search


def test_all_measurements_are_counted() -> None:
    search = run(begin([A, B]), {"--a": 1.2, "--b": 1.2})
    combined = search.combined
    assert combined is not None
    counted = [*search.entries, combined]
    assert trials(search) == sum(len(one.ratios) for one in counted) + len(search.proofs[0].ratios)
