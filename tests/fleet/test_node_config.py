"""The config of a node, read again as a node reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.config.config_keys import Config
from llamasup.core.config.nodes import Entry, Items, Node, Scalar, Table, parse
from llamasup.fleet.node_config import node_config
from tests.kit.configs import read

CONFIG = """\
listen: 0.0.0.0:80
runtime: bin/llama-server
memory: {ram: 80%}
defaults: {ctx_size: 512, mmproj: proj.gguf}
downloads: {token_file: token, parallel: 2, on_demand: true}
http: {remote_media: [cdn.example.net], access_log: access.log}
models_dir: models
models:
  tiny: {path: tiny.gguf, parallel: 2, draft_model: draft.gguf, ttl: 1m, preload: false, aliases: [old]}
  other: {path: other.gguf}
  "t*": {threads: 3}
  "*tale": {threads: 4}
  "x*": {threads: 5}
fleet: {max_replicas: 3}
"""


def tree_of(text: str) -> Table:
    root, issues = parse(text.encode(), "config.yaml", 0)
    assert isinstance(root, Table)
    assert not issues
    return root


def written(
    text: str,
    *,
    model: str = "tiny",
    source: str = "/srv/fleet/tiny.gguf",
    aliases: tuple[str, ...] = ("fairy-tale",),
) -> str:
    return node_config(tree_of(text), folder="/srv/fleet", model=model, source=source, aliases=aliases)


def test_model_of_a_node_that_sleeps_is_unloaded_when_it_is_idle(tmp_path: Path) -> None:
    def ttl_s(sleeps_after_s: float | None) -> float | None:
        table = tree_of("models: {m: {path: m.gguf, ttl: 1m}}")
        text = node_config(
            table, folder="/", model="m", source="/m.gguf", aliases=(), sleeps_after_s=sleeps_after_s
        )
        return config_of(text, tmp_path).models["m"].ttl_s

    for time_s in (90.0, 0.5, 12 * 86400.0, 12 * 86400.0 + 1.0):
        assert ttl_s(time_s) == time_s
    assert ttl_s(None) == float("inf")


def config_of(text: str, folder: Path) -> Config:
    path = folder / "node.yaml"
    path.write_text(text)
    reading, issues = read(path, {})
    assert not issues
    return reading.config


def plain(node: Node) -> object:
    match node:
        case Scalar(_, text, is_plain):
            return text if is_plain else f'"{text}"'
        case Items(_, items):
            return [plain(item) for item in items]
        case Table(_, entries):
            return {entry.key: plain(entry.node) for entry in entries}


def test_node_gets_an_ordinary_config_with_its_model_alone(tmp_path: Path) -> None:
    text = written(CONFIG)
    assert plain(tree_of(text)) == {
        "runtime": "/srv/fleet/bin/llama-server",
        "memory": {"ram": "80%"},
        "defaults": {"ctx_size": "512", "mmproj": "/srv/fleet/proj.gguf"},
        "downloads": {"token_file": "/srv/fleet/token", "parallel": "2"},
        "models": {
            "tiny": {
                "parallel": "2",
                "draft_model": "/srv/fleet/draft.gguf",
                "path": '"/srv/fleet/tiny.gguf"',
                "aliases": ['"fairy-tale"'],
                "preload": "true",
                "ttl": "never",
            },
            "t*": {"threads": "3"},
            "*tale": {"threads": "4"},
        },
        "auth": {"api_key_file": '"keys"'},
        "http": {
            "tls_cert": '"certificate.pem"',
            "tls_key": '"key.pem"',
            "ui": "false",
            "remote_media": ["cdn.example.net"],
        },
        "usage": {"enabled": "false"},
    }
    config = config_of(text, tmp_path)
    assert config.models["tiny"].source == "/srv/fleet/tiny.gguf"
    assert config.auth.api_key_file == tmp_path / "keys"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max_replicas: 3", "max_replicas: 9, min_replicas: 1, idle_after: 1h"),
        ("listen: 0.0.0.0:80", "listen: 0.0.0.0:90"),
        ("  other: {path: other.gguf}", "  new: {repo: org/new}\n  other: {path: else.gguf}"),
        ('"x*": {threads: 5}', '"x*": {threads: 6}'),
        ("access_log: access.log", "access_log: other.log"),
        ("models_dir: models", "auth: {api_key_file: keys}"),
    ],
)
def test_change_that_does_not_concern_a_model_leaves_its_node_as_it_is(before: str, after: str) -> None:
    assert before in CONFIG
    changed = CONFIG.replace(before, after)
    assert written(changed) == written(CONFIG)


def test_change_of_the_model_or_of_all_models_is_in_the_config_of_its_node() -> None:
    for before, after in (("parallel: 2, d", "parallel: 3, d"), ("ctx_size: 512", "ctx_size: 1024")):
        assert written(CONFIG.replace(before, after)) != written(CONFIG)


def test_values_that_yaml_1_1_would_change_stay_as_they_are(tmp_path: Path) -> None:
    text = """\
