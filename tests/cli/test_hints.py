"""Suggestions in place of the words of other programs."""

from __future__ import annotations

import pytest

from llamasup.cli.app import COMMANDS
from llamasup.cli.hints import command_hint, option_hint, surplus_hint, typed
from tests.e2e.driver import run_to_end

NAMES = [lazy.name for section in COMMANDS.values() for lazy in section]
OPTIONS = ["--ctx-size", "--gpu-layers", "--threads", "--flash-attn", "--parallel", "--port", "--kv-type"]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("rnu", "Did you mean llamasup run?"),
        ("ls", "Did you mean llamasup list?"),
        ("Show", "Did you mean llamasup inspect?"),
        ("start", "Did you mean llamasup run?"),
        ("download", "Did you mean llamasup pull?"),
        ("m.gguf", "Did you mean llamasup run m.gguf?"),
        ("my models/m.GGUF", "Did you mean llamasup run 'my models/m.GGUF'?"),
        ("org/repo:Q4_K_M", "Did you mean llamasup run org/repo:Q4_K_M?"),
        ("llama3.2:3b", "Did you mean llamasup run llama3.2:3b?"),
        ("demo", "Did you mean llamasup run demo?"),
        ("xyzzy", ""),
    ],
)
def test_unknown_command_has_a_hint(word: str, hint: str) -> None:
    assert command_hint(word, NAMES) == hint


@pytest.mark.parametrize(
    ("group", "word", "hint"),
    [
        ("key", "add", "Did you mean llamasup key new?"),
        ("key", "rm", "Did you mean llamasup key revoke?"),
        ("key", "lst", "Did you mean llamasup key list?"),
        ("key", "m.gguf", ""),
    ],
)
def test_unknown_subcommand_has_a_hint(group: str, word: str, hint: str) -> None:
    assert command_hint(word, ["new", "list", "revoke"], group) == hint


@pytest.mark.parametrize(
    ("words", "option", "command", "hint"),
    [
        (["m", "-c4096"], "-c", "run", "Did you mean --ctx-size?"),
        (["m", "-ngl99"], "-n", "run", "Did you mean --gpu-layers?"),
        (["m", "-c", "4096"], "-c", "run", "Did you mean --ctx-size?"),
        (["m", "-ngl", "99"], "-n", "run", "Did you mean --gpu-layers?"),
        (["m", "-t", "4"], "-t", "run", "Did you mean --threads?"),
        (["m", "--ctx", "4096"], "--ctx", "run", "Did you mean --ctx-size?"),
        (["m", "--ctx_size=4096"], "--ctx_size", "run", "Did you mean --ctx-size?"),
        (["m", "--n_ctx", "4096"], "--n_ctx", "run", "Did you mean --ctx-size?"),
        (["m", "--max-model-len", "4096"], "--max-model-len", "run", "Did you mean --ctx-size?"),
        (["m", "--flsh-attn"], "--flsh-attn", "run", "Did you mean --flash-attn?"),
        (["-m", "a b.gguf"], "-m", "run", "The model has no option: llamasup run 'a b.gguf'."),
        (["--model=x.gguf"], "--model", "plan", "The model has no option: llamasup plan x.gguf."),
        (["-m", "x.gguf"], "-m", "serve", "The model has no option: llamasup run x.gguf."),
        (["-m"], "-m", "", "The model has no option: llamasup run MODEL."),
        (["--allow-host", "x"], "--allow-host", "serve", "In the config of serve, it is http.allow_hosts."),
        (
            ["--trusted-proxy=x"],
            "--trusted-proxy",
            "serve",
            "In the config of serve, it is http.trusted_proxies.",
        ),
        (["--access-log", "-"], "--access-log", "serve", "In the config of serve, it is http.access_log."),
        (["--", "x"], "--", "serve", ""),
        (
            ["http://x/m.gguf", "--allow-http"],
            "--allow-http",
            "run",
            "Download the model first: llamasup pull --allow-http URL.",
        ),
        (["--port", "1"], "--port", "", "Options follow the command: llamasup run MODEL --port 8080."),
        (
            ["m", "--top-k", "3"],
            "--top-k",
            "run",
            "For an option of llama-server: llamasup run MODEL -- --top-k …",
        ),
        (
            ["m", "--n_predict", "3"],
            "--n_predict",
            "run",
            "For an option of llama-server: llamasup run MODEL -- --n-predict …",
        ),
        (
            ["m", "-n", "3"],
            "-n",
            "run",
            "For this option of llama-server: llamasup run MODEL -- --n-predict …",
        ),
        (["-m"], "-m", "ps", ""),
    ],
)
def test_unknown_option_has_a_hint(words: list[str], option: str, command: str, hint: str) -> None:
    options = OPTIONS if command else ["--help"]
    assert option_hint(option, words, command, options, passes_on=command in ("run", "plan")) == hint


def test_option_that_is_not_among_the_words_is_shown_as_the_parser_reports_it() -> None:
    assert typed("--x", ["--y"]) == ("--x", "")


@pytest.mark.parametrize(
    ("word", "command", "hint"),
    [
        ("qwen", "stop", "This command stops llamasup itself. To unload one model: llamasup unload qwen."),
        ("~/m", "serve", "For the models of a folder: llamasup serve --models-dir '~/m'."),
        ("m.gguf", "serve", "To serve one model: llamasup run m.gguf."),
        ("x", "ps", ""),
    ],
)
def test_surplus_argument_has_a_hint(word: str, command: str, hint: str) -> None:
    assert surplus_hint(word, command) == hint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "m.gguf", "-ngl", "99"], "Error: No such option: -ngl. Did you mean --gpu-layers?"),
        (["key", "delete", "x"], "Error: No such command 'delete'. Did you mean llamasup key revoke?"),
        (["m.gguf"], "Error: No such command 'm.gguf'. Did you mean llamasup run m.gguf?"),
        (["-m", "m.gguf"], "Error: No such option: -m. The model has no option: llamasup run m.gguf."),
        (["stop", "a", "b"], "Error: Unexpected argument: a b. This command stops llamasup itself."),
        (
            ["serve", "/my models"],
            "For the models of a folder: llamasup serve --models-dir '/my models'.",
        ),
        (["serve", "a b", "c"], "For the models of a folder: llamasup serve --models-dir 'a b'."),
        (["ps", "--bogus"], "Error: No such option: --bogus.\n"),
    ],
)
def test_hint_is_printed_with_exit_code_2(arguments: list[str], said: str) -> None:
    done = run_to_end(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
