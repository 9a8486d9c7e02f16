"""Variables that users set for llama-server, and the words of other programs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llamasup.core.llama_server.foreign_words import OWN_OPTIONS, ignored_variables
from llamasup.core.llama_server.help_text import Capabilities, parse_help
from tests.kit.paths import FIXTURES

HELP = sorted((FIXTURES / "help").glob("*.txt"))[-1].read_text("utf-8")
BUILD = Capabilities("unknown", parse_help(HELP), ())


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
