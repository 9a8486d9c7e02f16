"""The changes of a new registry: added, removed and renamed models, and those that need another process."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import Changes, ModelSpec, Stay, changes
from llamasup.core.settings.model import ModelSettings, Settings

SPEC = ModelSpec("a", "/models/a.gguf", settings=Settings(alias="a"), identity=(("/models/a.gguf", 9, 1),))


def test_equal_registries_have_no_changes() -> None:
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
        replace(SPEC, options=ModelSettings(devices=("CUDA1",))),
        replace(SPEC, options=ModelSettings(warm_up=False)),
    ],
)
def test_start_options_need_new_processes(other: ModelSpec) -> None:
    found = changes({"a": SPEC}, {"a": other})

    assert found == Changes(changed=("a",))
    assert found


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, aliases=("gpt",)),
        replace(SPEC, stay=Stay(ttl_s=60.0)),
        replace(SPEC, stay=Stay(pin=True, preload=True)),
        replace(SPEC, options=ModelSettings(max_queued=7, wait_timeout_s=1.0)),
        replace(SPEC, problem="it cannot be read"),
    ],
)
def test_other_options_keep_the_processes(other: ModelSpec) -> None:
    found = changes({"a": SPEC}, {"a": other})

    assert found == Changes(retouched=("a",))
    assert found


def test_a_file_that_can_be_read_again_is_a_changed_model() -> None:
    """A link that is followed now has the same file as before."""
    found = changes({"a": replace(SPEC, problem="it links to another folder")}, {"a": SPEC})
    assert found == Changes(changed=("a",))


@pytest.mark.parametrize(
    ("source", "is_remote"),
    [("/models/a.gguf", False), ("org/repo:Q4_K_M", True), ("https://example.com/a.gguf", True), ("", False)],
)
def test_source_that_is_no_path_must_be_downloaded(source: str, is_remote: bool) -> None:
    """A source is also empty if no file was found, and then there is no download."""
    assert replace(SPEC, source=source).is_remote is is_remote


# --- another id


def named(id_: str, *aliases: str, **said: object) -> ModelSpec:
    return replace(SPEC, id=id_, aliases=aliases, settings=Settings(alias=id_), **said)


def after(*specs: ModelSpec) -> tuple[dict[str, ModelSpec], dict[str, ModelSpec]]:
    """The specs by id, and by every name."""
    return {spec.id: spec for spec in specs}, {name: spec for spec in specs for name in spec.names}


def test_no_process_ends_for_a_name() -> None:
    assert named("a").started_as == named("b", "a").started_as


def test_removed_id_resolves_to_its_successor() -> None:
    """Also if the successor has another file."""
    specs, names = after(named("chat", "a", source="/models/b.gguf", identity=()))
    found = changes({"a": SPEC}, specs, resolve=names.get)

    assert found == Changes(added=("chat",), removed=("a",), renamed=(("a", "chat"),))
    assert found
    assert (found.new, found.gone) == ((), ())
    assert Changes(added=("b",), removed=("a",)).new == ("b",)
    assert Changes(added=("b",), removed=("a",)).gone == ("a",)


def test_alias_of_a_removed_model_resolves_only_to_the_same_file() -> None:
    gone = named("chat", "x", "a")
    specs, names = after(named("a"), named("x", source="/models/x.gguf", identity=()))
    assert changes({"chat": gone}, specs, resolve=names.get).renamed == (("chat", "a"),)
    specs, names = after(named("x", source="/models/x.gguf", identity=()))
    assert changes({"chat": gone}, specs, resolve=names.get).renamed == ()


def test_running_models_come_first_in_renamed() -> None:
    before = {"org/x": named("org/x", source="org/x", identity=()), "org/x:Q4": named("org/x:Q4")}
    specs, names = after(named("x", "org/x", "org/x:Q4"))
    running = {"org/x:Q4": before["org/x:Q4"]}
    found = changes(before, specs, running=running, resolve=names.get)

    assert found.renamed == (("org/x:Q4", "x"), ("org/x", "x"))
    assert found.removed == ("org/x", "org/x:Q4")


def test_found_download_is_not_a_change() -> None:
    far = replace(SPEC, source="org/a:Q4", identity=())

    assert changes({"a": far}, {"a": SPEC}, running={"a": SPEC}) == Changes(retouched=("a",))
    assert changes({"a": far}, {"a": SPEC}) == Changes(changed=("a",))
    other = replace(SPEC, identity=(("/models/a.gguf", 9, 2),))
    assert changes({"a": far}, {"a": SPEC}, running={"a": other}) == Changes(changed=("a",))


@pytest.mark.parametrize(
    ("other", "is_one"),
    [
        (replace(SPEC, identity=(("/models/a.gguf", 8, 3),)), True),
        (replace(SPEC, source="/models/link.gguf"), True),
        (replace(SPEC, identity=(("/models/b.gguf", 9, 1),)), False),
        (replace(SPEC, identity=()), True),
        (replace(SPEC, identity=(), source="org/a"), False),
        (replace(SPEC, identity=(), source=""), False),
    ],
)
def test_file_is_identified_by_its_path(other: ModelSpec, is_one: bool) -> None:
    assert SPEC.is_file_of(other) is is_one
