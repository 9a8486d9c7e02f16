"""The models and their names: the rules of a config, applied to the found files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.models.found import FoundModel
from llamasup.core.models.names import file_id, folded
from llamasup.core.models.registry import Registry, Unknown, build, with_options
from llamasup.core.models.rules import ModelRule, wrong_rules
from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.planning.projectors import Pairing
from llamasup.core.settings.model import ModelSettings
from llamasup.core.settings.names import why_not_a_name
from llamasup.errors import ConfigInvalid, ModelInvalid, ModelMissing
from tests.kit import models
from tests.kit.extent import examples

FOREVER = float("inf")


def facts(content: bytes) -> ModelFacts:
    read = read_header(content, len(content))
    assert isinstance(read, ModelFacts)
    return read


DECODER = facts(models.tiny_decoder())
LORA = facts(models.tiny_lora())
PROJECTOR = facts(models.tiny_projector())
VOCABULARY = facts(models.vocabulary_only())


def found(path: str, outcome: ModelFacts | ModelInvalid = DECODER, *ids: str, real: str = "") -> FoundModel:
    return FoundModel(path, outcome, ((real or path, 1, 1),), ids or (file_id(path),))


def missing(path: str) -> FoundModel:
    return FoundModel(path, ModelMissing(f"{path}: there is no such file", remedy="Check the path."))


def options(spec: ModelSpec | Unknown) -> ModelSettings:
    assert isinstance(spec, ModelSpec)
    return spec.options


def by_id(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Id → aliases."""
    return {spec.id: spec.aliases for spec in registry.specs.values()}


def problems(registry: Registry) -> list[tuple[str, str]]:
    return [(problem.cause, problem.message) for problem in registry.problems]


# --- found files ---------------------------------------------------------------------------------


def test_found_file_is_served_under_its_own_id() -> None:
    registry = build((), [found("/m/tiny.gguf")])
    (spec,) = registry.specs.values()
    assert (spec.id, spec.source, spec.listed, spec.problem) == ("tiny", "/m/tiny.gguf", DECODER, "")
    assert spec.identity == (("/m/tiny.gguf", 1, 1),)
    assert spec.settings.alias == "tiny"
    assert spec.stay.ttl_s == FOREVER
    assert registry.names == {"tiny": "tiny"}
    assert registry.problems == ()


def test_replaced_file_has_another_spec() -> None:
    before = found("/m/tiny.gguf")
    after = replace(before, files=(("/m/tiny.gguf", 1, 2),))
    assert build((), [before]).specs != build((), [after]).specs
    assert build((), [before]).specs == build((), [before]).specs


def test_attachments_and_vocabularies_are_no_models() -> None:
    beside = [found("/m/lora.gguf", LORA), found("/m/mmproj.gguf", PROJECTOR), found("/m/v.gguf", VOCABULARY)]
    registry = build((), [found("/m/tiny.gguf"), *beside])
    assert by_id(registry) == {"tiny": ()}
    assert registry.problems == ()


def test_broken_file_has_a_spec_with_its_problem() -> None:
    error = ModelInvalid("/m/cut.gguf: truncated", remedy="Download it again.")
    registry = build((), [found("/m/cut.gguf", error), found("/m/tiny.gguf")])
    spec = registry.find("cut")
    assert isinstance(spec, ModelSpec)
    assert (spec.listed, spec.problem, spec.remedy) == (None, "/m/cut.gguf: truncated", "Download it again.")
    (problem,) = registry.problems
    assert (problem.cause, problem.names, problem.remedy) == ("model_invalid", ("cut",), "Download it again.")


def test_broken_projector_is_a_problem_and_no_model() -> None:
    registry = build((), [found("/m/mmproj-x.gguf", ModelInvalid("truncated"))])
    assert by_id(registry) == {}
    assert problems(registry) == [("model_invalid", "truncated")]


