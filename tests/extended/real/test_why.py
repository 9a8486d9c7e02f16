"""The reasons that llamasup gives for the states of real models."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import llamasup
from llamasup.core.config.config_keys import Config, Memory
from llamasup.core.settings.model import ModelEntry
from llamasup.core.settings.units import Size
from tests.e2e.driver import Llamasup, run_to_end, wrapped
from tests.e2e.driver import llamasup as running
from tests.kit.patience import eventually
from tests.kit.tiny import tiny_decoder
from tests.real.clients import environment

SMALL = {"ctx_size": 512, "parallel": 1}


def config_of(folder: Path, ram_bytes: int, **models: Mapping[str, Any]) -> Config:
    """Each model has its own file."""
    entries = {}
    for name, options in models.items():
        path = folder / f"{name}.gguf"
        path.write_bytes(tiny_decoder())
        entries[name] = ModelEntry(path=str(path), **options)
    return Config(models=entries, memory=Memory(ram=Size(bytes=ram_bytes)), swap_after_s=0.2)


def completion(server: llamasup.Server, model: str) -> int:
    body = {"model": model, "prompt": "Once", "max_tokens": 4}
    return server.client.post("/v1/completions", json=body).status_code


@pytest.fixture(scope="module")
def needs_bytes(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The memory that one small model needs, measured."""
    config = config_of(tmp_path_factory.mktemp("why"), 1 << 40, a=SMALL)
    with llamasup.serve(config=config, runtime=runtime) as server:
        server.load("a")
        (model,) = server.status()["models"]
    needs = model["needs_bytes"]["ram"]
    assert isinstance(needs, int)
    return needs


def test_reasons_of_a_load_and_of_the_eviction_for_it(runtime: str, needs_bytes: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, needs_bytes * 3 // 2, a=SMALL, b=SMALL)
    with llamasup.serve(config=config, runtime=runtime) as server:
        before = server.why("b")
        assert before["sentences"] == ["b is not loaded: nothing has asked for it."]
        assert [completion(server, name) for name in "ab"] == [200, 200]
        evicted, loaded = server.why("a"), server.why("b")

    assert (evicted["state"], loaded["state"]) == ("stopped", "ready")
    assert evicted["sentences"][1].startswith("a was evicted ")
    assert " because b needs " in evicted["sentences"][1]
    assert " of ram, of which " in evicted["sentences"][1]
    assert any("pin it" in change for change in evicted["change"])
    assert loaded["sentences"][0].endswith(" because a request asked for it.")
    assert [each["kind"] for each in evicted["decisions"]] == ["evict", "load"]


def test_reasons_of_a_smaller_plan_and_of_a_refusal(runtime: str, needs_bytes: int, tmp_path: Path) -> None:
    """``a`` does not get the four slots of the profile; ``b`` has no room next to ``a``, which is pinned."""
    config = config_of(tmp_path, needs_bytes * 3 // 2, a={"pin": True}, b=SMALL)
    with llamasup.serve(config=config, runtime=runtime) as server:
        server.load("a")
        smaller = server.why("a")
        with pytest.raises(llamasup.DoesNotFit):
            server.load("b")
        refused = server.why("b")
        (status, _) = server.status()["models"]

    slots = f"{status['slots']} slot{'s' if status['slots'] > 1 else ''} instead of 4"
    (sentence,) = [each for each in smaller["sentences"] if each.startswith("It has ")]
    assert slots in sentence
    assert "because the larger plan does not fit in memory" in sentence
    assert any("memory in the config" in change for change in smaller["change"])
    assert refused["state"] == "failed"
    assert "of which pinned models hold" in refused["sentences"][0]
    assert any("pin fewer models" in change for change in refused["change"])


def asked(llamasup_process: Llamasup, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    done = run_to_end("why", *arguments, "--json", "--pid", str(llamasup_process.pid), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kill_server_of(llamasup_process: Llamasup, model: str, env: Mapping[str, str] | None = None) -> None:
    """Kill the llama-server with SIGKILL, and wait until its successor serves."""

    def shown() -> Mapping[str, Any]:
        status = run_to_end("ps", "--json", "--pid", str(llamasup_process.pid), env=env).stdout
        return next(each for each in json.loads(status)["models"] if each["id"] == model)

    def is_ready(generation: int) -> bool:
        now = shown()  # once: the state and the generation of one moment
        return (now["state"], now["generation"]) == ("ready", generation)

    eventually(lambda: is_ready(1))
    os.kill(shown()["pid"], signal.SIGKILL)
    eventually(lambda: is_ready(2))


def test_restart_after_a_kill_is_explained_under_run(runtime: str, tiny_model: Path) -> None:
    with running(tiny_model, "--runtime", runtime) as it:
        it.wait_for("ready")
        assert asked(it)["sentences"][0].endswith(" because llamasup was started for it.")
        kill_server_of(it, "tiny")
        restarted = asked(it, "tiny")
        assert "(SIGKILL)" in restarted["sentences"][1]
        assert "out-of-memory killer" in restarted["change"][0]
        assert [each["kind"] for each in restarted["decisions"]] == ["restart", "load"]
        unknown = run_to_end("why", "tinny", "--pid", str(it.pid))
        assert (unknown.returncode, "The nearest is 'tiny'" in unknown.stderr) == (66, True)
        assert it.stop() == 0


def test_restart_after_a_kill_is_explained_under_wrap(runtime: str, tiny_model: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "llamasup.embedded"] if runtime == "embedded" else [runtime]
    env = environment(None if runtime == "embedded" else runtime, tmp_path)
    with wrapped(*program, "-m", str(tiny_model), "--port", "0", env=env) as it:
        it.wait_for("ready")
        kill_server_of(it, asked(it, env=env)["model"], env)
        assert "(SIGKILL)" in asked(it, env=env)["sentences"][1]
        assert it.stop() == 0
