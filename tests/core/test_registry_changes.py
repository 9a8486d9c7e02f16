"""What a new registry changes: who comes, who goes, who needs another process, and who does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamasup.core.model_spec import ModelOptions, ModelSpec, Stay
from llamasup.core.registry_changes import Changes, changes
from llamasup.core.settings import Settings

SPEC = ModelSpec("a", "/models/a.gguf", settings=Settings(alias="a"), identity=(("/models/a.gguf", 9, 1),))


def test_nothing_changes_between_equals() -> None:
    found = changes({"a": SPEC}, {"a": replace(SPEC)})

    assert found == Changes(unchanged=("a",))
    assert not found


def test_models_come_and_go_in_the_order_of_the_registry() -> None:
    other = replace(SPEC, id="b")

    assert changes({"a": SPEC}, {"c": SPEC, "b": other}) == Changes(added=("c", "b"), removed=("a",))
    assert changes({}, {}) == Changes()


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, source="/models/b.gguf"),
        replace(SPEC, settings=Settings(alias="a", ctx_size=512)),
        replace(SPEC, replicas=2),
        replace(SPEC, identity=(("/models/a.gguf", 9, 2),)),
        replace(SPEC, options=ModelOptions(devices=("CUDA1",))),
        replace(SPEC, options=ModelOptions(warm_up=False)),
    ],
)
def test_what_a_process_is_started_from_needs_another_one(other: ModelSpec) -> None:
    found = changes({"a": SPEC}, {"a": other})

    assert found == Changes(changed=("a",))
    assert found


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, aliases=("gpt",)),
        replace(SPEC, stay=Stay(ttl_s=60.0)),
        replace(SPEC, stay=Stay(pin=True, preload=True)),
        replace(SPEC, options=ModelOptions(max_queued=7, wait_timeout_s=1.0)),
        replace(SPEC, problem="it cannot be read"),
    ],
)
def test_what_is_only_said_of_a_model_touches_no_process(other: ModelSpec) -> None:
    found = changes({"a": SPEC}, {"a": other})

    assert found == Changes(retouched=("a",))
    assert found


@pytest.mark.parametrize(
    ("source", "is_remote"),
    [("/models/a.gguf", False), ("org/repo:Q4_K_M", True), ("https://example.com/a.gguf", True), ("", False)],
)
def test_what_is_no_path_has_to_be_downloaded_first(source: str, is_remote: bool) -> None:
    """And what nobody has found anywhere cannot be."""
    assert replace(SPEC, source=source).is_remote is is_remote