def test_two_files_with_one_name_are_refused_with_paths() -> None:
    registry = build((), [found("/a/x.gguf"), found("/b/x.gguf"), found("/a/y.gguf")])
    assert by_id(registry) == {"y": ()}
    (problem,) = registry.problems
    assert problem.cause == "same_id"
    assert problem.paths == ("/a/x.gguf", "/b/x.gguf")
    assert "/a/x.gguf" in problem.message
    assert "/b/x.gguf" in problem.message
    for name in ("x", "X.gguf"):
        assert registry.find(name) == Unknown(name, (), problem)


def test_resolve_does_not_search_similar_names() -> None:
    files = [
        found("/m/a.gguf", DECODER, "a", "org/repo:Q4_K_M"),
        found("/m/b.gguf", DECODER, "b", "org/two:Q8_0"),
    ]
    registry = build((), [*files, found("/m/c.gguf", DECODER, "c", "org/two:Q4_0")])
    asked = ("a", "A.gguf", "org/repo", "org/two", "aa", "a" * 300)
    assert [spec and spec.id for spec in map(registry.resolve, asked)] == ["a", "a", "a", None, None, None]


def test_incomplete_copy_does_not_replace_a_complete_file() -> None:
    cut = ModelInvalid("/m/backup/x.gguf: truncated", remedy="Copy it again.")
    files = [
        found("/m/backup/x.gguf", cut, "x", "org/repo:Q8_0"),
        found("/m/org/repo/x.gguf", DECODER, "x", "org/repo:Q8_0"),
        found("/m/other/y.gguf", cut, "y", "org/repo:Q8_0"),
    ]
    registry = build((), files)
    assert by_id(registry) == {"x": ("org/repo:Q8_0",), "y": ()}
    assert registry.specs["x"].source == "/m/org/repo/x.gguf"
    # The problem is reported, but not as one of the served model.
    assert [problem.names for problem in registry.problems] == [(), ("y",)]
    assert registry.problems[0].paths == ("/m/backup/x.gguf",)


def test_adapter_does_not_replace_a_broken_file_of_its_name() -> None:
    files = [found("/a/x.gguf", ModelInvalid("truncated")), found("/b/x.gguf", LORA)]
    (problem,) = build((), files).problems
    assert problem.names == ("x",)


def test_each_broken_file_of_one_name_is_a_problem() -> None:
    files = [found(f"/{folder}/x.gguf", ModelInvalid(f"/{folder}/x.gguf: truncated")) for folder in "ab"]
    registry = build((), files)
    assert [problem.cause for problem in registry.problems] == ["model_invalid", "model_invalid", "same_id"]
    assert by_id(registry) == {}


def test_config_may_name_the_broken_one_of_two_files() -> None:
    cut = found("/a/x.gguf", ModelInvalid("/a/x.gguf: truncated"))
    registry = build([ModelRule("half", cut.path)], [cut, found("/b/x.gguf")], sources={cut.path: cut})
    assert registry.specs["half"].problem == "/a/x.gguf: truncated"
    assert registry.specs["x"].problem == ""
    assert len(registry.problems) == 1


def test_config_can_name_two_files_of_one_name() -> None:
    files = [found("/a/x.gguf"), found("/b/x.gguf")]
    sources = {file.path: file for file in files}
    rules = [ModelRule("one", "/a/x.gguf"), ModelRule("two", "/b/x.gguf")]
    assert by_id(build(rules, files, sources=sources)) == {"one": (), "two": ()}


def test_file_with_two_paths_is_one_model_with_two_names() -> None:
    blob = "/hub/blobs/1"
    registry = build(
        (),
        [found("/m/x.gguf", DECODER, "x", real=blob), found("/hub/x", DECODER, "org/repo:Q8_0", real=blob)],
    )
    assert by_id(registry) == {"x": ("org/repo:Q8_0",)}


def test_second_id_counts_only_if_unique() -> None:
    registry = build(
        (),
        [
            found("/m/org/repo/x.gguf", DECODER, "x", "org/repo:Q4_K_M"),
            found("/m/a/b/y.gguf", DECODER, "y", "a/b:Q8_0"),
            found("/n/a/b/z.gguf", DECODER, "z", "a/b:Q8_0"),
        ],
    )
    assert by_id(registry) == {"x": ("org/repo:Q4_K_M",), "y": (), "z": ()}


