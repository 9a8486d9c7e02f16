"""The trained demo model and its draft, as files."""

from __future__ import annotations

from itertools import islice

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.gguf.facts_from_header import ModelFacts, read_header
from llamasup.core.planning.facts import demo_draft, demo_model
from scripts.demo.stories import ANIMALS, conversations


def facts_of(content: bytes) -> ModelFacts:
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.expected_bytes == len(content)
    return facts


def test_both_are_small_chat_models_with_one_vocabulary() -> None:
    model, draft = facts_of(demo_model()), facts_of(demo_draft())
    assert model.file_bytes < 3_200_000
    assert draft.file_bytes < model.file_bytes / 10
    assert model.vocabulary == draft.vocabulary
    for facts in (model, draft):
        assert facts.model_class is ModelClass.DECODER
        assert facts.chat_template.present
        assert facts.quantized_kv_fits


def test_text_of_the_training_is_the_same_each_time() -> None:
    first, second = (list(islice(conversations(1), 200)) for _ in range(2))
    assert first == second
    assert first != list(islice(conversations(2), 200))


def test_answers_follow_the_question() -> None:
    asked = [
        turn for turns in islice(conversations(1), 500) for turn in turns if " about a " in turn.question
    ]
    assert len(asked) > 100
    for turn in asked:
        (animal,) = (name for name in ANIMALS if name in turn.question.lower())
        assert f" {animal}" in turn.answer.split(".")[0]
