"""Parsing a wrapped command line and building the child's, with the real help of builds from 2024 to 2026."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import TcpAddress, UnixAddress
from llamasup.core.llama_server.help_text import Capabilities, parse_help
from llamasup.errors import UsageInvalid
from llamasup.features.wrap.command_line import (
    Tls,
    WrappedLine,
    child_argv,
    child_environ,
    parse_line,
    program_of,
    query_environ,
    read_key_file,
    redacted_program,
)
from tests.kit.paths import FIXTURES

HELP = FIXTURES / "help"
BUILDS = {path.stem: Capabilities(path.stem, parse_help(path.read_text()), ()) for path in HELP.glob("*.txt")}
NOW = BUILDS["b11434"]
SOCKET = UnixAddress("/run/x/1.sock")


def read(
    *words: str, environ: Mapping[str, str] | None = None, config: Sequence[tuple[str, str]] = (), **more: Any
) -> WrappedLine:
    build = more.get("build", NOW)
    return parse_line(("llama-server", *words), ("llama-server",), build, environ or {}, config)


# --- the program -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("llama-server -m x", "llama-server"),
        ("/opt/llama.cpp/bin/llama-server -m x", "/opt/llama.cpp/bin/llama-server"),
        ("./llama-server-cuda", "./llama-server-cuda"),
        (r"C:\llama\llama-server.exe -m x", r"C:\llama\llama-server.exe"),
        ("env X=1 llama-server -m x", "env X=1 llama-server"),
        ("taskset -c 0-3 numactl -N 0 -- llama-server -m x", "taskset -c 0-3 numactl -N 0 -- llama-server"),
        ("python -m llamasup.embedded -m x", "python -m llamasup.embedded"),
        ("./serve.sh -m x", "./serve.sh"),
        ("./serve.sh --alias llamasup.embedded", "./serve.sh"),
    ],
)
def test_program_ends_before_the_options_of_llama_server(command: str, program: str) -> None:
    assert program_of(command.split()) == tuple(program.split())


# --- the address -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS)
def test_address_defaults_to_that_of_the_build(build: str) -> None:
    line = read("-m", "m.gguf", build=BUILDS[build])
    assert (line.hosts, line.port, line.tls, line.reuse_port) == (("127.0.0.1",), 8080, None, False)


def test_default_port_comes_from_the_help() -> None:
    text = (HELP / "b11434.txt").read_text().replace("(default: 8080)", "(default: 9931)")
    assert read(build=Capabilities("later", parse_help(text), ())).port == 9931


@pytest.mark.parametrize(
    ("words", "environ", "config", "hosts", "port"),
    [
        (["--port", "1", "--host", "::1", "--port", "2"], {}, [], ("::1",), 2),
        (["--host", "127.0.0.1, ::1,/run/a.sock,::1"], {}, [], ("127.0.0.1", "::1", "/run/a.sock"), 8080),
        ([], {"LLAMA_ARG_HOST": "0.0.0.0", "LLAMA_ARG_PORT": "3"}, [], ("0.0.0.0",), 3),
        (["--port", "4"], {"LLAMA_ARG_PORT": "3"}, [("port", "2")], ("127.0.0.1",), 4),
        ([], {}, [("port", "2"), ("host", "::1")], ("::1",), 2),
        ([], {"LLAMA_ARG_PORT": "3"}, [("port", "2")], ("127.0.0.1",), 3),
        (["--port", "0"], {}, [], ("127.0.0.1",), 0),
        # Options that name a model set a port. The last option counts.
        (["--fim-qwen-7b-default"], {"LLAMA_ARG_PORT": "3"}, [], ("127.0.0.1",), 8012),
        (["--port", "5", "--embd-gemma-default"], {}, [], ("127.0.0.1",), 8011),
        (["--gpt-oss-20b-default", "--port", "5"], {}, [], ("127.0.0.1",), 5),
    ],
)
def test_last_source_decides_the_address(
    words: list[str],
    environ: dict[str, str],
    config: list[tuple[str, str]],
    hosts: tuple[str, ...],
    port: int,
) -> None:
    line = read(*words, environ=environ, config=config)
    assert (line.hosts, line.port) == (hosts, port)


@pytest.mark.parametrize(
    "words", [("--port", "http"), ("--port", "65536"), ("--port", "-1"), ("--host", ""), ("--host", " ,")]
)
def test_invalid_address_is_a_usage_error(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageInvalid, match=words[0]):
        read(*words)


def test_tls_key_and_certificate_may_come_from_different_sources() -> None:
    line = read("--ssl-key-file", "k", environ={"LLAMA_ARG_SSL_CERT_FILE": "c"})
    assert (line.tls, line.override_tls) == (Tls("k", "c"), False)
    assert read("--ssl-key-file", "k").tls is None
    line = read(config=[("ssl-key-file", "k"), ("ssl-cert-file", "c")])
    assert (line.tls, line.override_tls) == (Tls("k", "c"), True)
    assert child_argv(line, SOCKET)[-4:] == ("--ssl-key-file", "", "--ssl-cert-file", "")


def test_assignments_before_the_program_override_the_environment() -> None:
    program = (
        "env",
        "-i",
        "LLAMA_ARG_PORT=3",
        "LLAMA_API_KEY=s3cret",
        "LLAMA_ARG_SSL_KEY_FILE=k",
        "LLAMA_ARG_SSL_CERT_FILE=c",
        "llama-server",
    )
    line = parse_line((*program, "-m", "m.gguf"), program, NOW, {"LLAMA_ARG_PORT": "2"})
    assert (line.port, line.api_keys, line.tls) == (3, ("s3cret",), Tls("k", "c"))
    assert child_argv(line, SOCKET)[-6:-2] == ("--ssl-key-file", "", "--ssl-cert-file", "")
    assert redacted_program(program).startswith("env -i 'LLAMA_ARG_PORT=***' 'LLAMA_API_KEY=***' ")
    assert "s3cret" not in redacted_program(program)
    # A file name with "=" is no assignment.
    assert parse_line(("./a=b", "--port", "4"), ("./a=b",), NOW, {}).port == 4


# --- options that stay with the child --------------------------------------------------------------


def test_keys_of_all_sources_add_up_in_order() -> None:
    line = read(
        "--api-key", "a,b", "--api-key", "c,", environ={"LLAMA_API_KEY": "e"}, config=[("api-key", "f")]
    )
    assert line.api_keys == ("f", "e", "a", "b", "c")
    line = read("--api-key-file", "/k", environ={"LLAMA_ARG_API_KEY_FILE": "/e"})
    assert line.api_key_files == ("/e", "/k")
    assert read_key_file("#c\nk1\n\n k2 \nk3\r\n") == ("k1", " k2 ", "k3\r")


@pytest.mark.parametrize(
    ("prefix", "plain"),
    [("", True), ("/x", True), ("/llm/v2~a-b_c", True), ("/a.b", False), ("/(a|b)", False), ("/a+", False),
     ("a", False), ("/a/", False), ("/", False), ("/a\n", False), ("/\u00e4", False)],
)  # fmt: skip
def test_plain_prefix_has_no_regex_characters(prefix: str, *, plain: bool) -> None:
    assert read("--api-prefix", prefix).has_plain_prefix is plain


def test_prefix_and_timeout_are_parsed() -> None:
    line = read("--api-prefix", "/x", "-to", "7")
    assert (line.api_prefix, line.timeout_s) == ("/x", 7.0)
    assert (read().api_prefix, read().timeout_s) == ("", None)
    assert read("--timeout", "soon").timeout_s is None  # the child reports the error


@pytest.mark.parametrize(
    ("words", "model", "name"),
    [
        (("-m", "/models/a-00001-of-00003.gguf"), "/models/a-00001-of-00003.gguf", "a"),
        (("-m", "a.gguf", "--alias", " x , y"), "a.gguf", "x"),
        (("-hf", "org/repo:Q4_K_M"), None, "repo"),
        (("-m", "a.gguf", "-hf", "org/repo"), None, "repo"),
        (("--gpt-oss-20b-default", "-m", "a.gguf"), None, "llama-server"),
        (("--models-dir", "x"), None, "llama-server"),
        (("--alias", ","), None, "llama-server"),
    ],
)
def test_model_and_name_come_from_the_command_line(
    words: tuple[str, ...], model: str | None, name: str
) -> None:
    line = read(*words)
    assert (line.model, line.name) == (model, name)


@pytest.mark.parametrize(
    ("words", "serves"),
    [
        ((), None),
        (("--embedding",), ModelClass.ENCODER),
        (("--embeddings", "--pooling", "rank"), ModelClass.RERANKER),
        (("--reranking",), ModelClass.RERANKER),
    ],
)
def test_model_class_comes_from_the_flags(words: tuple[str, ...], serves: ModelClass | None) -> None:
    assert read(*words).serves is serves


@pytest.mark.parametrize("word", ["-h", "--help", "--usage", "--version", "--list-devices", "-cl"])
def test_options_that_print_and_exit_are_recognized(word: str) -> None:
    assert read("-m", "m.gguf", word).prints_and_exits
    assert not read("--alias", word).prints_and_exits


# --- the child -------------------------------------------------------------------------------------


def test_private_address_replaces_the_public_one_in_place() -> None:
    line = read("-m", "m.gguf", "--host", "::", "-c", "512", "--port", "1", "--nonsense", "--host")
    assert child_argv(line, SOCKET) == (
        *("llama-server", "-m", "m.gguf", "--host", SOCKET.path, "-c", "512", "--nonsense", "--host"),
    )


def test_private_address_follows_the_program_if_there_was_none() -> None:
    """A value that is missing at the end must stay missing."""
    argv = child_argv(read("-c", "512", "-m"), TcpAddress("127.0.0.1", 9), api_key_file="/k")
    own = ("--host", "127.0.0.1", "--port", "9", "--api-key-file", "/k")
    assert argv == ("llama-server", *own, "-c", "512", "-m")


_OTHERS = [
    ["-m", "m.gguf"],
    ["--ctx-size", "4096"],
    ["-fa", "on"],
    ["--api-key", "k"],
    ["--api-prefix", "/x"],
    ["-to", "5"],
    ["--no-webui"],
    ["--slot-save-path", "s/"],
    ["--alias", "--host"],
    ["--nonsense"],
]
_TAKEN = [
    ["--host", "::1"],
    ["--port", "1"],
    ["--reuse-port"],
    ["--ssl-key-file", "k"],
    ["--ssl_cert_file", "c"],
]


@given(st.lists(st.sampled_from([*_OTHERS, *_TAKEN]), max_size=12))
def test_only_the_address_changes_and_the_order_stays(options: list[list[str]]) -> None:
    line = read(*(word for option in options for word in option))
    others = [word for option in options if option in _OTHERS for word in option]
    argv = list(child_argv(line, SOCKET))
    index = argv.index(SOCKET.path)
    assert argv[:1] + argv[1 : index - 1] + argv[index + 1 :] == ["llama-server", *others]
    before = next((n for n, option in enumerate(options) if option in _TAKEN), 0)
    assert argv[1 : index - 1] == [word for option in options[:before] for word in option]


def test_child_environment_lacks_address_and_llamasup_variables() -> None:
    environ = {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "LLAMA_ARG_HOST": "::",
        "LLAMA_ARG_PORT": "1",
        "LLAMA_ARG_SSL_KEY_FILE": "k",
        "LLAMA_ARG_CTX_SIZE": "512",
        "LLAMA_API_KEY": "k",
        "NOTIFY_SOCKET": "/run/notify",
        "GGML_NO_BACKTRACE": "0",
    }
    line = read(environ=environ)
    child_args = {name: environ[name] for name in ("PATH", "HF_TOKEN", "LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY")}
    assert child_environ(line, environ) == {**child_args, "GGML_NO_BACKTRACE": "0"}
    assert child_environ(line, {}, api_key="own") == {"GGML_NO_BACKTRACE": "1", "LLAMA_API_KEY": "own"}


def test_query_environment_lacks_variables_that_break_help() -> None:
    environ = {"LLAMA_ARG_DRAFT_MAX": "8", "PATH": "/bin"}
    assert query_environ(environ) == {"PATH": "/bin"}
    assert query_environ(environ, config_home="/e") == {"PATH": "/bin", "XDG_CONFIG_HOME": "/e"}