def test_file_without_a_valid_name_is_a_problem() -> None:
    registry = build((), [FoundModel("/m/模型.gguf", DECODER, ids=())])
    assert by_id(registry) == {}
    assert "no part of its name is valid" in registry.problems[0].message


# --- rules of the config -------------------------------------------------------------------------


def test_rule_names_a_file_and_its_options() -> None:
    said = ModelSettings(ctx_size=4096, kv_type="q8_0", check_memory=False, ttl_s=60, pin=True, preload=True)
    rule = ModelRule("qwen", "/m/x.gguf", ("gpt-4o-mini",), said)
    registry = build([rule], [], sources={"/m/x.gguf": found("/m/x.gguf")})
    spec = registry.find("gpt-4o-mini")
    assert isinstance(spec, ModelSpec)
    assert spec.id == "qwen"
    assert (spec.settings.ctx_size, spec.settings.kv_type, spec.settings.check_memory) == (
        4096,
        "q8_0",
        False,
    )
    assert (spec.stay.ttl_s, spec.stay.pin, spec.stay.preload) == (60, True, True)


def test_own_id_of_a_file_is_an_alias_of_its_rule() -> None:
    file = found("/m/x.gguf")
    registry = build([ModelRule("qwen", "/m/x.gguf")], [file], sources={file.path: file})
    assert by_id(registry) == {"qwen": ("x",)}


def test_pattern_matches_any_name_of_a_model() -> None:
    said = ModelSettings(ctx_size=512)
    file = found(
        "/m/bartowski/Qwen-GGUF/qwen-Q4_K_M.gguf", DECODER, "qwen-Q4_K_M", "bartowski/Qwen-GGUF:Q4_K_M"
    )
    for pattern in ("qwen-*", "bartowski/*", "*:q4_k_m"):
        rule = ModelRule(pattern, options=said)
        assert options(build([rule], [file]).find("qwen-Q4_K_M")).ctx_size == 512
        for named in (ModelRule("chat", file.path), ModelRule("chat", "bartowski/Qwen-GGUF")):
            registry = build([rule, named], [file], sources={file.path: file})
            assert options(registry.find("chat")).ctx_size == 512
    by_alias = [ModelRule("gpt-*", options=said), ModelRule("qwen-Q4_K_M", aliases=("gpt-4o",))]
    assert options(build(by_alias, [file]).find("gpt-4o")).ctx_size == 512


def test_repository_pattern_matches_before_and_after_a_download() -> None:
    rules = [ModelRule("org/*", options=ModelSettings(ctx_size=512)), ModelRule("chat", "org/repo:Q8_0")]
    file = found("/m/org/repo/x.gguf", DECODER, "x", "org/repo:Q8_0")
    assert options(build(rules).find("chat")) == options(build(rules, [file]).find("chat"))
    assert options(build(rules).find("chat")).ctx_size == 512
    by_url = [ModelRule("http*", options=ModelSettings(ctx_size=512)), ModelRule("x", "https://h/x.gguf")]
    assert options(build(by_url).find("x")).ctx_size is None


def test_last_matching_pattern_takes_precedence() -> None:
    file = found("/m/org/repo/x.gguf", DECODER, "x", "org/repo:Q8_0")
    one, other = ModelSettings(ctx_size=1, parallel=1), ModelSettings(ctx_size=2)
    for first, last in (("x", "org/*"), ("org/*", "x")):
        rules = [ModelRule(f"{first}*", options=one), ModelRule(f"{last}*", options=other)]
        spec = options(build(rules, [file]).find("x"))
        assert (spec.ctx_size, spec.parallel) == (2, 1)


