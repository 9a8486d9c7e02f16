"""Which projector in a folder belongs to a model, and the reason if none does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.gguf.files import read_model
from llamasup.core.llama_server.argv_builder import read_extra
from llamasup.core.planning.projectors import Candidate, Pairing, chosen_by_user, pair_projector
from llamasup.errors import ProjectorMismatch, UsageInvalid
from tests.core.planning.plans import (
    BUILDS,
    GIB,
    NEW,
    bert,
    capabilities,
    from_help,
    machine,
    model,
    planned,
    reason,
    value,
)
from tests.kit import vision
from tests.kit.gguf_writer import KeyValue, TensorPlan, tensor_bytes, write_gguf

MODEL = "/models/gemma-3-4b-it-Q4_K_M.gguf"
WIDTH = model().embedding_length


def projector(name: str, **changes: Any) -> Candidate:
    facts: dict[str, Any] = {
        "architecture": "clip",
        "model_class": ModelClass.PROJECTOR,
        "projection_length": WIDTH,
        "quantization": "F16",
        "parameters": 400_000_000,
        "weights_bytes": GIB // 2,
    }
    return Candidate(f"/models/{name}", model(**(facts | changes)))


def paired(*candidates: Candidate, model_path: str = MODEL, neighbours: tuple[str, ...] = ()) -> Pairing:
    pairing = pair_projector(model(), model_path, candidates, neighbours)
    assert pairing is not None
    return pairing


def chosen(*candidates: Candidate, **rest: Any) -> str | None:
    found = paired(*candidates, **rest).projector
    return None if found is None else found.path.removeprefix("/models/")


def test_folder_without_projectors_gives_no_reason() -> None:
    assert pair_projector(model(), MODEL, [], ["other.gguf"]) is None


def test_projector_of_the_other_byte_order_is_ignored() -> None:
    foreign = projector("mmproj-F16.gguf", big_endian=True)
    assert pair_projector(model(), MODEL, [foreign], []) is None
    assert chosen(foreign, projector("mmproj-Q8_0.gguf")) == "mmproj-Q8_0.gguf"


@pytest.mark.parametrize(
    "name",
    [
        "mmproj-F16.gguf",
        "mmproj-model-f16.gguf",
        "mmproj-gemma-3-4b-it-f16.gguf",
        "gemma-3-4b-it.mmproj-Q8_0.gguf",
        "mmproj-model-f16-4B.gguf",
        "mmproj-google_gemma-3-4b-it-bf16.gguf",
    ],
)
def test_the_projector_of_a_folder_with_one_model_is_its(name: str) -> None:
    assert chosen(projector(name)) == name


@pytest.mark.parametrize(
    "neighbour", ["gemma-3-4b-it-Q8_0.gguf", "gemma-3-4b-it-UD-IQ2_XXS.gguf", "mtp-gemma-3-4b-it-F16.gguf"]
)
def test_other_quantization_or_draft_head_is_not_another_model(neighbour: str) -> None:
    assert chosen(projector("mmproj-F16.gguf"), neighbours=(neighbour,)) == "mmproj-F16.gguf"


def test_the_parts_of_a_split_model_are_one_model() -> None:
    parts = tuple(f"big-Q4_K_M-0000{part}-of-00003.gguf" for part in (1, 2, 3))
    path = f"/models/{parts[0]}"
    assert chosen(projector("mmproj-F16.gguf"), model_path=path, neighbours=parts[1:]) == "mmproj-F16.gguf"


def test_name_decides_among_several_models() -> None:
    own, other = projector("mmproj-gemma-3-4b-it-f16.gguf"), projector("mmproj-Qwen2.5-VL-7B-f16.gguf")
    neighbours = ("Qwen2.5-VL-7B-Q4_K_M.gguf", "llama-3-8b.gguf")
    assert chosen(own, other, neighbours=neighbours) == "mmproj-gemma-3-4b-it-f16.gguf"
    assert "its name matches the model's" in paired(own, other, neighbours=neighbours).reason


def test_projector_with_more_words_of_the_models_name_wins() -> None:
    short, long = projector("mmproj-gemma-3-f16.gguf"), projector("mmproj-gemma-3-4b-it-f16.gguf")
    assert chosen(short, long) == "mmproj-gemma-3-4b-it-f16.gguf"


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "mmproj-Qwen2.5-VL-7B-f16.gguf"])
def test_unclear_name_among_several_models_pairs_nothing(name: str) -> None:
    pairing = paired(projector(name), neighbours=("llama-3-8b-Q4_K_M.gguf",))
    assert pairing.projector is None
    assert pairing.reason.startswith(f"{name} may belong to this model or to llama-3-8b-Q4_K_M.gguf: choose")


def test_a_strange_name_pairs_with_the_only_model_where_the_width_agrees_for_certain() -> None:
    assert chosen(projector("mmproj-vision-tower.gguf")) == "mmproj-vision-tower.gguf"
    pairing = paired(projector("mmproj-vision-tower.gguf", projection_length=0))
    assert pairing.projector is None
    assert "has the name of another model" in pairing.reason


def test_projector_of_another_width_is_ignored_with_both_widths() -> None:
    pairing = paired(projector("mmproj-gemma-3-4b-it-f16.gguf", projection_length=2560))
    assert pairing.projector is None
    assert "for models of width 2560, and this model has width 4096" in pairing.reason


def test_of_one_projector_in_several_types_f16_is_taken() -> None:
    kinds = ("Q8_0", "F32", "BF16", "F16", "Q4_0")
    variants = [projector(f"mmproj-{kind}.gguf", quantization=kind) for kind in kinds]
    order = []
    while variants:
        best = paired(*variants).projector
        assert best is not None
        order.append(best.facts.quantization)
        variants.remove(best)
    assert order == ["F16", "BF16", "Q8_0", "F32", "Q4_0"]


def test_different_projectors_are_not_paired() -> None:
    pairing = paired(projector("mmproj-F16.gguf"), projector("mmproj-Q8_0.gguf", parameters=1))
    assert pairing.projector is None
    assert "mmproj-F16.gguf and mmproj-Q8_0.gguf are different projectors" in pairing.reason
    many = [projector(f"mmproj-tower{index}.gguf") for index in range(4)]
    assert "mmproj-tower0.gguf and mmproj-tower1.gguf and 2 more" in paired(*many).reason


# --- on the command line -------------------------------------------------------------------------

PROJECTOR = projector("mmproj-F16.gguf")
FOUND = Pairing(PROJECTOR, "the projector in the model's folder")


def test_the_projector_found_is_passed_with_its_reason_and_counted() -> None:
    made = planned(found=FOUND)
    assert value(made, "--mmproj") == "/models/mmproj-F16.gguf"
    assert reason(made, "--mmproj") == FOUND.reason
    assert made.memory.weights_bytes == model().weights_bytes + GIB // 2


def test_reason_says_whether_ffmpeg_is_there() -> None:
    for given in ({"found": FOUND}, {"mmproj": "/models/mmproj.gguf", "projector": PROJECTOR.facts}):
        why = {
            has: reason(planned(hardware=machine(has_ffmpeg=has), **given), "--mmproj")
            for has in (True, False)
        }
        assert why[True].endswith("; ffmpeg, for WebP images and videos, is on PATH")
        assert "; WebP images and videos are refused, because" in why[False]


def test_reason_for_no_projector_has_a_remedy() -> None:
    made = planned(found=Pairing(None, "two of them: give it with --mmproj"))
    assert "--mmproj" not in made.argv
    assert reason(made, "--mmproj") == "left out: two of them: give it with --mmproj"


def test_a_build_that_sees_no_images_leaves_the_projector_out_unless_it_was_asked_for() -> None:
    blind = from_help("-m, --model FNAME  model\n--host HOST  host\n")
    made = planned(blind, found=FOUND)
    assert "--mmproj" not in made.argv
    assert reason(made, "--mmproj") == "left out: this build cannot read images"
    with pytest.raises(UsageInvalid, match="has no --mmproj"):
        planned(blind, mmproj="/models/mmproj.gguf", projector=PROJECTOR.facts)


@pytest.mark.parametrize("extra", [("--mmproj", "/x.gguf"), ("--mmproj-url", "http://x"), ("--no-mmproj",)])
def test_users_arguments_choose_the_projector(extra: tuple[str, ...]) -> None:
    assert chosen_by_user(read_extra(capabilities(NEW), extra))
    assert not chosen_by_user(read_extra(capabilities(NEW), ("--temp", "1")))


def test_the_projector_asked_for_is_passed_and_counted() -> None:
    made = planned(mmproj="/models/mmproj.gguf", projector=PROJECTOR.facts)
    assert value(made, "--mmproj") == "/models/mmproj.gguf"
    assert made.memory.weights_bytes == model().weights_bytes + GIB // 2


def test_a_relative_path_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="must be absolute"):
        planned(mmproj="mmproj.gguf", projector=projector("mmproj.gguf").facts)


@pytest.mark.parametrize("given", [{"mmproj": "/models/m.gguf"}, {"extra": ("--mmproj", "/models/m.gguf")}])
def test_a_wrong_projector_is_refused_with_both_numbers_however_it_was_given(given: dict[str, Any]) -> None:
    with pytest.raises(ProjectorMismatch) as refused:
        planned(NEW, projector=projector("m.gguf", projection_length=2560).facts, **given)
    assert (
        refused.value.message == "--mmproj m.gguf is for models of width 2560, and this model has width 4096"
    )
    assert (refused.value.exit_code, refused.value.cause) == (65, "projector_mismatch")


def test_file_that_is_not_a_projector_is_refused() -> None:
    with pytest.raises(UsageInvalid, match=r"--mmproj m\.gguf is not a projector: chat") as refused:
        planned(mmproj="/models/m.gguf", projector=model())
    assert "published with the model" in refused.value.remedy


@pytest.mark.parametrize("given", [{"mmproj": "/models/m.gguf"}, {"extra": ("--mmproj", "/models/m.gguf")}])
@pytest.mark.parametrize("facts", [bert(ModelClass.RERANKER, embedding_length=WIDTH), None])
def test_a_reranker_is_given_no_projector_that_it_would_never_use(
    given: dict[str, Any], facts: ModelFacts | None
) -> None:
    """b11434 answers "documents must be a non-empty string array" to anything but text."""
    if facts is None:  # a decoder that is to rerank
        given = {**given, "extra": ("--rerank", *given.get("extra", ()))}
    with pytest.raises(UsageInvalid, match=r"--mmproj m\.gguf would be loaded and never used") as refused:
        planned(NEW, facts, projector=PROJECTOR.facts, **given)
    assert refused.value.exit_code == 2


def test_decoder_that_reranks_gets_no_projector() -> None:
    made = planned(found=FOUND, extra=("--rerank",))
    assert "--mmproj" not in made.argv
    assert reason(made, "--mmproj") == "left out: a reranker reads only text"
    assert made.memory.weights_bytes == model().weights_bytes


def test_encoder_gets_its_projector_with_the_reason() -> None:
    made = planned(NEW, bert(embedding_length=WIDTH), mmproj="/models/mmproj.gguf", projector=PROJECTOR.facts)
    assert value(made, "--mmproj") == "/models/mmproj.gguf"
    assert reason(made, "--mmproj") == "set with --mmproj, to embed images too"


# --- the width, from the header ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "tower", "tensors", "read"),
    [
        (64, "vision", {"mm.0.weight": (32, 128), "mm.2.weight": (128, 64)}, 64),
        (64, "audio", {"mm.a.mlp.2.weight": (16, 64)}, 64),
        (768, "vision", {"mm.2.weight": (1024, 4096), "v.post_ln.weight": (768,)}, 0),  # of 2023
        (None, "vision", {"mm.2.weight": (128, 64)}, 0),
    ],
)
def test_the_width_counts_where_a_tensor_of_the_projector_has_it(
    stated: int | None, tower: str, tensors: dict[str, tuple[int, ...]], read: int
) -> None:
    keys: dict[str, KeyValue] = {
        "general.architecture": "clip",
        f"clip.{tower}.block_count": 1,
        f"clip.{tower}.embedding_length": 32,
        f"clip.{tower}.attention.head_count": 2,
    }
    if stated is not None:
        keys[f"clip.{tower}.projection_dim"] = stated
    plans = [TensorPlan(name, shape) for name, shape in tensors.items()]
    content = write_gguf(keys, [(plan, bytes(tensor_bytes(plan))) for plan in plans])
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert (facts.model_class, facts.projection_length) == (ModelClass.PROJECTOR, read)


# --- images in a micro-batch ----------------------------------------------------------------------


def image_projector(image_tokens: int) -> ModelFacts:
    return model(
        architecture="clip",
        model_class=ModelClass.PROJECTOR,
        projection_length=4096,
        image_tokens=image_tokens,
        weights_bytes=1 << 29,
    )


def with_images(image_tokens: int, build: str = NEW, **rest: Any) -> Any:
    return planned(build, projector=image_projector(image_tokens), mmproj="/models/mmproj.gguf", **rest)


@dataclass(frozen=True)
class Case:
    image_tokens: int
    rest: dict[str, Any]
    ubatch: str | None


@pytest.mark.parametrize(
    "case",
    [
        Case(0, {"profile": "memory"}, "128"),
        Case(256, {"profile": "memory"}, "256"),  # Gemma 3
        Case(256, {}, "512"),
        Case(1120, {}, "1120"),  # Gemma 4
        Case(1120, {"profile": "plain"}, "1120"),  # its default would abort
        Case(256, {"profile": "plain"}, "512"),
        Case(256, {"extra": ("-ub", "256")}, None),
        Case(256, {"extra": ("-b", "128", "-ub", "128")}, None),  # pieces of a batch
        Case(256, {"profile": "memory", "extra": ("--image-max-tokens", "700")}, "700"),
    ],
)
def test_micro_batch_holds_an_image(case: Case) -> None:
    made = with_images(case.image_tokens, **case.rest)
    assert value(made, "--ubatch-size") == case.ubatch
    assert made.shape.ubatch >= min(made.context.image_tokens, 2048) or "-b" in made.argv


@pytest.mark.parametrize("build", BUILDS)
def test_reason_is_the_image(build: str) -> None:
    made = with_images(256, build, profile="memory")
    (why,) = [reason.reason for reason in made.reasons if reason.flag == "--ubatch-size"]
    assert why == "an image of 256 tokens must fit in one micro-batch"


def test_smaller_one_that_the_user_sets_is_refused_with_the_number() -> None:
    with pytest.raises(UsageInvalid, match=r"--ubatch-size 128 .* 256 tokens") as refused:
        with_images(256, extra=("-ub", "128"))
    assert refused.value.remedy == "Give 256 or more, or leave it out."


def test_header_of_gemma_3_says_how_many_tokens_an_image_has(tmp_path: Path) -> None:
    gemma = vision.gemma_projector()
    fourth = gemma.replace(b"\6\0\0\0\0\0\0\0gemma3", b"\7\0\0\0\0\0\0\0gemma4v")
    for name, content, tokens in (
        ("gemma", gemma, 256),
        ("llava", vision.vision_projector(), 0),
        ("gemma4", fourth, 1120),
        ("odd", gemma.replace(b"clip.vision.patch_size", b"clip.vision.patch_siz_"), 0),
    ):
        path = tmp_path / f"mmproj-{name}.gguf"
        path.write_bytes(content)
        assert read_model(path).image_tokens == tokens, name
