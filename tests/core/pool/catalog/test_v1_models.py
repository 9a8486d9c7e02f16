"""The JSON of GET /v1/models, with the fields that clients of OpenAI and llama.cpp read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.models.access import resolved
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.v1_models import entry_of
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_info import ModelInfo, ProcessInfo
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.plan_protocol import ChildPlan
from llamasup.core.supervision.states import State
from llamasup.core.system.process.child import Exit
from tests.core.planning.plans import GIB, bert, model

HERE = ModelSpec(
    "org/chat:Q4_K_M",
    str(Path("/models/chat.gguf").absolute()),  # with a drive on Windows
    aliases=("gpt-4o-mini",),
    settings=Settings(ctx_size=4096),
    identity=(("/models/chat.gguf", 5 * GIB, 1_700_000_000_999_999_999), ("/models/mmproj.gguf", 7, 0)),
    listed=model(),
)
AWAY = ModelSpec("bge", "org/bge")
SERVING = (ProcessInfo(State.READY, plan=cast("ChildPlan", SimpleNamespace(ctx_size=2048))),)


def entry(spec: ModelSpec, **more: Any) -> Any:
    info = ModelInfo(spec, facts=spec.listed, problem=more.pop("problem", spec.problem), **more)
    return msgspec.json.decode(msgspec.json.encode(entry_of(info, resolved(spec))))


def test_loaded_model_is_listed_with_all_facts() -> None:
    needs = {"ram": GIB, "CUDA0": 2 * GIB}
    found = entry(
        HERE,
        phase=Phase.RESIDENT,
        state=ShownState.READY,
        processes=SERVING,
        sees=True,
        needs=needs,
        unload_in_s=9.876,
    )
    assert found == {
        "id": "org/chat:Q4_K_M",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "llamasup",
        "aliases": ["gpt-4o-mini"],
        "tags": [],
        "status": {"value": "loaded", "args": []},
        "architecture": {"input_modalities": ["text", "image"], "output_modalities": ["text"]},
        "source": "models_dir",
        "can_remove": False,
        "meta": {
            "n_ctx": 2048,
            "n_ctx_train": 8192,
            "n_embd": 4096,
            "n_params": 8_000_000_000,
            "n_vocab": 128256,
            "size": 5 * GIB,
            "ftype": "Q4_K_M",
        },
        "llamasup": {
            "state": "ready",
            "class": "decoder",
            "context": 2048,
            "size_bytes": 5 * GIB + 7,
            "default": False,
            "problem": None,
            "family": "llama",
            "tools": True,
            "thinking": False,
            "insert": [],
            "memory_bytes": 3 * GIB,
            "gpu_bytes": 2 * GIB,
            "unload_in_s": 9.9,
        },
    }


def test_model_that_is_not_loaded_has_no_memory() -> None:
    found = entry(HERE, phase=Phase.ABSENT, needs={"ram": GIB})["llamasup"]
    assert found.keys().isdisjoint({"memory_bytes", "gpu_bytes", "unload_in_s"})


def test_model_that_stays_loaded_has_no_time_of_its_unload() -> None:
    assert entry(HERE, phase=Phase.RESIDENT)["llamasup"]["unload_in_s"] is None
    assert entry(HERE, phase=Phase.RESIDENT, unload_in_s=-3.0)["llamasup"]["unload_in_s"] == 0


def test_unloaded_model_has_its_configured_context() -> None:
    found = entry(HERE)
    assert "n_ctx" not in found["meta"]
    assert found["llamasup"]["context"] == 4096


def test_model_to_download_is_listed_without_facts() -> None:
    found = entry(AWAY)
    assert found["created"] == 0
    assert found["status"] == {"value": "unloaded", "args": []}
    assert found["source"] == "cache"
    assert "meta" not in found
    assert found["llamasup"] == {
        "state": "stopped",
        "class": None,
        "context": None,
        "size_bytes": None,
        "default": False,
        "problem": None,
    }


def test_size_without_identity_is_that_of_the_header() -> None:
    found = entry(ModelSpec("m", "/m.gguf", listed=bert(file_bytes=123)))
    assert found["llamasup"]["size_bytes"] == 123
    assert found["architecture"]["output_modalities"] == ["embeddings"]


@pytest.mark.parametrize("kind", ["lev", "clef", "unknown"])
def test_decision_model_is_listed_as_llama_cpp_lists_it(kind: str) -> None:
    """Its README: exactly this value, of models that are not loaded, too. A client of cyrup reads it."""
    found = entry(ModelSpec("m", "/m.gguf", listed=bert(ModelClass.DECISION, decision=kind)))
    assert found["architecture"]["output_modalities"] == ["decisions"]
    assert found["llamasup"]["class"] == "decision"


@pytest.mark.parametrize(
    ("phase", "word"),
    [
        (Phase.ABSENT, "unloaded"),
        (Phase.LOADING, "loading"),
        (Phase.RESIDENT, "loaded"),
        (Phase.CORDONED, "loaded"),
        (Phase.UNLOADING, "unloaded"),
        (Phase.FAILED, "unloaded"),
    ],
)
def test_status_values_are_those_of_llama_cpps_router(phase: Phase, word: str) -> None:
    found = entry(HERE, phase=phase)
    assert found["status"] == {"value": word, "args": []}


def test_model_that_cannot_be_loaded_has_its_problem() -> None:
    found = entry(HERE, phase=Phase.FAILED, problem="It does not fit.")
    assert found["status"] == {"value": "unloaded", "args": [], "failed": True, "exit_code": 1}
    crashed = (ProcessInfo(State.FAILED, exit=Exit(7, None)),)
    assert entry(HERE, problem="It crashed.", processes=crashed)["status"]["exit_code"] == 7
    assert found["llamasup"]["problem"] == "It does not fit."
    broken = ModelSpec("m", "/m.gguf", problem="It is truncated.")
    assert entry(broken)["llamasup"]["problem"] == "It is truncated."


def test_problem_is_listed_without_paths() -> None:
    broken = ModelSpec("m", "/srv/m.gguf", problem="/srv/m.gguf: leads to /secret/place")
    for found in (
        entry(broken),
        entry(HERE, phase=Phase.FAILED, problem="/opt/llama: does not run"),
    ):
        assert "cannot be loaded" in found["llamasup"]["problem"]
        assert found["status"]["failed"]
        assert not any(place in json.dumps(found) for place in ("srv", "secret", "opt"))
