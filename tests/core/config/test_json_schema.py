"""The JSON Schema accepts what the reader accepts, and refuses what it refuses as far as a schema can."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llamasup.core.config.config_keys import json_schema, keys_of
from llamasup.core.settings.declaration import Setting, settings_of
from llamasup.core.settings.kinds import Many, Named, Section
from llamasup.core.settings.model import ModelEntry
from llamasup.features import config_keys
from tests.core.config.reading import issues_of
from tests.kit.paths import ROOT

EXAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


def errors_of(text: str) -> list[Any]:
    validator = jsonschema.Draft202012Validator(json_schema(config_keys()))
    return list(validator.iter_errors(yaml.safe_load(text)))


def test_schema_is_valid_draft_2020_12() -> None:
    schema = json.loads(json.dumps(json_schema(config_keys()), allow_nan=False))

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_configs_match_the_schema(path: Path) -> None:
    assert errors_of(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "{models_dir: m, lissten: x}",
        "{models_dir: m, memory: {swap: 1%}}",
        "{models_dir: m, models: {a: {ctxsize: 1}}}",
        "{models_dir: m, models: {../a: {}}}",
        "{models_dir: m, models: {/a: {}}}",
        "{models_dir: m, models: {a: {aliases: 'a*'}}}",
        "{models_dir: m, models: {a: {aliases: ' b'}}}",
        "{models_dir: m, models: {a: {aliases: ['b ']}}}",
        '{models_dir: m, models: {a: {aliases: "b\\nc"}}}',
        "{models_dir: m, max_loaded: 0}",
        "{models_dir: m, max_loaded: '2'}",
        "{models_dir: m, max_loaded: 1.5}",
        "{models_dir: m, watch: 'yes'}",
        "{models_dir: m, swap_after: 1 minute}",
        "{models_dir: m, swap_after: -1}",
        "{models_dir: m, memory: {ram: 12G}}",
        "{models_dir: m, memory: {ram: 12}}",
        "{models_dir: m, slots: {disk: 50%}}",
        "{models_dir: m, caches: ollama}",
        "{models_dir: m, listen: 127.0.0.1}",
        "{models_dir: m, defaults: {flash_attn: maybe}}",
        "{models_dir: m, defaults: {gpu_layers: -1}}",
        "{models_dir: m, defaults: {extra: --seed}}",
        "{models_dir: m, models: {a: {repo: x}}}",
        "{models_dir: m, models: {a: {url: x}}}",
        "{models_dir: m, runtime: {file: x}}",
        "[models_dir]",
    ],
)
def test_schema_refuses_what_the_reader_refuses(text: str) -> None:
    assert errors_of(text)
    assert issues_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "{models_dir: m, max_loaded: '${N}', watch: '${W}', swap_after: '${T}', memory: {ram: '${R}'}}",
        "{models_dir: m, models: {a: {aliases: ['claude-sonnet[1m]', gpt 4, 模型, /m/x.gguf]}}}",
        "{models_dir: [m, n], listen: [h:80, '[::1]:80', x.sock], caches: huggingface}",
        "{models_dir: m, defaults: {ttl: never, wait_timeout: 1h30m, flash_attn: on, gpu_layers: all}}",
        "{models_dir: m, swap_after: 5, http: {request_timeout: 0, max_body: 1GiB}}",
        "{models_dir: m, http: {trusted_proxies: [127.0.0.1, 10.0.0.0/8, unix]}}",
        "{models_dir: m, defaults: {extra: [--seed, 42]}, memory: {ram: 1.5 GiB, vram: 80%}}",
        "{models_dir: m, models: {'a*': {ttl: 90s}, o/r:Q4: {aliases: x}}, groups: {g: ['b*', c]}}",
        "models_dir: m\nmodels:\nmemory:\ngroups:\n",
        "{models_dir: m, runtime: {path: ./llama-server, watch: true}}",
    ],
)
def test_schema_accepts_what_the_reader_accepts(text: str) -> None:
    assert errors_of(text) == []
    assert issues_of(text, N="2", W="true", T="5s", R="1GiB") == []


def test_every_key_has_a_description() -> None:
    def descriptions(keys: Mapping[str, tuple[str, Setting]]) -> list[str]:
        found = []
        for _, key in keys.values():
            found.append(key.about)
            match key.kind:
                case Section(group) | Named(Section(group)):
                    found += descriptions(settings_of(group))
        return found

    texts = descriptions(keys_of(config_keys()))
    assert all(text.endswith(".") for text in texts)
    schema = json.dumps(json_schema(config_keys()))
    assert all(text in schema for text in texts)


def test_extra_needs_a_list() -> None:
    """``extra: --flag value`` would be a single argument."""
    kind = settings_of(ModelEntry)["extra"][1].kind

    assert isinstance(kind, Many)
    assert not kind.or_one
