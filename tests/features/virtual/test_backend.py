"""Virtual models in front of a catalog, without any process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Work, route_of
from llamasup.core.models.access import ResolvedModel
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.catalog.node_listing import read_listing
from llamasup.core.proxy.backend import is_virtual
from llamasup.core.settings.sections import VirtualEntry
from llamasup.features.virtual.backend import VirtualBackend
from tests.core.planning.plans import bert
from tests.core.pool.catalog.test_catalog import catalog_of, pool_of
from tests.core.pool.pools import registry_of
from tests.kit.async_tests import async_test

TOKENIZE = route_of(b"/tokenize")
MODELS = (ModelSpec("qwen", "/m/qwen.gguf"), ModelSpec("phi", "/m/phi.gguf"))
ENTRIES = {
    "qwen:cold": VirtualEntry(model="Qwen", set={"temperature": 0}, system="secret"),
    "any": VirtualEntry(any=("nope", "phi", "qwen")),
    "lost": VirtualEntry(model="nope"),
}


def backend_of(entries: Mapping[str, VirtualEntry] = ENTRIES) -> VirtualBackend:
    return VirtualBackend(catalog_of(registry_of(*MODELS)), entries)


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
    backend = VirtualBackend(catalog, ENTRIES)
    assert backend.resolve("qwen") is catalog.resolve("qwen")
    assert isinstance(backend.resolve(None), HttpError)
    assert backend.readiness() == catalog.readiness()
    assert backend.node_listing() == catalog.node_listing()
    unknown = backend.resolve("what")
    assert isinstance(unknown, HttpError)
    assert unknown.message == "The model 'what' does not exist"


@async_test
async def test_without_virtual_models_the_catalog_answers_itself() -> None:
    catalog = catalog_of(registry_of(*MODELS))
    backend = VirtualBackend(catalog, {})
    assert backend.resolve == catalog.resolve
    assert backend.listing().all() == catalog.listing().all()
    backend.apply(ENTRIES)
    assert backend.resolve != catalog.resolve
    backend.apply({})
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
    route = VirtualBackend(models, {"v": VirtualEntry(any=("embed", "phi"))}).resolve("v")
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
    alone = VirtualBackend(models, {"v": VirtualEntry(model="embed")}).resolve("v")
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
    backend = VirtualBackend(catalog, {"v": VirtualEntry(model="org/x")})
    assert isinstance(backend.resolve("v"), HttpError)
    assert not isinstance(backend.resolve("v", create=True), HttpError)


@async_test
async def test_listing_shows_what_each_virtual_model_is() -> None:
    listing = backend_of().listing()
    entries = {entry["id"]: entry for entry in json.loads(listing.all())["data"]}
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
    assert "secret" not in listing.all().decode()
    assert any_["llamasup"]["virtual"]["takes"] == "phi"
    assert lost["llamasup"]["virtual"]["takes"] is None
    assert "does not exist" in lost["llamasup"]["problem"]
    assert json.loads(listing.one("qwen:cold")) == cold
    assert json.loads(listing.one("qwen")) == entries["qwen"]


@async_test
async def test_hidden_model_is_not_listed() -> None:
    backend = backend_of({"qwen": VirtualEntry(model="phi")})
    entries = json.loads(backend.listing().all())["data"]
    assert [entry["id"] for entry in entries] == ["phi", "qwen"]
    other = backend_of({"QWEN": VirtualEntry(model="phi")})
    assert [entry["id"] for entry in json.loads(other.listing().all())["data"]] == ["phi", "QWEN"]
    assert entries[1]["llamasup"]["virtual"]["takes"] == "phi"
    assert json.loads(backend.listing().one("qwen")) == entries[1]


def with_aliases(entries: Mapping[str, VirtualEntry]) -> tuple[Catalog, VirtualBackend]:
    registry = registry_of(ModelSpec("fox", "/m/f.gguf", aliases=("tale", "story")))
    catalog = catalog_of(replace(registry, default="fox"))
    return catalog, VirtualBackend(catalog, entries)


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

    assert [entry["id"] for entry in json.loads(backend.listing().all(allowed))["data"]] == ["Tale"]
    entry = json.loads(backend.listing().one("fox"))
    assert entry["aliases"] == ["story"]


@async_test
async def test_hidden_model_is_hidden_under_its_aliases_too() -> None:
    _, backend = with_aliases({"FOX": VirtualEntry(any=("gone",))})
    for name, cause in (("story", "model_not_found"), (None, "model_unnamed")):
        found = backend.resolve(name)
        assert isinstance(found, HttpError)
        assert found.cause == cause


@pytest.mark.check("X4", "404: another node reaches no model that a virtual model hides, by no name")
@async_test
async def test_hidden_model_is_hidden_from_other_nodes() -> None:
    _, backend = with_aliases({"FOX": VirtualEntry(any=("gone",))})
    for name in ("fox", "FOX", "fox:latest", "story", "tale", None):
        assert isinstance(backend.resolve(name, local=True), HttpError)
    assert read_listing(backend.node_listing()).models == ()


@async_test
async def test_other_nodes_know_a_model_by_the_names_that_lead_to_it() -> None:
    _, backend = with_aliases({"Tale": VirtualEntry(model="fox", system="Be brief.")})
    for name in ("Tale", "tale"):
        assert isinstance(backend.resolve(name, local=True), HttpError)
    route = backend.resolve("story", local=True)
    assert not isinstance(route, HttpError)
    assert route.model.names == ("fox", "story")
    (listed,) = read_listing(backend.node_listing()).models
    assert (listed.id, listed.aliases, listed.entry["aliases"]) == ("fox", ("story",), ["story"])
    assert read_listing(backend.node_listing(lambda model: None)).models == ()


@async_test
async def test_key_sees_only_the_virtual_models_that_it_names() -> None:
    def allowed(model: ResolvedModel) -> bool:
        return model.id in ("qwen", "any")

    listed = json.loads(backend_of().listing().all(allowed))["data"]
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
        def why_of(model: str) -> Mapping[str, Any]:
            return {"state": state, "sentences": [f"{model}: own"], "change": ["c"], "decisions": [1]}

        found = backend_of().why(name, why_of)
        assert (found["model"], found["state"]) == (name, state)
        assert sentence in found["sentences"]
        if name != "lost":
            assert found["sentences"][-1].endswith(": own")
            assert found["decisions"] == [1]

    test()


@async_test
async def test_why_names_the_model_for_each_kind_of_work() -> None:
    encoder = ModelSpec("embed", "/m/e.gguf", listed=bert())
    backend = VirtualBackend(
        catalog_of(registry_of(encoder, *MODELS)), {"v": VirtualEntry(any=("embed", "phi"))}
    )
    found = backend.why("v", lambda model: {"sentences": [f"{model}: own"]})
    assert "A request for text now takes phi, because it is the only one that can." in found["sentences"]
    assert found["sentences"][-1] == "embed: own"