def test_id_that_is_another_models_name_is_no_alias() -> None:
    file, other = found("/m/x.gguf"), found("/n/y.gguf")
    rules = [
        ModelRule("x*", options=ModelSettings(ctx_size=512)),
        ModelRule("x", "/n/y.gguf"),
        ModelRule("chat", "/m/x.gguf"),
    ]
    registry = build(rules, [file, other], sources={source.path: source for source in (file, other)})
    assert options(registry.find("x")).ctx_size == 512
    assert options(registry.find("chat")).ctx_size is None


def test_rule_beats_pattern_and_pattern_beats_default() -> None:
    rules = [
        ModelRule("*", options=ModelSettings(ctx_size=1, parallel=1)),
        ModelRule("qwen*", options=ModelSettings(ctx_size=2)),
        ModelRule("qwen-?", options=ModelSettings(kv_type="f16")),
        ModelRule("Qwen-7B", options=ModelSettings(ctx_size=3)),
    ]
    files = [found("/m/Qwen-7B.gguf"), found("/m/qwen-1.gguf"), found("/m/llama.gguf")]
    registry = build(rules, files, defaults=ModelSettings(ctx_size=9, threads=9))
    said = {name: options(registry.find(name)) for name in ("Qwen-7B", "qwen-1", "llama")}
    assert {name: settings.ctx_size for name, settings in said.items()} == {
        "Qwen-7B": 3,
        "qwen-1": 2,
        "llama": 1,
    }
    assert {name: settings.kv_type for name, settings in said.items() if settings.kv_type} == {
        "qwen-1": "f16"
    }
    assert {settings.parallel for settings in said.values()} == {1}
    assert {settings.threads for settings in said.values()} == {9}


def test_rule_for_an_unknown_model_suggests_similar_names() -> None:
    registry = build([ModelRule("qwem", where="c.yaml:3")], [found("/m/qwen.gguf")])
    (problem,) = registry.problems
    assert problem.cause == "model_missing"
    assert problem.where == "c.yaml:3"
    assert problem.remedy == "Did you mean qwen?"
    spec = registry.specs["qwem"]
    assert spec.problem
    assert spec.listed is None


def test_rule_for_a_duplicate_name_shows_both_files() -> None:
    registry = build([ModelRule("x")], [found("/a/x.gguf"), found("/b/x.gguf")])
    assert registry.specs["x"].problem.startswith("2 files have the name 'x'")
    assert len(registry.problems) == 1


def test_missing_source_is_a_problem_of_its_model() -> None:
    registry = build(
        [ModelRule("q", "/m/no.gguf", where="c:1")], [], sources={"/m/no.gguf": missing("/m/no.gguf")}
    )
    assert registry.specs["q"].problem == "/m/no.gguf: there is no such file"
    (problem,) = registry.problems
    assert (problem.cause, problem.names, problem.where) == ("model_missing", ("q",), "c:1")


def test_broken_source_in_a_models_folder_is_one_problem() -> None:
    cut = found("/m/cut.gguf", ModelInvalid("/m/cut.gguf: truncated"))
    registry = build([ModelRule("q", cut.path)], [cut], sources={cut.path: cut})
    assert problems(registry) == [("model_invalid", "/m/cut.gguf: truncated")]
    assert registry.specs["q"].problem == "/m/cut.gguf: truncated"


def test_adapter_as_a_source_is_a_problem() -> None:
    registry = build([ModelRule("q", "/m/l.gguf")], [], sources={"/m/l.gguf": found("/m/l.gguf", LORA)})
    assert "a model of class lora" in registry.specs["q"].problem
    assert registry.problems[0].cause == "model_invalid"


def test_downloaded_repository_is_used() -> None:
    here = found("/hub/x.gguf", DECODER, "org/repo:Q4_K_M")
    rules = [
        ModelRule("a", "org/repo:Q4_K_M"),
        ModelRule("b", "org/other"),
        ModelRule("c", "https://h/x.gguf"),
    ]
    registry = build(rules, [here])
    assert registry.specs["a"].source == "/hub/x.gguf"
    assert registry.specs["a"].listed == DECODER
    for name, source in (("b", "org/other"), ("c", "https://h/x.gguf")):
        spec = registry.specs[name]
        assert (spec.source, spec.listed, spec.problem, spec.identity) == (source, None, "", ())


