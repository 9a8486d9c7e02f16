"""Flags of llama-server become settings of a model, or are left to the plan, or kept."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from llamasup.features.config_import.draft import Draft
from llamasup.features.config_import.server_line import option_words, put_server, server_words
from tests.features.config_import.accounts import NOW, config_from, plain

AT = ("models", "m")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("llama-server -m x", (["llama-server"], ["-m", "x"])),
        ("/opt/llama-server-b9 -m x", (["/opt/llama-server-b9"], ["-m", "x"])),
        ("env A=1 B= ./llama-server", (["A=1", "B=", "./llama-server"], [])),
        ("env -i llama-server", None),
        ("numactl llama-server -m x", None),
        ("ssh llama-server", None),
        ("docker run --entrypoint llama-server image", None),
        ("whisper-server -m x", None),
        ("", None),
    ],
)
def test_commands_that_only_start_llama_server(command: str, found: Any) -> None:
    assert server_words(command.split()) == found


# The flags, the settings, and parts of the comments.
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, ""),
    ("-m x.gguf -a a,b --alias c", {"path": "x.gguf", "aliases": ["a", "b", "c"]}, ""),
    ("-hf org/m:Q4", {"repo": "org/m:Q4"}, ""),
    ("-mu https://h/x.gguf", {"url": "https://h/x.gguf"}, ""),
    ("--mmproj p.gguf -md d.gguf", {"mmproj": "p.gguf", "draft_model": "d.gguf"}, ""),
    ("--no-mmproj", {"mmproj": "none"}, ""),
    ("-dev CUDA0,CUDA1 --rpc 10.0.0.2:1", {"devices": ["CUDA0", "CUDA1"], "rpc": ["10.0.0.2:1"]}, ""),
    ("--lora a.gguf,b.gguf", {"loras": ["a.gguf", "b.gguf"]}, ""),
    ("-c 8192", {"ctx_size": 8192}, ""),
    ("-c 8192 -np 4", {"ctx_size": 2048}, "-np 4"),
    ("-c 8192 -np 4 --kv-unified", {"ctx_size": 8192}, "-np 4 → planned | --kv-unified → planned"),
    ("-c 8192 -np 1", {"ctx_size": 8192}, "-np 1"),
    ("-c 0", {}, "-c 0 → planned"),
    ("-ngl 0", {"gpu_layers": 0}, ""),
    (
        "-ngl 99 -t 8 -fa on -ctk q8_0 -ctv q8_0",
        {},
        "-ngl 99 → planned | -t 8 → | -fa on → | -ctk q8_0 → | -ctv q8_0 →",
    ),
    ("--host :: --port 1 --jinja --metrics", {}, "--host :: → | --port 1 → | --jinja → | --metrics →"),
    ("--no-jinja", {"extra": ["--no-jinja"]}, ""),
    ("--flash-attn --slots", {}, "--flash-attn on → planned | --slots"),
    ("-fa", {}, "-fa on"),
    ("--sleep-idle-seconds 300", {"ttl": "300s"}, ""),
    ("--temp 0.6 --embedding", {"extra": ["--temp", "0.6", "--embedding"]}, ""),
    ("--mlock", {}, "--mlock → left out"),
    ("--draft-max 16", {}, "--draft-max 16 → left out"),
    ("--news 1 -2 x --temp 1", {"extra": ["--temp", "1"]}, "--news 1 -2 x → left out"),
    ("stray", {}, "stray → left out"),
    (
        "--api-key sk-1 --hf-token t --tools all",
        {},
        "--api-key → left out | --hf-token → left out | --tools all → left out",
    ),
    ("--top-k", {}, "--top-k → left out"),
]


@pytest.mark.parametrize(("flags", "settings", "commented"), ROWS, ids=[row[0] for row in ROWS])
def test_each_flag_is_a_setting_or_in_a_comment(flags: str, settings: dict[str, Any], commented: str) -> None:
    draft = Draft()
    draft.put(AT, {})
    put_server(draft, AT, shlex.split(flags), NOW)
    assert draft.config["models"]["m"] == settings
    text = plain(draft.text())
    assert all(part in text for part in commented.split(" | ")), text
    assert "sk-1" not in text
    for word in shlex.split(flags):
        assert word in text or word in ("sk-1", "t")


def test_settings_are_valid() -> None:
    for flags, settings, _ in ROWS:
        if {"path", "repo", "url"} & settings.keys() and "http" not in flags:
            draft = Draft()
            put_server(draft, AT, shlex.split(flags), NOW)
            assert config_from(draft).models["m"].source


def test_invalid_sizes_are_left_to_the_check() -> None:
    draft = Draft()
    put_server(draft, AT, ["-c", "9" * 5000], NOW)
    assert draft.config["models"]["m"] == {"ctx_size": "9" * 5000}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ctx-size", "4096", ["--ctx-size", "4096"]),
        ("c", "4096", ["--ctx-size", "4096"]),
        ("LLAMA_ARG_CTX_SIZE", "4096", ["--ctx-size", "4096"]),
        ("jinja", "true", ["--jinja"]),
        ("jinja", "false", ["--no-jinja"]),
        ("no-jinja", "true", ["--no-jinja"]),
        ("no-jinja", "0", ["--jinja"]),
        ("metrics", "false", []),
        ("metrics", "on", ["--metrics"]),
        ("unknown-key", "x", ["--unknown-key", "x"]),
    ],
)
def test_names_of_presets_become_flags(name: str, value: str, words: list[str]) -> None:
    assert list(option_words(name, value, NOW)) == words
