"""The keys of a model with a command, their mistakes, and the program that results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.config.inventory import build_inventory
from llamasup.core.http.routes import Work
from llamasup.core.models.access import resolved, unserved_path
from llamasup.core.models.search import Search
from llamasup.features.command.planner import CommandEngine, config_problems
from tests.kit.configs import read_text
from tests.kit.paths import ROOT

GOOD: dict[str, Any] = {"command": ["engine", "--port", "{port}"], "routes": ["/v1/audio/speech"]}


def read(entry: object, name: str = "voice", **top: object) -> Any:
    text = json.dumps({"models": {name: entry}, **top}).encode()
    return read_text(text, "/etc/llamasup/config.yaml", Path("/etc/llamasup"), {})


def engine_of(**keys: object) -> CommandEngine:
    reading, issues = read({**GOOD, **keys})
    assert issues == ()
    engine = reading.config.models["voice"].engine
    assert isinstance(engine, CommandEngine)
    return engine


def test_keys_become_a_program() -> None:
    engine = engine_of(
        command=["./bin/engine", "{port}", '{"a": 1}'],
        health={"path": "/ready", "status": 204},
        memory={"ram": "2GiB", "vram": "1GiB"},
        stop=["docker", "stop", "{name}"],
        environment="HF_HOME",
        warmup={"path": "/v1/audio/speech", "body": {"input": "hi", "n": [1]}},
    )
    assert (engine.program, engine.folder, engine.uses_port) == ("engine", "/etc/llamasup", True)
    assert (engine.health_path, list(engine.healthy)) == ("/ready", [204])
    assert (engine.ram_bytes, engine.vram_bytes) == (2 << 30, 1 << 30)
    assert engine.warm_up is not None
    assert engine.warm_up.body == {"input": "hi", "n": [1]}
    filled = engine.filled(engine.command, {"port": 7})
    assert filled == ("/etc/llamasup/bin/engine", "7", '{"a": 1}')


@pytest.mark.parametrize(
    ("health", "path", "ready", "not_ready"),
    [
        (None, "/", (200, 404), (500, 503)),
        ("/health", "/health", (200, 204), (404, 503)),
        ({"path": "/h", "status": 404}, "/h", (404,), (200, 503)),
    ],
)
def test_health_says_which_answers_mean_ready(
    health: object, path: str, ready: tuple[int, ...], not_ready: tuple[int, ...]
) -> None:
    engine = engine_of() if health is None else engine_of(health=health)
    assert engine.health_path == path
    assert all(status in engine.healthy for status in ready)
    assert not any(status in engine.healthy for status in not_ready)


@pytest.mark.parametrize(
    ("entry", "key", "what"),
    [
        (
            {"command": ["e", "{prot}"]},
            "command[1]",
            "unknown placeholder {prot}; allowed are {port}, {socket}",
        ),
        ({"stop": ["docker", "{id}"]}, "stop[1]", "unknown placeholder {id}"),
        ({"command": ["e"]}, "command", "write one of them"),
        ({"command": ["e", "{port}", "{socket}"]}, "command", "write one of them"),
        ({"command": "e {port}"}, "command", 'write ["e", "{port}"]'),
        ({"routes": []}, "", "routes are missing"),
        ({"routes": ["v1/x"]}, "routes[0]", "expected a path such as /v1/audio/speech"),
        ({"routes": ["/v1/*/x"]}, "routes[0]", "expected a path"),
        ({"routes": ["/x", "/v1/models"]}, "routes[1]", "llamasup answers this path itself"),
        ({"routes": ["/tools"]}, "routes[0]", "keeps it closed"),
        ({"routes": ["/llamasup/x"]}, "routes[0]", "llamasup answers this path itself"),
        ({"routes": ["/health"]}, "routes[0]", "llamasup answers this path itself"),
        ({"warmup": {"body": {}}}, "warmup", "path is missing"),
        ({"health": {"status": 99}}, "health.status", "expected a whole number from 200 to 599"),
        ({"memory": {"ram": "50%"}}, "memory.ram", "expected a size"),
        ({"environment": ["A=1"]}, "environment[0]", "the name of an environment variable"),
        ({"ctx_size": 4096}, "ctx_size", "is a setting of llama-server"),
        ({"continue_streams": True}, "continue_streams", "is a setting of llama-server"),
        ({"path": "/m.gguf"}, "", "path and command exclude each other"),
        ({"websocket": True}, "websocket", "unknown key"),
    ],
)
def test_mistake_is_found_at_its_key(entry: dict[str, object], key: str, what: str) -> None:
    _, issues = read({**GOOD, **entry})
    assert {issue.key for issue in issues} == {f"models.voice.{key}".rstrip(".")}, issues
    assert what in issues[0].what


@pytest.mark.parametrize(
    ("name", "entry", "what"),
    [
        ("voice", {"path": "/m.gguf", "routes": ["/x"]}, "a model with a command needs"),
        ("voice", {"path": "/m.gguf", "command": []}, "exclude each other"),
        ("v*", GOOD, "is a rule for many models, so it cannot have command"),
    ],
)
def test_command_and_its_keys_belong_together(name: str, entry: object, what: str) -> None:
    _, issues = read(entry, name)
    assert any(what in issue.what for issue in issues), issues


def test_examples_of_the_page_are_valid() -> None:
    page = (ROOT / "docs" / "other-engines.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        reading, issues = read_text(example.encode(), "llamasup.yaml", Path("/etc"), {"HOME": "/home/ann"})
        assert issues == ()
        assert any(entry.engine for entry in reading.config.models.values())


def test_settings_that_hold_for_each_program_are_allowed() -> None:
    engine_of(
        ttl="10m", max_concurrent=1, preload=True, replicas=2, nice=5, wait_timeout="1m", aliases=["tts"]
    )


def test_config_with_commands_alone_needs_no_llama_server() -> None:
    assert not read(GOOD)[0].config.needs_runtime
    assert read(GOOD, models_dir="/models")[0].config.needs_runtime
    assert read({"path": "/m.gguf"})[0].config.needs_runtime


def test_model_is_registered_with_its_work_and_without_a_file() -> None:
    config = read({**GOOD, "routes": ["/v1/*", "/sdapi/v1/*"], "aliases": ["tts"]})[0].config
    registry = build_inventory(config, Search()).registry
    spec = registry.specs["voice"]
    assert (spec.source, spec.problem, registry.default, registry.names["tts"]) == ("", "", "voice", "voice")
    model = resolved(spec)
    assert set(model.works) == set(Work)
    refused = unserved_path(model, "/x")
    assert "it serves /v1/* and /sdapi/v1/*" in refused.remedy


@pytest.mark.parametrize(
    ("path", "is_served"),
    [
        ("/v1/audio/speech", True),
        ("/v1/audio/speech/", False),
        ("/v1/audio/Speech", False),
        ("/x/a/b", True),
        ("/x/", True),
        ("/x", False),
        ("/xy", False),
        ("/x/../admin", False),
        ("/x/%2e%2E/admin", False),
        ("/x/%252e%252e/admin", False),
        ("/x/..%2fadmin", False),
        ("/x/a/../b", True),
        ("/x/..\\admin", False),
    ],
)
def test_route_serves_its_path_and_no_spelling_of_another(path: str, is_served: bool) -> None:
    assert engine_of(routes=["/v1/audio/speech", "/x/*"]).answers(path) is is_served


def test_reason_without_a_plan_is_a_sentence() -> None:
    assert str(engine_of().unplanned("voice")) == (
        "'voice' is served by engine, a command of the config: it has no plan and no slots, because llamasup "
        "plans only llama-server."
    )


def test_changed_command_starts_other_processes_and_a_new_alias_does_not() -> None:
    def spec(**keys: object) -> Any:
        config = read({**GOOD, **keys})[0].config
        return build_inventory(config, Search()).registry.specs["voice"]

    assert spec(aliases=["tts"]).keeps_processes_of(spec())
    assert not spec(command=["other", "{port}"]).keeps_processes_of(spec())
    assert not spec(memory={"ram": "1GiB"}).keeps_processes_of(spec())


def test_missing_programs_are_found_before_a_load() -> None:
    config = read({**GOOD, "command": ["no-such-engine", "{port}"], "stop": ["./gone"]})[0].config
    found = [(place, error.message) for place, error in config_problems(config)]
    assert [place for place, _ in found] == [("models", "voice", "command"), ("models", "voice", "stop")]
    assert "'no-such-engine': not found on PATH" in found[0][1]
    assert "/etc/llamasup/gone" in found[1][1]