def test_repository_stands_for_its_only_quantization() -> None:
    one = [found("/hub/x.gguf", DECODER, "org/repo:Q4_K_M")]
    two = [*one, found("/hub/y.gguf", DECODER, "org/repo:Q8_0")]
    assert build([ModelRule("a", "org/repo")], one).specs["a"].source == "/hub/x.gguf"
    assert build([ModelRule("a", "org/repo")], two).specs["a"].source == "org/repo"


def test_devices_and_adapters_become_flags() -> None:
    loras = ("/l/a.gguf", "/l/b, c.gguf")
    said = ModelSettings(devices=("CUDA0", "CUDA1"), loras=loras, extra=("--mlock",))
    rule = ModelRule("q", "/m/x.gguf", options=said)
    sources = {"/m/x.gguf": found("/m/x.gguf")}
    extra = build([rule], [], sources=sources).specs["q"].settings.extra
    assert extra == ("--mlock", "--device", "CUDA0,CUDA1", "--lora", "/l/a.gguf", "--lora", '"/l/b, c.gguf"')


def test_replicas_have_no_device_flag_in_their_settings() -> None:
    rule = ModelRule("q", "/m/x.gguf", options=ModelSettings(devices=("CUDA0", "CUDA1"), replicas=2))
    spec = build([rule], [], sources={"/m/x.gguf": found("/m/x.gguf")}).specs["q"]
    assert spec.replicas == 2
    assert spec.settings.extra == ()
    assert spec.options.devices == ("CUDA0", "CUDA1")


PAIRED = Pairing(None, "next to it")


def spec_with(options: ModelSettings) -> ModelSpec:
    rule = ModelRule("q", "/m/x.gguf", options=options)
    return build([rule], [], sources={"/m/x.gguf": found("/m/x.gguf")}).specs["q"]


def test_other_options_replace_those_that_they_set() -> None:
    before = spec_with(ModelSettings(ctx_size=4096, threads=2, extra=("--mlock",)))
    after = with_options(before, ModelSettings(ctx_size=512, replicas=2))
    assert (after.settings.ctx_size, after.settings.threads, after.replicas) == (512, 2, 2)
    assert after.settings.extra == ("--mlock",)
    assert after.options.ctx_size == 512
    assert (after.id, after.source, after.settings.alias) == (before.id, before.source, "q")
    assert before.settings.ctx_size == 4096


def test_other_projector_replaces_the_found_one() -> None:
    spec = replace(spec_with(ModelSettings()), pairing=PAIRED)
    assert with_options(spec, ModelSettings(ctx_size=1)).pairing == PAIRED
    assert with_options(spec, ModelSettings(mmproj="none")).pairing is None


def test_other_options_of_run_keep_those_of_its_command_line() -> None:
    spec = spec_with(ModelSettings())
    by_command = replace(spec, stay=Stay(by_command=True), settings=replace(spec.settings, threads=3))
    after = with_options(by_command, ModelSettings(ctx_size=512, ttl_s=3.0))
    assert (after.settings.threads, after.settings.ctx_size) == (3, 512)
    assert after.stay == Stay(by_command=True)


# --- one process under several names -------------------------------------------------------------


def sharing(*said: ModelSettings, defaults: ModelSettings = ModelSettings()) -> Registry:  # noqa: B008 - frozen
    file = found("/m/x.gguf")
    rules = [ModelRule(f"name-{number}", file.path, options=options) for number, options in enumerate(said)]
    return build(rules, [file], sources={file.path: file}, defaults=defaults)


def test_names_with_equal_start_options_share_a_process() -> None:
    registry = sharing(ModelSettings(ctx_size=4096), ModelSettings())
    assert by_id(registry) == {"name-0": ("name-1", "x")}
    assert registry.specs["name-0"].settings.ctx_size == 4096


