"""Virtual models in front of a catalog, without any process."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from llamasup.core.config.config_keys import Config
from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Work, route_of
from llamasup.core.models.access import ResolvedModel
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.proxy.backend import is_virtual
from llamasup.features.virtual.settings import VirtualEntry
from llamasup.features.virtual.virtual_backend import VirtualBackend
from tests.core.planning.plans import bert
from tests.core.pool.catalog.test_catalog import catalog_of, pool_of
from tests.core.pool.pools import registry_of
from tests.kit.async_tests import async_test
from tests.kit.backends import as_node_reads, entries_of, entry_of

TOKENIZE = route_of(b"/tokenize")
MODELS = (ModelSpec("qwen", "/m/qwen.gguf"), ModelSpec("phi", "/m/phi.gguf"))
ENTRIES = {
    "qwen:cold": VirtualEntry(model="Qwen", set={"temperature": 0}, system="secret"),
    "any": VirtualEntry(any=("nope", "phi", "qwen")),
    "lost": VirtualEntry(model="nope"),
}


def in_front_of(catalog: Catalog, entries: Mapping[str, VirtualEntry]) -> VirtualBackend:
    return VirtualBackend(catalog, Config(features={"virtual_models": entries}))


def backend_of(entries: Mapping[str, VirtualEntry] = ENTRIES) -> VirtualBackend:
    return in_front_of(catalog_of(registry_of(*MODELS)), entries)


@async_test
async def test_name_leads_to_its_model_and_changes_the_body() -> None:
    route = backend_of().resolve("qwen:cold")
    assert not isinstance(route, HttpError)
    assert route.model == ResolvedModel(("qwen:cold",), is_virtual=True)
    assert is_virtual(route)
    assert route.target == "qwen"
    body = route.rewrite(b'{"model":"qwen:cold"}', TOKENIZE)
    assert body == b'{"model":"qwen","temperature":0}'
    assert isinstance(route.rewrite(b"[]", TOKENIZE), HttpError)


@async_test
async def test_other_names_lead_where_they_led_before() -> None:
    backend = backend_of()
    catalog = catalog_of(registry_of(*MODELS))
    backend = in_front_of(catalog, ENTRIES)
    assert backend.resolve("qwen") is catalog.resolve("qwen")
    assert isinstance(backend.resolve(None), HttpError)
    assert backend.readiness() == catalog.readiness()
    assert as_node_reads(backend) == as_node_reads(catalog)
    unknown = backend.resolve("what")
    assert isinstance(unknown, HttpError)
    assert unknown.message == "The model 'what' does not exist"


@async_test
async def test_without_virtual_models_the_catalog_answers_itself() -> None:
    catalog = catalog_of(registry_of(*MODELS))
    backend = in_front_of(catalog, {})
    assert backend.resolve == catalog.resolve
    assert entries_of(backend) == entries_of(catalog)
    backend.apply(Config(features={"virtual_models": ENTRIES}))
    assert backend.resolve != catalog.resolve
    backend.apply(Config())
    assert backend.resolve == catalog.resolve


@async_test
async def test_other_spelling_of_a_virtual_name_is_accepted() -> None:
    backend = backend_of()
    for name in ("QWEN:Cold", "qwen:cold:latest"):
        route = backend.resolve(name)
        assert not isinstance(route, HttpError)
        assert route.model.id == "qwen:cold"


@async_test
async def test_virtual_name_hides_a_found_model_in_any_spelling() -> None:
    backend = backend_of({"QWEN": VirtualEntry(model="phi")})
    for name in ("qwen", "QWEN", "Qwen"):
        route = backend.resolve(name)
        assert not isinstance(route, HttpError)
        assert route.model.id == "QWEN"
        assert is_virtual(route)
        assert route.rewrite(b"{}", TOKENIZE) == b'{"model":"phi"}'


@async_test
async def test_request_from_another_node_means_a_model_of_this_one() -> None:
    found = backend_of().resolve("qwen:cold", local=True)
    assert isinstance(found, HttpError)


@async_test
async def test_missing_model_of_several_is_left_out() -> None:
    route = backend_of().resolve("any")
    assert not isinstance(route, HttpError)
    assert is_virtual(route)
    assert route.rewrite(b"{}", TOKENIZE) == b'{"model":"phi"}'


@async_test
async def test_models_for_other_work_are_left_out() -> None:
    encoder = ModelSpec("embed", "/m/e.gguf", listed=bert())
    models = catalog_of(registry_of(encoder, *MODELS))
    route = in_front_of(models, {"v": VirtualEntry(any=("embed", "phi"))}).resolve("v")
    assert not isinstance(route, HttpError)
    assert is_virtual(route)
    taken = {}
    for work in (None, *Work):
        suited = route.for_work(work)
        assert is_virtual(suited)
        body = suited.rewrite(b"{}", TOKENIZE)
        assert isinstance(body, bytes)
        taken[work] = json.loads(body)["model"]
    assert {work: model for work, model in taken.items() if model == "embed"} == dict.fromkeys(
        (None, Work.EMBEDDINGS), "embed"
    )
    alone = in_front_of(models, {"v": VirtualEntry(model="embed")}).resolve("v")
    assert not isinstance(alone, HttpError)
    assert is_virtual(alone)
    assert alone.for_work(Work.TEXT) is alone


@async_test
async def test_virtual_model_without_a_model_says_so() -> None:
    found = backend_of().resolve("lost")
    assert isinstance(found, HttpError)
    assert (found.status, found.cause) == (404, "model_not_found")
    assert found.message == "The virtual model 'lost' has no model: The model 'nope' does not exist"


@async_test
async def test_name_that_can_be_downloaded_is_created_for_work() -> None:
    catalog = Catalog(registry_of(*MODELS), pool_of(), lambda name: ModelSpec(name, name))
    backend = in_front_of(catalog, {"v": VirtualEntry(model="org/x")})
    assert isinstance(backend.resolve("v"), HttpError)
    assert not isinstance(backend.resolve("v", create=True), HttpError)


@async_test
async def test_listing_shows_what_each_virtual_model_is() -> None:
    backend = backend_of()
    entries = {entry["id"]: entry for entry in entries_of(backend)}
    assert list(entries) == ["qwen", "phi", "qwen:cold", "any", "lost"]
    cold, any_, lost = (entries[name] for name in ENTRIES)
    assert cold["llamasup"]["virtual"] == {
        "model": "Qwen",
        "any": [],
        "takes": "qwen",
        "set": {"temperature": 0},
        "default": {},
        "remove": [],
        "system": True,
    }
    assert cold["status"] == entries["qwen"]["status"]
    assert "secret" not in str(entries)
    assert any_["llamasup"]["virtual"]["takes"] == "phi"
    assert lost["llamasup"]["virtual"]["takes"] is None
    assert "does not exist" in lost["llamasup"]["problem"]
    assert entry_of(backend, "qwen:cold") == cold
    assert entry_of(backend, "qwen") == entries["qwen"]


@async_test
async def test_hidden_model_is_not_listed() -> None:
    backend = backend_of({"qwen": VirtualEntry(model="phi")})
    entries = entries_of(backend)
    assert [entry["id"] for entry in entries] == ["phi", "qwen"]
    other = backend_of({"QWEN": VirtualEntry(model="phi")})
    assert [entry["id"] for entry in entries_of(other)] == ["phi", "QWEN"]
    assert entries[1]["llamasup"]["virtual"]["takes"] == "phi"
    assert entry_of(backend, "qwen") == entries[1]


def with_aliases(entries: Mapping[str, VirtualEntry]) -> tuple[Catalog, VirtualBackend]:
    registry = registry_of(ModelSpec("fox", "/m/f.gguf", aliases=("tale", "story")))
    catalog = catalog_of(replace(registry, default="fox"))
    return catalog, in_front_of(catalog, entries)


@async_test
async def test_alias_that_leads_to_a_virtual_model_is_no_name_of_its_model() -> None:
    catalog, backend = with_aliases({"Tale": VirtualEntry(model="fox", system="Be brief.")})
    for name in ("fox", "story", None):
        route = backend.resolve(name)
        assert not isinstance(route, HttpError)
        assert route.model == ResolvedModel(("fox", "story"), route.model.works)
        assert route.served is catalog.pool.managed_models["fox"].served

    def allowed(model: ResolvedModel) -> bool:
        return "tale" in map(str.lower, model.names)

    assert [entry["id"] for entry in entries_of(backend, allowed)] == ["Tale"]
    assert entry_of(backend, "fox")["aliases"] == ["story"]


@async_test
async def test_hidden_model_is_hidden_under_its_aliases_too() -> None:
    _, backend = with_aliases({"FOX": VirtualEntry(any=("gone",))})
    for name, cause in (("story", "model_not_found"), (None, "model_unnamed")):
        found = backend.resolve(name)
        assert isinstance(found, HttpError)
        assert found.cause == cause


@pytest.mark.check("X4", "404")
@async_test
async def test_hidden_model_is_hidden_from_other_nodes() -> None:
    _, backend = with_aliases({"FOX": VirtualEntry(any=("gone",))})
    for name in ("fox", "FOX", "fox:latest", "story", "tale", None):
        assert isinstance(backend.resolve(name, local=True), HttpError)
    assert as_node_reads(backend) == ()


@async_test
async def test_other_nodes_know_a_model_by_the_names_that_lead_to_it() -> None:
    _, backend = with_aliases({"Tale": VirtualEntry(model="fox", system="Be brief.")})
    for name in ("Tale", "tale"):
        assert isinstance(backend.resolve(name, local=True), HttpError)
    route = backend.resolve("story", local=True)
    assert not isinstance(route, HttpError)
    assert route.model.names == ("fox", "story")
    (listed,) = as_node_reads(backend)
    assert (listed.id, listed.aliases, listed.entry["aliases"]) == ("fox", ("story",), ["story"])


@async_test
async def test_key_sees_only_the_virtual_models_that_it_names() -> None:
    def allowed(model: ResolvedModel) -> bool:
        return model.id in ("qwen", "any")

    listed = entries_of(backend_of(), allowed)
    assert [entry["id"] for entry in listed] == ["qwen", "any"]


@pytest.mark.parametrize(
    ("name", "state", "sentence"),
    [
        ("qwen:cold", "stopped", "qwen:cold is a virtual model: its requests go to qwen."),
        (
            "any",
            "stopped",
            "A request now takes phi, because none is loaded, and it is the first that can be.",
        ),
        ("lost", "stopped", "There is no model nope."),
    ],
)
def test_why_explains_the_choice_and_the_chosen_model(name: str, state: str, sentence: str) -> None:
    @async_test
    async def test() -> None:
        found = backend_of().why(name)
        assert (found["model"], found["state"]) == (name, state)
        assert sentence in found["sentences"]
        if name != "lost":
            assert found["sentences"][-1].endswith("is not loaded: nothing has asked for it.")

    test()


@async_test
async def test_why_names_the_model_for_each_kind_of_work() -> None:
    encoder = ModelSpec("embed", "/m/e.gguf", listed=bert())
    backend = in_front_of(
        catalog_of(registry_of(encoder, *MODELS)), {"v": VirtualEntry(any=("embed", "phi"))}
    )
    found = backend.why("v")
    assert "A request for text now takes phi, because it is the only one that can." in found["sentences"]
    assert found["sentences"][-1].startswith("embed is not loaded")
