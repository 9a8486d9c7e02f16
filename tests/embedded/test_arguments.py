"""The command line and the environment are parsed like in llama-server (b11434)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from llamasup.embedded.arguments import ArgumentError, Request, apply, parse
from llamasup.embedded.option import options_by_section
from llamasup.embedded.program import options_of
from llamasup.embedded.setters import add_items, option_integer, read_into, slots, switch, text

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-c,    --ctx-size N                     size of the prompt context
                                        (env: LLAMA_ARG_CTX_SIZE)


----- example-specific params -----

-np,   --parallel N                     number of server slots
--slots, --no-slots                     slots endpoint
                                        (env: LLAMA_ARG_ENDPOINT_SLOTS)
--metrics                               metrics endpoint
                                        (env: LLAMA_ARG_ENDPOINT_METRICS)
--no-kv-offload                         keep the KV cache in RAM
--api-key KEY                           API key
                                        (env: LLAMA_API_KEY)
--draft-max N                           the argument has been removed. use
                                        --other
                                        (env: LLAMA_ARG_DRAFT_MAX)
"""
SETTERS = {
    "--model": text("path"),
    "--ctx-size": option_integer("n_ctx"),
    "--parallel": read_into("n_parallel", read=slots),
    "--slots": switch("slots"),
    "--metrics": switch("metrics"),
    "--no-kv-offload": switch("kv_offload", sets=False),
    "--api-key": add_items("api_keys"),
}
OPTIONS = options_of(options_by_section(HELP, SETTERS))


def fresh() -> SimpleNamespace:
    return SimpleNamespace(
        path="", n_ctx=0, n_parallel=1, slots=True, metrics=False, kv_offload=True, api_keys=[]
    )


def read(*arguments: str, **environ: str) -> SimpleNamespace:
    params = fresh()
    apply(params, parse(OPTIONS, arguments, environ).assignments)
    return params


def rejection(*arguments: str, **environ: str) -> str:
    with pytest.raises(ArgumentError) as caught:
        read(*arguments, **environ)
    return str(caught.value)


def test_every_spelling_of_an_option_means_the_same() -> None:
    assert (
        read("-c", "512").n_ctx == read("--ctx-size", "512").n_ctx == read("--ctx_size", "512").n_ctx == 512
    )


def test_of_repeated_options_the_last_wins() -> None:
    assert read("-c", "512", "--ctx-size", "1024").n_ctx == 1024


def test_repeated_keys_add_up_as_they_do_in_llama_server() -> None:
    assert read("--api-key", "a", "--api-key", "b, c").api_keys == ["a", "b", "c"]


def test_a_negation_switches_off_what_its_option_switches_on() -> None:
    assert read("--no-slots").slots is False
    assert read("--no-slots", "--slots").slots is True


def test_a_switch_that_is_called_no_something_is_not_a_negation() -> None:
    assert read("--no-kv-offload").kv_offload is False


def test_argument_after_an_option_is_its_value() -> None:
    assert read("--model", "--slots").path == "--slots"


@pytest.mark.parametrize("word", ["--nope", "model.gguf", "--ctx-size=512", "--no-metrics", ""])
def test_unknown_argument_is_rejected_with_llama_servers_message(word: str) -> None:
    assert rejection(word) == f"error: invalid argument: {word}\n"


def test_missing_value_is_rejected_with_the_options_usage() -> None:
    assert rejection("--ctx-size") == (
        'error while handling argument "--ctx-size": expected value for argument\n'
        "\n"
        "usage:\n"
        "-c,    --ctx-size N                     size of the prompt context\n"
        "                                        (env: LLAMA_ARG_CTX_SIZE)\n"
        "\n"
        "\n"
        "to show complete usage, run with -h\n"
    )


def test_invalid_value_is_rejected_with_spelling_and_value() -> None:
    message = rejection("-c", "many")
    assert message.startswith("error while handling argument \"-c\": not a whole number: 'many'\n")


def test_no_slots_at_all_are_refused() -> None:
    assert "invalid value for n_parallel: 0" in rejection("--parallel", "0")


def test_a_removed_option_is_fatal_on_the_command_line_and_in_the_environment() -> None:
    assert rejection("--draft-max", "3").startswith(
        'error while handling argument "--draft-max": the argument has been removed. use --other\n'
    )
    assert rejection(LLAMA_ARG_DRAFT_MAX="3") == (
        'error while handling environment variable "LLAMA_ARG_DRAFT_MAX": '
        "the argument has been removed. use --other\n\n"
    )


def test_environment_counts_without_a_command_line_value() -> None:
    params = read(LLAMA_ARG_CTX_SIZE="256", LLAMA_API_KEY="secret")
    assert (params.n_ctx, params.api_keys) == (256, ["secret"])


def test_command_line_overrides_environment_with_a_warning() -> None:
    request = parse(OPTIONS, ["-c", "512"], {"LLAMA_ARG_CTX_SIZE": "256"})
    params = fresh()
    apply(params, request.assignments)
    assert params.n_ctx == 512
    assert request.warnings == (
        "warn: LLAMA_ARG_CTX_SIZE environment variable is set, "
        "but will be overwritten by command line argument -c\n",
    )


def test_invalid_value_in_environment_names_the_variable() -> None:
    assert rejection(LLAMA_ARG_CTX_SIZE="abc") == (
        "error while handling environment variable \"LLAMA_ARG_CTX_SIZE\": not a whole number: 'abc'\n\n"
    )


@pytest.mark.parametrize(
    ("word", "slots"), [("1", True), ("on", True), ("false", False), ("disabled", False)]
)
def test_a_switch_with_a_negation_takes_yes_and_no_from_the_environment(word: str, slots: bool) -> None:
    assert read("--no-slots").slots is False
    assert read(LLAMA_ARG_ENDPOINT_SLOTS=word).slots is slots


def test_a_switch_with_a_negation_refuses_other_words_in_the_environment() -> None:
    assert "invalid boolean value: 'maybe'" in rejection(LLAMA_ARG_ENDPOINT_SLOTS="maybe")


def test_the_negated_variable_switches_off_with_any_value() -> None:
    assert read(LLAMA_ARG_NO_ENDPOINT_SLOTS="").slots is False


@pytest.mark.parametrize(("word", "metrics"), [("true", True), ("maybe", False), ("", False), ("0", False)])
def test_a_switch_without_negation_is_set_by_yes_and_by_nothing_else(word: str, metrics: bool) -> None:
    assert read(LLAMA_ARG_ENDPOINT_METRICS=word).metrics is metrics


def test_option_without_a_variable_is_read_with_the_environment_of_a_process() -> None:
    """os.environ refuses names that are no text, unlike a dictionary."""
    (given,) = parse(OPTIONS, ["--parallel", "2"], os.environ).assignments
    assert given.value == "2"


def test_version_is_answered_at_once_and_help_after_parsing() -> None:
    assert parse(OPTIONS, ["--version", "--nope"], {}) == Request(asks="version")
    assert parse(OPTIONS, ["--help", "-c", "512"], {}) == Request(asks="help")
    with pytest.raises(ArgumentError, match="invalid argument: --nope"):
        parse(OPTIONS, ["--help", "--nope"], {})