def test_names_with_different_start_options_are_two_models() -> None:
    registry = sharing(ModelSettings(ctx_size=4096), ModelSettings(ctx_size=8192), ModelSettings())
    assert by_id(registry) == {"name-0": ("name-2",), "name-1": ()}


@pytest.mark.parametrize(
    ("one", "other", "processes"),
    [
        ({"extra": ("--temp", "0")}, {"extra": ("--temp", "1")}, 2),
        ({"extra": ("--temp", "0")}, {"extra": ("--temp", "0")}, 1),
        # mostlygeek/llama-swap#584 and #406, ggml-org/llama.cpp#27622
        ({"extra": ("--reasoning-budget", "0")}, {}, 2),
        ({"warm_up": False}, {"warm_up": True}, 2),
        ({"check_memory": False}, {"check_memory": True}, 2),
        ({"nice": 0}, {"nice": 10}, 2),
        ({"nice": 0}, {}, 1),
        ({"extra": ("--chat-template-file", "/t")}, {"extra": ("--jinja",)}, 2),
        ({"extra": ("--temp", "0")}, {"ctx_size": 4096}, 2),
        ({"extra": ()}, {}, 1),
        ({"loras": ("/l/a.gguf",)}, {}, 2),  # each request gets the adapter
        ({"loras": ("/l/a.gguf",)}, {"extra": ("--mlock",)}, 2),
        ({"loras": ("/l/a.gguf",)}, {"loras": ("/l/a.gguf",), "ctx_size": 4096}, 1),
        ({"mmproj": "none"}, {"extra": ("--jinja",), "mmproj": "none"}, 2),
    ],
)
def test_flags_of_one_name_reach_no_other_name(one: Any, other: Any, processes: int) -> None:
    registry = sharing(ModelSettings(**one), ModelSettings(**other))
    assert len(registry.specs) == processes
    for spec, said in zip(registry.specs.values(), (one, other), strict=False):
        adapters = [word for path in said.get("loras", ()) for word in ("--lora", path)]
        assert spec.settings.extra == (*said.get("extra", ()), *adapters)


def test_names_that_share_a_process_are_known() -> None:
    registry = sharing(ModelSettings(ctx_size=4096), ModelSettings(), ModelSettings(extra=("--mlock",)))
    assert [spec.shares for spec in registry.specs.values()] == [("name-0", "name-1"), ()]
    alone = build([ModelRule("q", aliases=("r",))], [found("/m/q.gguf")])
    assert alone.specs["q"].shares == ()


def test_shared_process_has_the_most_generous_limits() -> None:
    registry = sharing(
        ModelSettings(ttl_s=60, max_queued=5, replicas=2),
        ModelSettings(ttl_s=600, pin=True, wait_timeout_s=9, keep_slots=True),
        defaults=ModelSettings(max_queued=50, wait_timeout_s=3, ttl_s=1),
    )
    spec = registry.specs["name-0"]
    assert (spec.stay.ttl_s, spec.stay.pin, spec.replicas) == (600, True, 2)
    assert (spec.options.max_queued, spec.options.wait_timeout_s, spec.options.keep_slots) == (50, 9, True)


def test_name_without_a_ttl_stays_loaded() -> None:
    assert sharing(ModelSettings(ttl_s=60), ModelSettings()).specs["name-0"].stay.ttl_s == FOREVER


