"""LoRA adapters: which model they belong to, by headers and names; doubtful ones are not used."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.models.found import FoundModel
from llamasup.core.models.registry import build
from llamasup.core.models.rules import ModelRule
from llamasup.core.planning.adapters import adapters_of
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import ModelSettings
from llamasup.errors import ModelInvalid
from tests.core.planning.plans import NEW, OLD, from_help, planned
from tests.kit import models


def facts(content: bytes) -> ModelFacts:
    read = read_header(content, len(content))
    assert isinstance(read, ModelFacts)
    return read


MODEL = facts(models.tiny_decoder())
ENCODER = facts(models.tiny_encoder())
LORA = facts(models.tiny_lora())


def test_header_has_the_width_and_base_of_an_adapter() -> None:
    assert LORA.adapted_length == MODEL.embedding_length
    assert LORA.base_models == ()
    assert facts(models.tiny_lora(width=32)).adapted_length == 32
    assert facts(models.tiny_lora(base="Tiny")).base_models == ("Tiny",)
    assert (MODEL.adapted_length, MODEL.base_models) == (0, ())


def test_adapter_of_the_only_model_fits_every_quantization() -> None:
    files = {"/m/x-Q4_K_M.gguf": MODEL, "/m/x-Q8_0.gguf": MODEL, "/m/a.gguf": LORA, "/m/b.gguf": LORA}
    both = ("/m/a.gguf", "/m/b.gguf")
    assert adapters_of(files) == {"/m/x-Q4_K_M.gguf": both, "/m/x-Q8_0.gguf": both}


@pytest.mark.parametrize(
    "adapter",
    [
        replace(LORA, architecture="qwen2"),
        replace(LORA, adapted_length=32),
        replace(LORA, adapted_length=0),
        replace(LORA, big_endian=True),
        replace(LORA, base_models=("Somebody Else",)),
        replace(LORA, base_models=("", "!")),
    ],
)
def test_adapter_that_cannot_load_or_names_another_model_is_not_used(adapter: ModelFacts) -> None:
    assert adapters_of({"/m/x.gguf": MODEL, "/m/a.gguf": adapter}) == {}


def test_adapter_next_to_two_models_or_an_unreadable_one_is_not_used() -> None:
    assert adapters_of({"/m/x.gguf": MODEL, "/m/y.gguf": MODEL, "/m/a.gguf": LORA}) == {}
    assert adapters_of({"/m/x.gguf": MODEL, "/m/y.gguf": ENCODER, "/m/a.gguf": LORA}) == {}
    assert adapters_of({"/m/x.gguf": MODEL, "/m/a.gguf": LORA}, ["/m/cut.gguf"]) == {}
    assert adapters_of({"/m/x.gguf": MODEL, "/n/a.gguf": LORA}) == {}


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("Llama 3.2 1B Instruct", "/m/Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        ("llamasup TINY", "/m/whatever.gguf"),
    ],
)
def test_the_base_that_it_names_tells_models_apart(base: str, path: str) -> None:
    named = replace(LORA, base_models=(base,))
    own = replace(MODEL, name="Llamasup tiny") if path == "/m/whatever.gguf" else MODEL
    files = {path: own, "/m/other.gguf": replace(MODEL, name="other"), "/m/a.gguf": named}
    assert adapters_of(files, ["/m/cut.gguf"]) == {path: ("/m/a.gguf",)}


def test_adapter_path_with_a_separator_is_not_used() -> None:
    assert adapters_of({"/m/x.gguf": MODEL, "/m/a,b.gguf": LORA, "/m/a:1.gguf": LORA}) == {}


def test_a_model_loads_so_many_and_no_more() -> None:
    files = {"/m/x.gguf": MODEL} | {f"/m/a{number:02}.gguf": LORA for number in range(20)}
    assert adapters_of(files)["/m/x.gguf"] == tuple(f"/m/a{number:02}.gguf" for number in range(8))


# --- in the registry -----------------------------------------------------------------------------


def found(path: str, outcome: ModelFacts | ModelInvalid) -> FoundModel:
    return FoundModel(path, outcome, ((path, 1, 1),), (path.split("/")[-1].removesuffix(".gguf"),))


AUTO = ModelRule("*", options=ModelSettings(loras=("auto",)))


def test_adapters_of_a_model_are_loaded_if_the_config_says_auto() -> None:
    files = [found("/m/x.gguf", MODEL), found("/m/a.gguf", LORA)]
    registry = build([AUTO], files)
    spec = registry.specs["x"]
    assert (spec.settings.adapters, spec.settings.extra) == (("/m/a.gguf",), ())
    assert spec.identity == (("/m/x.gguf", 1, 1), ("/m/a.gguf", 1, 1))
    assert registry.problems == ()
    assert build((), files).specs["x"].settings.adapters == ()


def test_adapters_of_the_config_replace_found_ones() -> None:
    files = [found("/m/x.gguf", MODEL), found("/m/a.gguf", LORA)]
    for loras, extra in (((), ()), (("/l/z.gguf",), ("--lora", "/l/z.gguf"))):
        spec = build([AUTO, ModelRule("x", options=ModelSettings(loras=loras))], files).specs["x"]
        assert (spec.settings.adapters, spec.settings.extra) == ((), extra)
        assert spec.identity == (("/m/x.gguf", 1, 1),)


def test_doubtful_adapters_are_reported() -> None:
    files = [found("/m/x.gguf", MODEL), found("/m/y.gguf", MODEL), found("/m/a.gguf", LORA)]
    problems = build([AUTO], files).problems
    assert [(each.cause, each.names) for each in problems] == [
        ("adapters_unpaired", ("x",)),
        ("adapters_unpaired", ("y",)),
    ]


def test_found_projector_is_part_of_the_model_unless_another_is_named() -> None:
    projector = facts(models.tiny_projector())
    files = [found("/m/x.gguf", MODEL), found("/m/mmproj-x.gguf", projector)]
    assert build((), files).specs["x"].identity == (("/m/x.gguf", 1, 1), ("/m/mmproj-x.gguf", 1, 1))
    none = ModelRule("x", options=ModelSettings(mmproj="none"))
    assert build([none], files).specs["x"].identity == (("/m/x.gguf", 1, 1),)


# --- in the plan ---------------------------------------------------------------------------------


def reason(made: LaunchPlan) -> str:
    return next(each.reason for each in made.reasons if each.flag == "--lora-scaled")


BOTH = ("/m/a.gguf", "/m/b.gguf")


def test_adapters_apply_only_on_request_and_no_prompt_is_kept() -> None:
    made = planned(NEW, adapters=BOTH)
    assert made.argv[made.argv.index("--lora-scaled") + 1] == "/m/a.gguf:0,/m/b.gguf:0"
    assert "--no-cache-prompt" in made.argv
    assert reason(made) == "only requests that name an adapter use it"
    assert made.key != planned(NEW).key
    assert not {"--lora-scaled", "--no-cache-prompt"} & {*planned(NEW).argv}


@pytest.mark.parametrize("build", [OLD, from_help("-m, --model FNAME  model path\n--metrics  metrics\n")])
def test_build_that_would_mix_adapters_gets_none(build: str | Capabilities) -> None:
    made = planned(build, adapters=BOTH)
    assert "--lora-scaled" not in made.argv
    assert "cannot separate the adapters of one request" in reason(made)


@pytest.mark.parametrize("extra", [("--lora", "/l/z.gguf"), ("--lora-scaled", "/l/z.gguf:0.5")])
def test_users_adapters_replace_found_ones(extra: tuple[str, ...]) -> None:
    made = planned(NEW, adapters=BOTH, extra=extra)
    assert "/m/a.gguf:0,/m/b.gguf:0" not in made.argv
