"""/api/tags, /api/ps and /api/show, made of the list of /v1/models."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamasup.core.gguf.facts import ChatTemplate, FimTokens, ModelClass
from llamasup.core.models.access import ListedModel, ResolvedModel, resolved
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.v1_models import entry_of
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_info import ModelInfo, ProcessInfo
from llamasup.core.supervision.plan_protocol import ChildPlan
from llamasup.core.supervision.states import State
from llamasup.features.ollama.model_lists import (
    Entry,
    features_of,
    read_listed,
    running,
    shown,
    shown_name,
    spellings,
    tags,
)
from llamasup.features.ollama.requests import Features
from tests.core.planning.plans import GIB, bert, model

NOW = datetime(2026, 11, 27, 10, tzinfo=UTC)
CHAT = ModelSpec(
    "chat",
    "/models/chat.gguf",
    identity=(("/models/chat.gguf", 5 * GIB, 1_700_000_000_000_000_000),),
    listed=model(chat_template=ChatTemplate(present=True, tools=True, reasoning=True)),
)
CODER = ModelSpec("coder", "/models/coder.gguf", listed=model(fim=FimTokens(5, 6, 7)))
EMBEDDER = ModelSpec("org/bge:F32", "/models/bge.gguf", listed=bert())
AWAY = ModelSpec("away", "org/away")


def read(entry: dict[str, Any]) -> Entry:
    """An entry of any node."""
    return read_listed(ListedModel(ResolvedModel((entry["id"],)), lambda _: entry))


def of(spec: ModelSpec, **more: Any) -> Entry:
    info = ModelInfo(spec, facts=spec.listed, **more)
    return read_listed(ListedModel(resolved(spec), partial(entry_of, info)))


LOADED = of(
    CHAT,
    phase=Phase.RESIDENT,
    processes=(ProcessInfo(State.READY, plan=cast("ChildPlan", SimpleNamespace(ctx_size=4096))),),
    sees=True,
    needs={"ram": GIB, "CUDA0": 4 * GIB},
    unload_in_s=60,
)
ALL = [LOADED, of(EMBEDDER), of(AWAY)]


def test_all_models_are_listed_with_a_tag() -> None:
    chat, embedder, away = json.loads(tags(ALL))["models"]
    digest = chat.pop("digest")
    assert len(digest) == 64
    assert chat == {
        "name": "chat:latest",
        "model": "chat:latest",
        "modified_at": "2023-11-14T22:13:20Z",
        "size": 5 * GIB,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "8.0B",
            "quantization_level": "Q4_K_M",
        },
    }
    assert embedder["name"] == "org/bge:F32"
    assert away["details"]["families"] == []
    assert away["details"]["parameter_size"] == ""
    assert {embedder["digest"], away["digest"]}.isdisjoint({digest})


def test_size_of_a_small_model_is_in_millions() -> None:
    small = read({"id": "m", "meta": {"n_params": 494_000_000}})
    assert json.loads(tags([small]))["models"][0]["details"]["parameter_size"] == "494.0M"


def test_loaded_models_have_their_memory_and_the_time_of_their_unload() -> None:
    (chat,) = json.loads(running(ALL, NOW))["models"]
    assert (chat["size"], chat["size_vram"]) == (5 * GIB, 4 * GIB)
    assert (chat["context_length"], chat["expires_at"]) == (4096, "2026-11-27T10:01:00Z")


def test_model_that_stays_loaded_expires_in_a_far_year() -> None:
    entry = {"id": "m", "status": {"value": "loaded"}, "llamasup": {"size_bytes": 5, "memory_bytes": 0}}
    (found,) = json.loads(running([read(entry)], NOW))["models"]
    assert (found["expires_at"][:4], found["size"], found["size_vram"]) == ("9999", 5, 0)
    assert "context_length" not in found


@pytest.mark.parametrize("left_s", [1e12, 1e300, 4e9])
def test_time_beyond_the_calendar_is_for_ever(left_s: float) -> None:
    entry = {"id": "m", "status": {"value": "loaded"}, "llamasup": {"unload_in_s": left_s}}
    (found,) = json.loads(running([read(entry)], NOW))["models"]
    assert found["expires_at"][:4] == "9999"


@pytest.mark.parametrize(
    "odd",
    [
        {"meta": None},
        {"meta": {"n_params": 1.5}},
        {"created": 1 << 60},
        {"created": -5},
        {"created": 10**400},
        {"status": 5},
        {"architecture": []},
        {"llamasup": {"size_bytes": 0.5}},
        {"llamasup": {"memory_bytes": 10**30}},
        {"llamasup": {"unload_in_s": "soon"}},
    ],
)
def test_odd_entry_of_another_node_hides_no_model(odd: dict[str, Any]) -> None:
    loaded = {"value": "loaded"}
    entries = [{"id": "odd", "status": loaded, **odd}, {"id": "other", "status": loaded}]
    models = [read(entry) for entry in entries]
    assert [each["name"] for each in json.loads(tags(models))["models"]] == ["odd:latest", "other:latest"]
    assert json.loads(running(models, NOW))["models"][-1]["name"] == "other:latest"
    assert json.loads(shown(models[0]))["details"]["format"] == "gguf"


def test_virtual_model_is_listed_but_holds_no_memory() -> None:
    entry = {"id": "quick", "status": {"value": "loaded"}, "llamasup": {"virtual": {"models": ["m"]}}}
    models = [read(entry)]
    assert len(json.loads(tags(models))["models"]) == 1
    assert json.loads(running(models, NOW)) == {"models": []}


def test_model_is_shown_with_what_it_can_do() -> None:
    chat = json.loads(shown(ALL[0]))
    assert chat["capabilities"] == ["completion", "vision", "tools", "thinking"]
    assert chat["details"]["family"] == chat["model_info"]["general.architecture"] == "llama"
    assert chat["model_info"]["general.parameter_count"] == 8_000_000_000
    assert chat["model_info"]["llama.context_length"] == 8192
    assert chat["parameters"] == "num_ctx 4096"
    assert json.loads(shown(ALL[1]))["capabilities"] == ["embedding"]
    decides = of(ModelSpec("d", "/d.gguf", listed=model(model_class=ModelClass.DECISION, decision="clef")))
    assert json.loads(shown(decides))["capabilities"] == []


def test_model_without_facts_is_shown() -> None:
    away = json.loads(shown(ALL[2]))
    assert away["model_info"] == {
        "general.architecture": "",
        "general.basename": ALL[2].id,
        "general.parameter_count": 0,
    }
    assert (away["parameters"], away["capabilities"]) == ("", ["completion"])


@pytest.mark.parametrize(
    ("entry", "features"),
    [
        (ALL[0], Features(True, True, ())),
        (ALL[2], Features(None, None, None)),
        (of(CODER), Features(False, True, (5, 6, 7))),
        (read({"id": "m", "llamasup": {"insert": [5]}}), Features(None, None, ())),
    ],
)
def test_features_are_those_of_the_file_if_it_is_known(entry: Any, features: Features) -> None:
    assert features_of(entry) == features


def test_id_without_a_tag_is_shown_as_latest() -> None:
    assert shown_name("qwen3-4b") == "qwen3-4b:latest"
    assert shown_name("org/chat:Q4_K_M") == "org/chat:Q4_K_M"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", ("tiny",)),
        ("tiny:latest", ("tiny:latest", "tiny")),
        ("qwen3:4b", ("qwen3:4b", "qwen3-4b")),
        ("../x", ("../x",)),
    ],
)
def test_name_has_spellings_in_order(name: str, expected: tuple[str, ...]) -> None:
    assert spellings(name) == expected