# --- duplicate names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (
            [ModelRule("a", "/x", where="c:1"), ModelRule("a", "/y", where="c:9")],
            ("c:9: 'a' is defined twice (c:1)",),
        ),
        (
            [ModelRule("a", "/x", ("b",), where="c:1"), ModelRule("b", "/y", where="c:9")],
            ("c:1: 'b' is an alias of 'a', and a model's name (c:9)",),
        ),
        (
            [ModelRule("a", "/x", ("b",), where="c:1"), ModelRule("b", "/y", ("a",), where="c:9")],
            ("c:1: 'b' is an alias of 'a', and a model's name (c:9), and the other way round",),
        ),
        (
            [ModelRule("a", "/x", ("c",), where="c:1"), ModelRule("b", "/y", ("c",), where="c:9")],
            ("c:9: 'c' is an alias of 'b' and of 'a' (c:1)",),
        ),
        (
            [ModelRule("../a", "/x"), ModelRule("b", "/y", ("a\u202eb", " c"))],
            (
                "the name '../a' contains '..', like a path that leads out of a folder",
                "the alias 'a\\u202eb' of 'b' contains '\\u202e', which is not printable",
                "the alias ' c' of 'b' begins or ends with a space",
            ),
        ),
        (
            [ModelRule("", "/x"), ModelRule("é", "/y"), ModelRule("n" * 300, "/z")],
            (
                "the name '' is empty",
                "the name 'é' contains 'é'; allowed are letters, digits and . _ / : @ + -",
                f"the name '{'n' * 64}' has 300 characters, and 256 are allowed",
            ),
        ),
        (
            [ModelRule("a*", "/x", ("b",)), ModelRule("c", "/y", ("d?",))],
            (
                "'a*' is a rule for many models, so it cannot have path, repo or url",
                "'a*' is a pattern: an alias would name many models",
                "the alias 'd?' of 'c' is a pattern, not a name",
            ),
        ),
    ],
)
def test_all_invalid_and_duplicate_names_are_reported(rules: list[ModelRule], told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        build(rules)
    assert caught.value.details == told


def test_alias_equal_to_the_name_is_ignored() -> None:
    assert by_id(build([ModelRule("a", "o/r", ("a", "b", "b"))])) == {"a": ("b",)}


def test_file_with_a_name_of_the_config_is_a_problem() -> None:
    registry = build([ModelRule("q", "org/repo", ("x",))], [found("/m/x.gguf"), found("/m/q.gguf")])
    assert by_id(registry) == {"q": ("x",)}
    assert [(problem.cause, problem.paths) for problem in registry.problems] == [
        ("name_taken", ("/m/x.gguf",)),
        ("name_taken", ("/m/q.gguf",)),
    ]


NAMES = st.sampled_from(["a", "b", "c", "A", "b.gguf", "c:latest", "o/r:Q8_0", "o/r"])
FOUND = st.lists(
    st.builds(
        lambda own, other, real: found(f"/m/{real}/{own}.gguf", DECODER, own, other, real=real),
        NAMES,
        NAMES,
        st.sampled_from(["1", "2", "3"]),
    ),
    max_size=6,
)
RULES = st.lists(
    st.builds(
        ModelRule,
        NAMES,
        st.sampled_from([None, "/p", "o/r", "o/r:Q8_0"]),
        st.lists(NAMES, max_size=2).map(tuple),
        st.builds(ModelSettings, ctx_size=st.sampled_from([None, 1, 2])),
    ),
    max_size=4,
)


@settings(max_examples=examples(300))
@given(RULES, FOUND)
def test_every_name_has_one_model_and_every_file_is_accounted_for(
    rules: list[ModelRule], files: list[FoundModel]
) -> None:
    if list(wrong_rules(rules)):
        with pytest.raises(ConfigInvalid):
            build(rules, files)
        return
    registry = build(rules, files, sources={"/p": found("/p", DECODER, "p")})
    assert dict(registry.names) == {name: spec.id for spec in registry.specs.values() for name in spec.names}
    assert len(registry.names) == sum(len(set(spec.names)) for spec in registry.specs.values())
    assert all(id_ == spec.id for id_, spec in registry.specs.items())
    assert {rule.name for rule in rules} <= registry.names.keys()
    served = {name for spec in registry.specs.values() for name, _, _ in spec.identity}
    paths = {path for problem in registry.problems for path in problem.paths}
    reported = {file.files[0][0] for file in files if file.path in paths}
    assert all(file.files[0][0] in reported | served for file in files)


# --- lookups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen-7B", "qwen-7b", "QWEN-7B:latest", "Qwen-7B.gguf", "qwen-7b.GGUF"])
def test_model_is_found_by_any_spelling_of_its_name(name: str) -> None:
    registry = build((), [found("/m/Qwen-7B.gguf"), found("/m/other.gguf")])
    spec = registry.find(name)
    assert isinstance(spec, ModelSpec)
    assert spec.id == "Qwen-7B"


def test_ambiguous_spelling_suggests_both_models() -> None:
    registry = build((), [found("/m/Qwen.gguf"), found("/m/QWEN.gguf")])
    assert registry.find("qwen") == Unknown("qwen", ("Qwen", "QWEN"))
    exact = registry.find("QWEN")
    assert isinstance(exact, ModelSpec)
    assert exact.source == "/m/QWEN.gguf"


def test_unknown_name_has_similar_names() -> None:
    files = [found(f"/m/model-{number:04}-Instruct.gguf") for number in range(1000)]
    registry = build((), [*files, found("/m/llama-3.2-1b.gguf")])
    unknown = registry.find("lama-3.2-1b")
    assert isinstance(unknown, Unknown)
    assert unknown.near[0] == "llama-3.2-1b"
    assert registry.find("3.2") == Unknown("3.2", ("llama-3.2-1b",))  # a part of the name
    assert registry.find("zzz") == Unknown("zzz")
    assert registry.find("") == Unknown("")


def test_too_long_name_is_not_compared() -> None:
    assert build((), [found("/m/x.gguf")]).find("x" * 1_000_000) == Unknown("x" * 1_000_000)


# --- the default, and groups ---------------------------------------------------------------------


def test_only_model_is_the_default() -> None:
    assert build((), [found("/m/x.gguf")]).default == "x"
    assert build((), [found("/m/x.gguf"), found("/m/y.gguf")]).default is None
    assert build().default is None


def test_default_may_be_any_name() -> None:
    rules = [ModelRule("q", "o/r", ("gpt",)), ModelRule("p", "o/s")]
    assert build(rules, default_model="gpt").default == "q"
    registry = build(rules, default_model="gtp")
    assert registry.default is None
    assert problems(registry) == [("model_not_found", "the default model 'gtp' does not exist")]
    assert registry.problems[0].remedy == "Did you mean gpt?"
    assert build((), default_model="x").problems[0].remedy == "Set it to a model that is served."


def test_group_has_names_and_patterns() -> None:
    registry = build(
        [ModelRule("q", "o/r", ("gpt",))],
        [found("/m/x-1.gguf"), found("/m/x-2.gguf")],
        groups={"big": ["gpt", "x-*"], "other": ["x-1", "nobody"]},
    )
    assert {id_: set(spec.stay.groups) for id_, spec in registry.specs.items()} == {
        "q": {"big"},
        "x-1": {"big", "other"},
        "x-2": {"big"},
    }
    assert problems(registry) == [
        ("model_not_found", "the group 'other' names 'nobody', which is not a model")
    ]


# --- names of files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/m/Qwen2.5-7B-Q4_K_M.gguf", "Qwen2.5-7B-Q4_K_M"),
        ("/m/big-00001-of-00003.gguf", "big"),
        ("/m/a b  (c).gguf", "a-b-c"),
        ("/m/Modèle café.gguf", "Modele-cafe"),
        ("/m/a..b...gguf", "a.b"),
        ("/m/a,b.gguf", "a_b"),
        ("/m/模型.gguf", ""),
        ("/m/模型-7b.gguf", "7b"),
        (f"/m/{'x' * 250}.gguf", "x" * 250),
    ],
)
def test_file_id_is_the_stem_in_allowed_characters(path: str, own: str) -> None:
    assert file_id(path) == own


@given(st.text(max_size=300))
def test_file_id_is_a_valid_name(stem: str) -> None:
    own = file_id(f"/m/{stem.replace('/', '').replace(chr(0), '')}.gguf")
    assert own == "" or why_not_a_name(own) == ""


@given(st.text(alphabet="aA.-0gufl:test", max_size=40))
def test_folded_is_idempotent(name: str) -> None:
    assert folded(folded(name)) == folded(name)
