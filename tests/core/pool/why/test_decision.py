"""The last decisions of a pool."""

from __future__ import annotations

from datetime import UTC, datetime

from llamasup.core.pool.why.recording import MAX_DECISIONS, Decision, Decisions

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def decision(model: str, why: str = " because a request asked for it") -> Decision:
    return Decision(NOON, model, "load", why)


def test_decision_is_a_sentence_with_a_time() -> None:
    assert decision("qwen").as_json() == {
        "time": "2026-01-01T12:00:00.000+00:00",
        "model": "qwen",
        "kind": "load",
        "text": "qwen is loaded because a request asked for it.",
    }


def test_newest_decision_comes_first() -> None:
    decisions = Decisions()
    for model in ("a", "b", "a", "c"):
        decisions.add(decision(model, f" because of {model}"))
    assert [each.model for each in decisions.last()] == ["c", "a", "b", "a"]
    assert [each.model for each in decisions.last(2)] == ["c", "a"]
    assert len(decisions.of("a")) == 2
    assert repr(decisions) == "<4 Decisions>"


def test_only_the_last_200_decisions_are_kept() -> None:
    decisions = Decisions()
    for number in range(MAX_DECISIONS + 1):
        decisions.add(decision(f"m{number}"))
    assert len(decisions.last()) == MAX_DECISIONS == 200
    assert decisions.of("m0") == ()
    assert len(decisions.of("m1")) == 1


def test_decisions_stay_with_a_renamed_model() -> None:
    decisions = Decisions()
    decisions.add(decision("old"))
    decisions.add(decision("other"))
    decisions.rename("old", "new")
    assert decisions.of("old") == ()
    assert decisions.of("new")[0].text == "new is loaded because a request asked for it."
    assert [each.model for each in decisions.last()] == ["other", "new"]
