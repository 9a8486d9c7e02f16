"""The list of models for another node."""

from __future__ import annotations

import msgspec
import pytest

from llamasup.core.http.routes import Work
from llamasup.core.pool.catalog.v1_models import (
    MAX_ALIASES,
    MAX_MODEL_BYTES,
    MAX_MODELS,
    NodeModel,
    read_in_slices,
    read_listing,
)
from tests.kit.backends import node_answer


def test_listing_is_read_as_it_was_written() -> None:
    model = NodeModel("a", ("b",), "ready", (Work.TEXT,), 4, 1, 2, 4096, entry={"id": "a"})
    found = read_listing(node_answer("n1", [model]))
    assert (found.node, found.models) == ("n1", (model,))
    assert found.version


def test_fields_of_a_later_version_are_ignored() -> None:
    content = msgspec.json.encode({"node": "n1", "new": 1, "models": [{"id": "a", "newer": 2}]})
    assert read_listing(content).models == (NodeModel("a"),)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"object":"list","data":[]}', b'{"node":"n","models":[{}]}']
)
def test_answer_of_another_program_is_no_listing(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_listing(content)


def test_invalid_and_double_names_are_left_out() -> None:
    models = [NodeModel("a", ("x\n", "x*", "y")), NodeModel("a", state="ready"), NodeModel("../b")]
    assert read_listing(node_answer("n1", models)).models == (NodeModel("a", ("y",)),)


@pytest.mark.check("X8", "1000 models with 32 names each")
def test_numbers_of_models_and_names_are_limited() -> None:
    names = tuple(f"a{number}" for number in range(MAX_ALIASES + 1))
    models = [NodeModel(f"m{number}", names) for number in range(MAX_MODELS + 2)]
    found = read_listing(node_answer("n1", models))
    assert (len(found.models), found.models[-1].id, found.left_out) == (MAX_MODELS, f"m{MAX_MODELS - 1}", 2)
    assert {model.aliases for model in found.models} == {names[:-1]}


@pytest.mark.check("X8", "at most 16 KiB of each model are decoded")
def test_sizes_of_models_and_steps_are_limited() -> None:
    large = NodeModel("b", entry={"lists": [[]] * MAX_MODEL_BYTES})
    models = [large, *(NodeModel(f"m{number}") for number in range(MAX_MODELS - 1))]
    *before, whole = read_in_slices(node_answer("n1", models))
    assert (len(whole.models), whole.left_out) == (MAX_MODELS - 1, 1)
    assert len(before) >= MAX_MODELS // 20


@pytest.mark.parametrize("state", ["", "new", "ready ", "x" * 10_000])
def test_unknown_state_counts_as_stopped(state: str) -> None:
    (model,) = read_listing(node_answer("n1", [NodeModel("a", state=state, problem="p" * 5000)])).models
    assert (model.state, len(model.problem)) == ("stopped", 1000)


@pytest.mark.parametrize("field", ["slots", "busy", "queued"])
@pytest.mark.parametrize("number", [-1, 10**9, 1.5, "1", None])
def test_count_of_another_kind_is_no_listing(field: str, number: object) -> None:
    content = msgspec.json.encode({"node": "n", "models": [{"id": "a", field: number}]})
    with pytest.raises(ValueError, match=field):
        read_listing(content)


def test_model_serves_when_it_is_ready_and_has_slots() -> None:
    assert NodeModel("a", state="ready", slots=1).serves
    assert not NodeModel("a", state="ready").serves
    assert not NodeModel("a", state="loading", slots=1).serves


@pytest.mark.parametrize(
    ("model", "can"),
    [
        (NodeModel("a"), True),
        (NodeModel("a", problem="missing"), False),
        (NodeModel("a", state="failed"), False),
        (NodeModel("a", state="broken"), False),
    ],
)
def test_model_that_failed_cannot_serve(model: NodeModel, can: bool) -> None:
    assert model.can_serve is can