models:
  on: {path: m.gguf, flash_attn: on, extra: [0x10, "1.10", "-x", ~x, "a: b", 'it''s "it"', "é ${X}"]}
"""
    node = written(text, model="on", source="/m.gguf", aliases=("1.10", "no"))
    before = tree_of(text).entries[0].node
    assert isinstance(before, Table)
    own = plain(before.entries[0].node)
    models = plain(tree_of(node))
    assert isinstance(models, dict)
    assert isinstance(own, dict)
    assert models["models"]["on"]["extra"] == own["extra"]
    assert models["models"]["on"]["flash_attn"] == "on"
    path = tmp_path / "node.yaml"
    path.write_text(node)
    reading, issues = read(path, {"X": "x"})
    assert not issues
    assert reading.config.models["on"].flash_attn == "on"
    assert reading.config.models["on"].aliases == ("1.10", "no")
    assert reading.config.models["on"].extra == (
        *("0x10", "1.10", "-x", "~x", "a: b", 'it\'s "it"'),
        "é x",
    )


@pytest.mark.parametrize(
    ("source", "key"), [("org/repo:Q4_K_M", "repo"), ("https://example.net/m.gguf", "url"), ("demo", "path")]
)
def test_model_without_a_shared_path_keeps_where_it_comes_from(source: str, key: str) -> None:
    node = written("models:\ndefaults: ~\nruntime: auto", model="m", source=source)
    shown = plain(tree_of(node))
    assert isinstance(shown, dict)
    assert shown["models"]["m"][key] == f'"{source}"'
    assert shown["runtime"] == "auto"
    assert shown["defaults"] == {}


def test_paths_of_the_node_and_lists_of_paths_are_kept() -> None:
    text = """\
models:
  m:
    repo: org/m
    mmproj: ~/proj.gguf
    draft_model:
    loras: [a.gguf, /b.gguf, "${HOME}/c.gguf"]
    unknown: x
  one: {loras: auto}
"""
    shown = plain(tree_of(written(text, model="m", source="org/m")))
    assert isinstance(shown, dict)
    entry = shown["models"]["m"]
    assert entry["mmproj"] == "~/proj.gguf"
    assert entry["draft_model"] == ""
    assert entry["loras"] == ["/srv/fleet/a.gguf", "/b.gguf", '"${HOME}/c.gguf"']
    assert entry["unknown"] == "x"
    shown = plain(tree_of(written(text, model="one", source="/m.gguf")))
    assert isinstance(shown, dict)
    assert shown["models"]["one"]["loras"] == "auto"


def test_runtime_may_have_keys_of_its_own() -> None:
    text = "runtime: {path: bin/llama-server, watch: true}\nmodels: {m: {repo: org/m}}"
    shown = plain(tree_of(written(text, model="m", source="org/m")))
    assert isinstance(shown, dict)
    assert shown["runtime"] == {"path": "/srv/fleet/bin/llama-server", "watch": "true"}


def test_every_depth_of_a_config_is_written() -> None:
    table = Table(0, [Entry("models", 0, Table(0, [Entry("tiny", 0, Table(0, []))]))])
    text = node_config(table, folder="/srv", model="tiny", source="/t.gguf", aliases=())
    assert "tiny" in text
