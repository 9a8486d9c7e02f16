"""Paths after ``--`` are made absolute, because the child runs in another folder."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.llama_server.argv_builder import (
    OWN_OPTIONS,
    ParsedOption,
    ParsedOptions,
    config_files_in,
    ignored_variables,
    options_in_config,
    options_in_environ,
    parse_options,
    read_config,
    with_absolute_paths,
)
from llamasup.core.llama_server.help_text import Capabilities, parse_help
from llamasup.errors import UsageInvalid
from tests.core.planning.plans import MIDDLE, NEW, OLD, capabilities
from tests.kit.paths import FIXTURES


def here(*extra: str, build: str = NEW) -> tuple[str, ...]:
    return with_absolute_paths(capabilities(build), extra, lambda name: f"/here/{name}")


@pytest.mark.parametrize(
    ("flag", "value", "resolved"),
    [
        ("--lora", "a.gguf", "/here/a.gguf"),
        ("--lora", "a.gguf,b.gguf", "/here/a.gguf,/here/b.gguf"),
        ("--lora-scaled", "a.gguf:0.5,b.gguf:2", "/here/a.gguf:0.5,/here/b.gguf:2"),
        ("--lora-scaled", "a:b.gguf", "/here/a:b.gguf"),
        # mcmonkeyprojects/SwarmUI#808, kohya-ss/sd-webui-additional-networks#91
        ("--lora", '"te,st1.gguf"', '"/here/te,st1.gguf"'),
        ("--lora", 'b.gguf,"model [v1, overfit].gguf"', '/here/b.gguf,"/here/model [v1, overfit].gguf"'),
        ("--lora-scaled", '"te,st1.gguf:0.5",b.gguf:2', '"/here/te,st1.gguf:0.5",/here/b.gguf:2'),
        ("--lora", 'a"b.gguf', '/here/a"b.gguf'),
        ("--grammar-file", "a,b.gbnf", "/here/a,b.gbnf"),
        ("--chat-template-file", "t.jinja", "/here/t.jinja"),
        ("--slot-save-path", "slots", "/here/slots"),
        ("-md", "draft.gguf", "/here/draft.gguf"),
        ("--slot-save-path", "", ""),
    ],
)
def test_paths_of_extra_arguments_are_resolved(flag: str, value: str, resolved: str) -> None:
    assert here(flag, value) == (flag, resolved)


def test_only_the_path_of_two_values_is_resolved() -> None:
    assert here("--lora-scaled", "a.gguf", "0.5", build=OLD) == ("--lora-scaled", "/here/a.gguf", "0.5")


def test_a_build_that_takes_one_adapter_gets_its_path_without_quotes() -> None:
    assert here("--lora", '"te,st1.gguf"', build=MIDDLE) == ("--lora", "/here/te,st1.gguf")
    assert here("--lora", "te,st1.gguf", build=MIDDLE) == ("--lora", "/here/te,st1.gguf")


def test_other_values_are_unchanged() -> None:
    extra = ("--temp", "0.5", "--grammar", "root ::= x", "-kvu", "--chat-template", "chatml")
    assert here(*extra) == extra
    assert here(build=MIDDLE) == ()


def test_invalid_extra_argument_is_rejected() -> None:
    with pytest.raises(UsageInvalid, match="--lora needs a value"):
        here("--lora")


HELP = FIXTURES / "help"
NOW = Capabilities("now", parse_help((HELP / "b11434.txt").read_text()), ())


def line(*words: str) -> ParsedOptions:
    return ParsedOptions(parse_options(words, NOW))


def test_every_spelling_is_the_same_option() -> None:
    options = line("-c", "1", "--ctx-size", "2", "--ctx_size", "3")
    assert [given.values[0] for given in options.all("-c")] == ["1", "2", "3"]
    assert options.value("--ctx-size") == "3"


def test_value_that_looks_like_an_option_is_a_value() -> None:
    options = line("--alias", "--port", "--port", "9")
    assert options.value("--alias") == "--port"
    assert [given.values[0] for given in options.all("--port")] == ["9"]


def test_last_occurrence_of_a_switch_counts() -> None:
    assert line("--embedding").switch("--embeddings")
    assert line("--no-webui", "--webui").switch("--ui")
    assert not line("--webui", "--no-webui").switch("--ui")
    assert not line().switch("--webui")


def test_unknown_words_are_single_options() -> None:
    assert parse_options(("--nonsense", "x", "--port"), NOW) == (
        ParsedOption(None, words=("--nonsense",)),
        ParsedOption(None, words=("x",)),
        ParsedOption(None, words=("--port",)),
    )
    assert line().all("--nonsense") == ()
    assert line().value("--nonsense") is None
    assert not line().switch("--nonsense")


_SPELLINGS = sorted(spelling for option in NOW.options for spelling in option.spellings)


@given(st.lists(st.one_of(st.sampled_from(_SPELLINGS), st.text(max_size=5)), max_size=12))
def test_all_words_stay_in_order(words: list[str]) -> None:
    assert [word for given in parse_options(words, NOW) for word in given.words] == words


def test_variables_come_from_the_help() -> None:
    environ = {"LLAMA_ARG_PORT": "7", "LLAMA_ARG_EMBEDDINGS": "0", "LLAMA_API_KEY": "k", "PORT": "8"}
    options = ParsedOptions(options_in_environ(environ, NOW))
    assert options.value("--port") == "7"
    assert options.value("--api-key") == "k"
    assert not options.switch("--embedding")
    assert len(options.options) == 3


def test_config_file_has_options_and_variables() -> None:
    config = (("port", "1"), ("to", "5"), ("LLAMA_ARG_HOST", "::1"), ("reuse-port", "true"), ("x", "y"))
    options = ParsedOptions(options_in_config(config, NOW))
    assert (options.value("--port"), options.value("--timeout"), options.value("--host")) == ("1", "5", "::1")
    assert options.switch("--reuse-port")
    assert len(options.options) == 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("port = 1\nhost=::1", (("port", "1"), ("host", "::1"))),
        ("# port = 1\n; port = 2\n\nnothing", ()),
        ("[*]\nport = 1\n[default]\nport = 2\n[a-model]\nport = 3", (("port", "1"), ("port", "2"))),
    ],
)
def test_only_default_sections_of_a_config_file_count(text: str, found: tuple[tuple[str, str], ...]) -> None:
    assert read_config(text) == found


def test_config_files_are_found_in_the_output() -> None:
    output = "0.00.001.046 I using config file: /etc/llama.cpp/config.ini\nx\nI using config file: /a b/c.ini"
    assert config_files_in(output) == ("/etc/llama.cpp/config.ini", "/a b/c.ini")
    assert config_files_in("----- common params -----") == ()


NEWEST = sorted(HELP.glob("*.txt"))[-1].read_text("utf-8")
BUILD = Capabilities("unknown", parse_help(NEWEST), ())


@pytest.mark.parametrize(
    ("environ", "with_build", "without_build"),
    [
        ({"LLAMA_ARG_HOST": "0.0.0.0"}, "LLAMA_ARG_HOST (use --host)", "LLAMA_ARG_HOST (use --host)"),
        ({"LLAMA_ARG_MODEL": "m.gguf"}, "LLAMA_ARG_MODEL (use MODEL)", "LLAMA_ARG_MODEL (use MODEL)"),
        (
            {"LLAMA_ARG_CTX_SIZE": "1024", "LLAMA_ARG_N_PARALLEL": "2"},
            "LLAMA_ARG_CTX_SIZE (use --ctx-size), LLAMA_ARG_N_PARALLEL (use --parallel)",
            "LLAMA_ARG_CTX_SIZE (use --ctx-size), LLAMA_ARG_N_PARALLEL (use --parallel)",
        ),
        (
            {"LLAMA_ARG_N_GPU_LAYERS": "99"},
            "LLAMA_ARG_N_GPU_LAYERS (use --gpu-layers)",
            "LLAMA_ARG_N_GPU_LAYERS (use --gpu-layers)",
        ),
        (
            {"LLAMA_ARG_ENDPOINT_METRICS": "1"},
            "LLAMA_ARG_ENDPOINT_METRICS (use -- --metrics)",
            "LLAMA_ARG_ENDPOINT_METRICS (use an option, or `extra` of a model)",
        ),
        (
            {"LLAMA_ARG_NO_SUCH": "1"},
            "LLAMA_ARG_NO_SUCH (use an option, or `extra` of a model)",
            "LLAMA_ARG_NO_SUCH (use an option, or `extra` of a model)",
        ),
        (
            {"LLAMA_API_KEY": "secret"},
            "LLAMA_API_KEY (use --api-key-file)",
            "LLAMA_API_KEY (use --api-key-file)",
        ),
    ],
)
def test_line_names_each_variable_and_its_option(
    environ: Mapping[str, str], with_build: str, without_build: str
) -> None:
    said = "llama-server does not get these variables of the environment: {}."
    assert ignored_variables({"PATH": "/bin", **environ}, BUILD) == said.format(with_build)
    assert ignored_variables({"PATH": "/bin", **environ}) == said.format(without_build)


@pytest.mark.parametrize(
    "environ",
    [{}, {"LLAMASUP_RUNTIME": "embedded"}, {"LLAMA_CACHE": "/models"}, {"LLAMA_ARG_N_CPU_MOE": ""}],
    ids=["none", "llamasup's own", "a folder", "empty, as Docker Compose sets it"],
)
def test_other_and_empty_variables_are_not_named(environ: Mapping[str, str]) -> None:
    assert ignored_variables(environ, BUILD) == ""


def test_no_word_is_an_option_of_llamasup_itself() -> None:
    assert not OWN_OPTIONS.keys() & set(OWN_OPTIONS.values())
