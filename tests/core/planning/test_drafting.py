"""The draft of a model: a model of its family, a head, or its own MTP layers; and files that cannot draft."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts, Vocabulary
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.drafting import Drafter, no_drafts, shape_with_drafts
from llamasup.core.planning.measured.load_history import DraftCounts, LoadHistory, runtime_id
from llamasup.core.planning.measured.tuned import Changes, Measured
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.core.planning.plan import LaunchPlan
from llamasup.errors import DraftMismatch, UsageInvalid
from tests.core.planning.plans import (
    GIB,
    GPU,
    MIDDLE,
    NEW,
    OLD,
    bert,
    capabilities,
    from_help,
    model,
    planned,
    reason,
    value,
)
from tests.kit import speculative
from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf

DRAFT = "/models/draft.gguf"
NO_DRAFTS = Measured(Changes((("--spec-type", "none"),)), "measured")
BPE = Vocabulary(
    model="gpt2", pre="qwen2", size=151_936, bos=1, eos=2, add_bos=False, digests=((151_936, 7),)
)
SPM = Vocabulary(model="llama", size=32_000, digests=((32_000, 5),))


def drafted(build: str | Capabilities = NEW, **rest: Any) -> LaunchPlan:
    asked: dict[str, Any] = {"draft": model(layers=4), "draft_model": DRAFT}
    return planned(build, **(asked | rest))


def head(architecture: str, **changes: Any) -> ModelFacts:
    return model(architecture=architecture, model_class=ModelClass.DRAFT, layers=1, **changes)


def with_device(build: str = NEW) -> Capabilities:
    return capabilities(build, GPU)


def self_drafting(**changes: Any) -> ModelFacts:
    return model(**({"mtp_layers": 1, "drafts_itself": True, "layers": 33} | changes))


# --- another model -------------------------------------------------------------------------------


def test_a_draft_model_is_passed_with_the_type_without_which_it_is_not_used() -> None:
    made = drafted()
    assert value(made, "--spec-draft-model") == DRAFT
    assert value(made, "--spec-type") == "draft-simple"
    assert value(made, "--spec-draft-n-max") == "8"


@pytest.mark.parametrize(("build", "flag"), [(NEW, "--spec-draft-n-max"), (MIDDLE, "--draft-max")])
def test_acceptance_of_earlier_requests_is_shown_and_warned_of(build: str, flag: str) -> None:
    runtime = runtime_id(("/opt/llama/llama-server",), capabilities(build))
    low = DraftCounts(runtime, DRAFT, 2000, 100)
    history = LoadHistory(drafts=(DraftCounts("other", DRAFT, 2000, 1900), low))
    made = drafted(build, history=history)
    assert made.draft_counts == low
    assert reason(made, flag).endswith(
        "; only 5% of 2,000 tokens that the draft proposed were accepted, "
        "so drafts hardly pay: llamasup tune measures it"
    )
    assert "accepted" not in reason(drafted(build), flag)


def test_without_drafts_the_draft_model_is_not_loaded() -> None:
    for made in (drafted(extra=("--spec-type", "none")), drafted(measured=NO_DRAFTS)):
        assert value(made, "--spec-draft-model") is None
        assert value(made, "--spec-draft-n-max") is None
        assert made.argv.count("--spec-type") == 1
        assert value(made, "--spec-type") == "none"
        assert made.memory.draft_bytes == 0
        assert reason(made, "--spec-draft-model") == "left out: --spec-type none uses no draft model"
    by_user = drafted(draft_model=None, extra=("-md", DRAFT, "--spec-type", "none"))
    assert by_user.memory.draft_bytes > 0  # llama-server loads it


def test_a_build_without_types_leaves_the_draft_model_out_if_it_drafts_no_token() -> None:
    none = Measured(Changes((("--draft-max", "0"),)), "measured here")
    for made in (drafted(MIDDLE, extra=("--draft-max", "0")), drafted(MIDDLE, measured=none)):
        assert value(made, "--draft-max") == "0"
        assert not any(word in made.argv for word in ("--model-draft", "--ctx-size-draft"))
        assert made.memory.draft_bytes == 0
        assert made.draft is None
        assert reason(made, "--model-draft") == "left out: --draft-max 0 uses no draft model"
    by_user = drafted(MIDDLE, draft_model=None, extra=("-md", DRAFT, "--draft-max", "0"))
    assert by_user.memory.draft_bytes > 0  # llama-server loads it


@pytest.mark.parametrize(
    ("build", "flag"), [(NEW, ("--spec-type", "none")), (MIDDLE, ("--draft-max", "0")), (OLD, None)]
)
def test_how_a_build_drafts_no_token(build: str, flag: tuple[str, str] | None) -> None:
    assert no_drafts(capabilities(build)) == flag


def test_a_build_of_2025_has_a_draft_context_of_its_own() -> None:
    made = drafted(MIDDLE)
    assert value(made, "--model-draft") == DRAFT
    assert value(made, "--draft-max") == "8"
    assert value(made, "--ctx-size-draft") == value(made, "--ctx-size")


def test_a_build_whose_server_does_not_draft_refuses_a_draft_model() -> None:
    with pytest.raises(UsageInvalid, match=r"--draft-model is not possible.*0\.2\.90.*does not draft"):
        drafted(OLD)


@pytest.mark.parametrize("facts", [bert(), model(model_class=ModelClass.LORA)], ids=["encoder", "lora"])
def test_model_that_is_not_a_decoder_cannot_draft(facts: ModelFacts) -> None:
    with pytest.raises(UsageInvalid, match=r"draft\.gguf is of class \w+, but a draft model must"):
        drafted(draft=facts)


def test_a_relative_path_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="must be absolute"):
        drafted(draft_model="draft.gguf")


# --- whether it belongs to the model -------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        (BPE, SPM, "the draft's tokenizer is 'llama', the model's 'gpt2'"),
        (replace(BPE, size=554), replace(BPE, size=100), "has 100 tokens, the model's 554"),
        (BPE, replace(BPE, size=BPE.size + 129), "has 152065 tokens, the model's 151936"),
        (
            BPE,
            replace(BPE, digests=((151_936, 8),)),
            "some of the first 151936 tokens of their vocabularies differ",
        ),
        (SPM, replace(SPM, bos=3), "the draft's BOS token is 3, the model's 1"),
        (SPM, replace(SPM, add_bos=False), "only the model puts BOS at the beginning of a text"),
        (SPM, replace(SPM, add_eos=True), "only the draft puts EOS at the end of a text"),
        (replace(SPM, add_eos=True), replace(SPM, add_eos=True, eos=9), "EOS token is 9, the model's 2"),
        (replace(BPE, add_bos=True), replace(BPE, add_bos=True, bos=5), "BOS token is 5, the model's 1"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_draft_of_another_vocabulary_is_refused_with_the_difference(
    target: Vocabulary, draft: Vocabulary, says: str
) -> None:
    with pytest.raises(DraftMismatch) as refused:
        drafted(facts=model(vocabulary=target), draft=model(vocabulary=draft))
    assert says in refused.value.message
    assert refused.value.message.startswith("draft.gguf cannot draft for this model: ")
    assert (refused.value.exit_code, refused.value.cause) == (65, "draft_mismatch")
    assert "same family" in refused.value.remedy


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (BPE, BPE),
        (BPE, replace(BPE, size=BPE.size + 128, digests=((151_936, 7), (152_064, 8)))),
        (BPE, replace(BPE, size=BPE.size - 128, digests=((151_808, 8),))),
        (BPE, replace(BPE, bos=9)),  # not added to any text
        (SPM, replace(SPM, eos=9)),
        (SPM, replace(SPM, bos=1, add_bos=True, add_eos=False)),  # as it is by default
        (BPE, replace(BPE, pre="other")),
        (replace(BPE, add_bos=None), replace(BPE, add_bos=True)),  # depends on the pre-tokenizer
        (replace(BPE, add_bos=True, bos=None), replace(BPE, add_bos=True)),
    ],
    ids=str,
)
def test_a_draft_that_llama_server_accepts_is_passed(target: Vocabulary, draft: Vocabulary) -> None:
    made = drafted(facts=model(vocabulary=target), draft=model(vocabulary=draft))
    assert value(made, "--spec-type") == "draft-simple"


@pytest.mark.parametrize("difference", [0, 1, 63, 64, 127, 128])
@pytest.mark.parametrize("size", [700, 704, 767])
def test_different_tokens_are_found_for_any_sizes(size: int, difference: int) -> None:
    words = [f"word{index}" for index in range(size + difference)]
    whole, less = of_words(words), of_words(words[:size])
    assert value(drafted(facts=whole, draft=less), "--spec-type") == "draft-simple"
    special = of_words(["special", *words[1:size]])  # the first five need not be shared
    assert value(drafted(facts=whole, draft=special), "--spec-type") == "draft-simple"
    for place in (5, size // 2, size - 64):
        other = of_words([*words[:place], "other", *words[place + 1 : size]])
        for target, draft in ((whole, other), (other, whole)):
            with pytest.raises(DraftMismatch, match="tokens of their vocabularies differ"):
                drafted(facts=target, draft=draft)


def of_words(words: list[str]) -> ModelFacts:
    keys: dict[str, KeyValue] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 8,
        "llama.embedding_length": 32,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
    }
    content = write_gguf(keys, [(TensorPlan("output_norm.weight", (32,)), bytes(128))])
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    return facts


def test_sizes_that_differ_a_little_are_named_in_the_reason() -> None:
    small = replace(BPE, size=BPE.size - 128)
    made = drafted(facts=model(vocabulary=BPE), draft=model(vocabulary=small))
    assert "has 151808 tokens and the model's 151936" in reason(made, "--spec-draft-model")
    same = drafted(facts=model(vocabulary=BPE), draft=model(vocabulary=BPE))
    assert reason(same, "--spec-draft-model") == "set with --draft-model"


# --- given after the dashes ----------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--spec-draft-model", "--model-draft", "-md"])
def test_users_draft_model_gets_the_type_that_it_needs(flag: str) -> None:
    made = planned(draft=model(layers=4), extra=(flag, DRAFT))
    assert made.argv.count(flag) == 1
    assert value(made, "--spec-type") == "draft-simple"
    assert "load the draft model and not use it" in reason(made, "--spec-type")


def test_it_gets_the_type_even_where_its_facts_were_not_read() -> None:
    assert value(planned(extra=("-md", DRAFT)), "--spec-type") == "draft-simple"


def test_it_is_compared_with_the_model_too() -> None:
    with pytest.raises(DraftMismatch):
        planned(facts=model(vocabulary=BPE), draft=model(vocabulary=SPM), extra=("--spec-draft-model", DRAFT))


def test_users_spec_type_stays() -> None:
    spoken = ("--spec-type", "ngram-simple", "-md", DRAFT)
    made = planned(facts=model(vocabulary=BPE), draft=model(vocabulary=SPM), extra=spoken)
    assert made.argv.count("--spec-type") == 1
    assert value(made, "--spec-type") == "ngram-simple"


def test_the_profile_plain_passes_the_type_that_a_draft_model_needs_and_nothing_else() -> None:
    made = drafted(profile="plain")
    assert value(made, "--spec-type") == "draft-simple"
    assert "--spec-draft-n-max" not in made.argv


# --- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "spec_type", "ahead"),
    [("eagle3", "draft-eagle3", None), ("gemma4-assistant", "draft-mtp", "2"), ("qwen35", "draft-mtp", "2")],
)
def test_draft_head_is_passed_with_its_own_type(architecture: str, spec_type: str, ahead: str | None) -> None:
    made = drafted(draft=head(architecture, vocabulary=SPM), facts=model(vocabulary=BPE))
    assert value(made, "--spec-draft-model") == DRAFT
    assert value(made, "--spec-type") == spec_type
    assert value(made, "--spec-draft-n-max") == ahead


def test_llama_server_tells_dflash_from_dspark_by_itself() -> None:
    made = drafted(draft=head("dflash"))
    assert "--spec-type" not in made.argv
    assert "from its file" in reason(made, "--spec-type")
    assert value(made, "--spec-draft-n-max") == "15"


def test_build_without_dspark_gets_dflash() -> None:
    text = "--spec-type {none,draft-simple,draft-dflash}  type\n--spec-draft-model FNAME  draft\n"
    made = drafted(from_help(text), draft=head("dflash"))
    assert value(made, "--spec-type") == "draft-dflash"


@pytest.mark.parametrize("build", [MIDDLE, OLD])
def test_a_build_without_the_type_refuses_the_head(build: str) -> None:
    with pytest.raises(UsageInvalid, match=r"draft head \(eagle3\).* has no --spec-type draft-eagle3"):
        drafted(build, draft=head("eagle3"))


def test_fit_target_includes_a_head_that_fit_may_not_measure() -> None:
    small = head("eagle3", weights_bytes=GIB)
    made = drafted(with_device(), draft=small)
    assert int(value(made, "--fit-target") or 0) > 1024 + 1024
    assert "may not be able to measure" in reason(made, "--fit-target")
    extra_args = drafted(with_device(), draft=small, extra=("--fit-target", "512"))
    assert extra_args.argv.count("--fit-target") == 1
    # Nothing to leave room on; and what --fit does measure.
    assert "--fit-target" not in drafted(draft=small).argv
    assert "--fit-target" not in drafted(with_device(), draft=small, gpu_layers=0).argv
    assert "--fit-target" not in drafted(with_device()).argv
    assert "--fit-target" not in planned(with_device(), facts=self_drafting()).argv


def test_file_with_only_mtp_layers_is_a_draft_and_not_a_model() -> None:
    content = speculative.mtp_head()
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.model_class is ModelClass.DRAFT


def test_mtp_layers_that_were_cut_from_another_model_are_refused_with_the_difference() -> None:
    def layers(architecture: str = "llama", width: int = model().embedding_length) -> ModelFacts:
        return head(architecture, embedding_length=width, mtp_layers=1)

    assert value(drafted(draft=layers()), "--spec-type") == "draft-mtp"
    for strange in (layers("qwen35"), layers(width=64)):
        with pytest.raises(DraftMismatch, match=r"MTP layers of a .* and this model is llama of width"):
            drafted(draft=strange)


# --- a model that drafts for itself --------------------------------------------------------------


def test_mtp_layers_draft_for_their_own_model() -> None:
    made = planned(facts=self_drafting())
    assert value(made, "--spec-type") == "draft-mtp"
    assert value(made, "--spec-draft-n-max") == "2"
    assert "--spec-draft-model" not in made.argv
    assert "predict the tokens after the next" in reason(made, "--spec-type")


def test_their_context_counts_in_memory_and_their_weights_only_once() -> None:
    content = speculative.self_drafting_decoder()
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert (facts.model_class, facts.mtp_layers) == (ModelClass.DECODER, 1)
    own, plain = planned(facts=facts), planned(facts=replace(facts, mtp_layers=0))
    assert own.memory.weights_bytes == plain.memory.weights_bytes
    assert own.memory.kv_bytes > plain.memory.kv_bytes


def test_a_recurrent_state_has_a_snapshot_for_each_token_drafted() -> None:
    content = speculative.self_drafting_decoder()
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.recurrent is not None
    state_bytes = facts.recurrent.bytes_per_layer * 4  # slots
    two, five, simple = (
        planned(facts=facts),
        planned(facts=facts, extra=("--spec-draft-n-max", "5")),
        drafted(facts=facts, draft=facts),
    )
    assert (two.shape.rollback, five.shape.rollback, simple.shape.rollback) == (2, 5, 0)
    assert five.memory.kv_bytes - two.memory.kv_bytes == 3 * state_bytes


def test_the_context_has_room_to_check_all_drafts_at_once() -> None:
    shape = ContextShape(1024, 4, 512, outputs_per_slot=1)
    extra_args = read_extra(capabilities(NEW), ())
    for spec_type, outputs in (("draft-simple", 9), ("draft-mtp", 3), ("draft-eagle3", 4), (None, 4)):
        made = shape_with_drafts(shape, Drafter(DRAFT, None, spec_type), extra_args)
        assert made.outputs_per_slot == outputs


@pytest.mark.parametrize(
    "rest",
    [
        {"extra": ("--spec-type", "ngram-mod")},
        {"extra": ("--embedding",)},
        {"profile": "plain"},
        {"build": MIDDLE},
    ],
    ids=str,
)
def test_mtp_layers_do_not_draft_if_user_purpose_or_build_prevent_it(rest: dict[str, Any]) -> None:
    assert "draft-mtp" not in planned(facts=self_drafting(), **rest).argv


def test_users_spec_type_is_not_passed_twice_and_its_memory_counts() -> None:
    made = planned(facts=self_drafting(), extra=("--spec-type", "ngram-mod,draft-mtp"))
    assert made.argv.count("--spec-type") == 1
    without = planned(facts=self_drafting(), extra=("--spec-type", "ngram-mod"))
    assert made.memory.kv_bytes > without.memory.kv_bytes


def test_a_draft_model_asked_for_goes_before_the_models_own_layers() -> None:
    assert value(drafted(facts=self_drafting()), "--spec-type") == "draft-simple"


# --- where the draft goes ------------------------------------------------------------------------


def test_the_build_fits_the_drafts_layers_to_its_devices() -> None:
    made = drafted(with_device())
    assert "--spec-draft-ngl" not in made.argv
    assert "fits the draft's layers" in reason(made, "--spec-draft-ngl")


def test_users_layers_for_the_draft_stay() -> None:
    made = drafted(with_device(), extra=("--spec-draft-ngl", "3"))
    assert made.argv[-2:] == ("--spec-draft-ngl", "3")
    assert "set by the user" in reason(made, "--spec-draft-ngl")


def test_the_drafts_layers_are_counted_where_they_will_be() -> None:
    def on_device(**rest: Any) -> list[int]:
        small = model(layers=4, layer_bytes=(GIB // 8,) * 4, weights_bytes=GIB // 2)
        parts = drafted(with_device(), draft=small, **rest).memory.parts
        return [part.device_bytes for part in parts if part.name == "draft model: weights"]

    assert on_device() == [GIB // 2]
    assert on_device(extra=("--spec-draft-ngl", "3")) == [2 * GIB // 8]  # and the output
    assert on_device(extra=("--spec-draft-ngl", "0")) == [0]
    assert on_device(extra=("--spec-draft-ngl", "all")) == [GIB // 2]
    assert on_device(gpu_layers=0) == [0]


def test_draft_of_a_model_on_the_host_is_on_the_host() -> None:
    made = drafted(with_device(), gpu_layers=0)
    assert value(made, "--gpu-layers") == "0"
    assert value(made, "--spec-draft-ngl") == "0"


def test_a_build_that_cannot_fit_gets_all_of_the_drafts_layers_on_the_device() -> None:
    assert value(drafted(with_device(MIDDLE)), "--gpu-layers-draft") == "999"


def test_a_draft_keeps_the_cache_types_that_its_own_heads_allow() -> None:
    odd = model(layers=4, key_length=80, weights_bytes=GIB // 2)
    made = drafted(draft=odd, kv_type="q8_0")
    assert "--spec-draft-type-k" not in made.argv
    assert value(made, "--spec-draft-type-v") == "q8_0"
    assert made.memory.weights_bytes == model().weights_bytes + GIB // 2
