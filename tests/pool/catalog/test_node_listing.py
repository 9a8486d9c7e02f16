"""The list of models for another node."""

from __future__ import annotations

import msgspec
import pytest

from llamasup.http.routes import Work
from llamasup.pool.catalog import node_listing
from llamasup.pool.catalog.node_listing import NodeModel, encode_listing, read_listing


def test_listing_is_read_as_it_was_written() -> None:
    model = NodeModel("a", ("b",), "ready", (Work.TEXT,), 4, 1, 2, 4096, entry={"id": "a"})
    found = read_listing(encode_listing("n1", [model]))
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
    models = [NodeModel("a", ("../x", "y")), NodeModel("a", state="ready"), NodeModel("../b")]
    assert read_listing(encode_listing("n1", models)).models == (NodeModel("a", ("y",)),)


def test_number_of_models_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_listing, "MAX_MODELS", 1)
    with pytest.raises(ValueError, match="more than 1 models"):
        read_listing(encode_listing("n1", [NodeModel("a"), NodeModel("b")]))


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
