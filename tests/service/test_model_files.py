"""``ModelFiles`` with real files and no process: which files a removal takes, and what it leaves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from llamasup.core.config.inventory import read_inventory
from llamasup.core.http.heads import HttpError
from llamasup.core.hub.reference import parse_ref
from llamasup.core.hub.store import DownloadSettings
from llamasup.core.models.registry import build
from llamasup.core.models.rules import ModelRule
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.pool import Pool
from llamasup.core.supervision.events import Bus
from llamasup.errors import Conflict, LlamasupError, ModelUnknown, NotAllowed, UsageInvalid
from llamasup.features.downloads.manager import Downloads
from llamasup.features.downloads.settings import DOWNLOADS
from llamasup.service import model_files
from llamasup.service.model_files import ModelFiles
from tests.core.pool.pools import registry_of
from tests.kit.configs import load
from tests.kit.patience import PATIENCE_S
from tests.kit.tiny import tiny_decoder

FAR, FILE = "hf.co/org/far:Q4_K_M", "org/far/far-Q4_K_M.gguf"


class Place:
    """The models of a config in ``folder``. Inside a running loop."""

    def __init__(self, folder: Path, models: Mapping[str, Any], **config: Any) -> None:
        self.folder = folder / "models"
        path = folder / "config.yaml"
        config = {"downloads": {"on_demand": True}, **config}
        path.write_text(json.dumps({"models_dir": [str(self.folder)], "models": models, **config}))
        self.config = load(path, {})
        self.settings = DownloadSettings(folder=self.folder, endpoint="http://127.0.0.1:9")
        pool = Pool(PoolOptions({"ram": 1 << 30}), cast("Any", None), Bus())
        self.catalog = Catalog(read_inventory(self.config).registry, pool, self._create)
        self.downloads = Downloads(self.settings, folder, {})
        changes = asyncio.Lock()
        self.files = ModelFiles(
            self.catalog, self.downloads, self.settings, {}, lambda: self.config, changes, self._refresh
        )

    def _create(self, name: str) -> ModelSpec | None:
        if not self.config.of(DOWNLOADS).on_demand:
            return None
        try:
            return build([ModelRule(name, source=name)]).specs[name] if parse_ref(name) else None
        except LlamasupError:
            return None

    async def _refresh(self, before: Callable[[], None]) -> None:
        before()
        self.catalog.apply(read_inventory(self.config).registry)

    async def remove(self, name: str) -> Mapping[str, Any]:
        return await self.files.remove(self.catalog.known(name, create=True))

    def names(self) -> set[str]:
        return {managed.spec.id for managed in self.catalog.managed_models()}

    def left(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*.gguf")}


def visit(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast("Any", test()))


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tiny_decoder())
    return folder


def refused(folder: Path, name: str, models: Mapping[str, Any], why: str) -> None:
    async def test() -> None:
        place = Place(folder, models)
        before = place.left()
        with pytest.raises(Conflict, match=why):
            await place.remove(name)
        assert place.left() == before
        assert place.catalog.find(name) is not None

    visit(test)


@pytest.mark.parametrize("number", [1, 2])
def test_split_model_whose_path_is_in_the_config_stays(tmp_path: Path, number: int) -> None:
    with_files(tmp_path, "big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    path = tmp_path / f"models/big-0000{number}-of-00002.gguf"
    refused(tmp_path, "mine", {"mine": {"path": str(path)}}, "the config names its file")


def test_downloaded_file_that_the_config_names_stays(tmp_path: Path) -> None:
    with_files(tmp_path, FILE)
    refused(tmp_path, FAR, {"mine": {"path": str(tmp_path / "models" / FILE)}}, "the config names its file")


def test_draft_model_of_another_stays(tmp_path: Path) -> None:
    with_files(tmp_path, FILE, "big.gguf")
    big = {"path": str(tmp_path / "models/big.gguf"), "draft_model": str(tmp_path / "models" / FILE)}
    refused(tmp_path, "small", {"small": {"repo": "org/far:Q4_K_M"}, "big": big}, "the config names its file")


def test_file_of_two_models_stays(tmp_path: Path) -> None:
    with_files(tmp_path, FILE)
    models = {
        name: {"repo": "org/far:Q4_K_M", "ctx_size": ctx_size} for name, ctx_size in (("a", 512), ("b", 1024))
    }
    refused(tmp_path, "a", models, "the model 'b' of the config uses it")


def test_found_model_that_the_config_names_by_its_id_stays(tmp_path: Path) -> None:
    with_files(tmp_path, "x.gguf")
    refused(tmp_path, "x", {"x": {"threads": 1}}, "the config names its file")


@pytest.mark.parametrize("name", [FAR, "far-Q4_K_M"])
def test_file_goes_with_all_its_names(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, FILE, "x.gguf"), {"*": {"threads": 1}})
        place.catalog.find(FAR, create=True)
        assert place.names() == {FAR, "far-Q4_K_M", "x"}
        removed = await place.remove(name)
        assert removed == {
            "removed": [str(place.folder / FILE)],
            "freed_bytes": len(tiny_decoder()),
        }
        assert (place.names(), place.left()) == ({"x"}, {"x.gguf"})

    visit(test)


def test_model_with_a_repository_in_the_config_stays_listed(tmp_path: Path) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, FILE), {"mine": {"repo": "org/far:Q4_K_M"}})
        await place.remove("mine")
        assert (place.names(), place.left()) == ({"mine"}, set())

    visit(test)


def test_ambiguous_name_of_another_model_does_not_matter(tmp_path: Path) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, "x.gguf", FILE, "org/far/other-Q4_K_M.gguf"), {})
        place.catalog.find(FAR, create=True)
        await place.remove("x")
        assert "x" not in place.names()

    visit(test)


async def outcome(removal: Awaitable[object]) -> str:
    """The message of its error, if it has one."""
    try:
        await removal
    except LlamasupError as error:
        return error.message
    return ""


class Held:
    """Holds the first step of a removal after its last check, in its thread, until ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: LlamasupError | None = None) -> None:
        self._error = error
        self._begun, self._go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(model_files, "refuse_loaded", self._wait)

    def _wait(self, _: object) -> None:
        self._begun.set()
        assert self._go_on.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, PATIENCE_S)

    def go_on(self) -> None:
        self._go_on.set()


@pytest.mark.parametrize("name", [FAR, "far-Q4_K_M"])
@pytest.mark.parametrize("error", [None, UsageInvalid("It is loaded by process 7.")])
def test_no_request_gets_a_model_while_its_file_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: LlamasupError | None
) -> None:
    held = Held(monkeypatch, error)

    async def test() -> None:
        place = Place(with_files(tmp_path, FILE, "x.gguf"), {})
        place.catalog.find(FAR, create=True)
        (managed,) = (each for each in place.catalog.managed_models() if each.spec.id == name)
        async with asyncio.TaskGroup() as tasks:
            removing = tasks.create_task(outcome(place.files.remove(managed)))
            await held.begun()
            try:
                for asked in (FAR, "far-Q4_K_M", "org/far:Q4_K_M", "hf.co/org/far"):
                    why = place.catalog.resolve(asked, create=True)
                    assert isinstance(why, HttpError)
                    assert (why.status, why.cause) == (503, "removing")
                assert not isinstance(place.catalog.resolve("x", create=True), HttpError)
                unknown = place.catalog.resolve("nope", create=True)
                assert isinstance(unknown, HttpError)
                assert unknown.status == 404
                with pytest.raises(ModelUnknown):
                    await place.catalog.pool.load(managed)
                again = tasks.create_task(outcome(place.files.remove(managed)))
            finally:
                held.go_on()
        assert "removed just now" in again.result()
        assert removing.result() == ("" if error is None else "It is loaded by process 7.")
        assert place.names() == ({"x"} if error is None else {FAR, "far-Q4_K_M", "x"})
        assert not isinstance(place.catalog.resolve("hf.co/org/far", create=True), HttpError)

    visit(test)


@pytest.mark.parametrize("name", [FAR, "far-Q4_K_M"])
def test_file_of_a_model_that_is_used_stays(tmp_path: Path, name: str) -> None:
    """By either of its names."""

    async def test() -> None:
        place = Place(with_files(tmp_path, FILE), {})
        managed = place.catalog.find(FAR, create=True)
        assert managed is not None
        place.catalog.pool.begin_load(managed)
        with pytest.raises(Conflict, match="Requests use"):
            await place.remove(name)
        assert place.left() == {FILE}

    visit(test)


def test_file_outside_the_folders_stays(tmp_path: Path) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, FILE), {})
        place.catalog.apply(registry_of(ModelSpec("away", "/nowhere/away.gguf")))
        with pytest.raises(Conflict, match="in no models folder"):
            await place.remove("away")

    visit(test)


@pytest.mark.parametrize(
    "name", ["llama3.2", "hf.co/org", "https://hf.co/a/b?x=1", "a/b:sub dir/x.gguf", "a/b\0"]
)
@pytest.mark.parametrize("on_demand", [False, True])
def test_no_name_is_downloaded_that_a_request_would_not(tmp_path: Path, name: str, on_demand: bool) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, FILE), {}, downloads={"on_demand": on_demand})
        with pytest.raises(ModelUnknown, match="neither a model"):
            place.files.pull(name)

    visit(test)


def test_repository_is_downloaded_only_on_demand(tmp_path: Path) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, FILE), {}, downloads={"on_demand": False})
        with pytest.raises(NotAllowed, match="may be downloaded"):
            place.files.pull(FAR)

    visit(test)


def test_pulled_model_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        place = Place(with_files(tmp_path, FILE), {}, downloads={"on_demand": True})
        await place.files.pull(FAR)(lambda _: None)
        assert FAR in place.names()
        monkeypatch.setattr(place.catalog, "_make_room_for_one", lambda: False)
        with pytest.raises(Conflict, match="downloaded, but not listed"):
            await place.files.pull("hf.co/org/far")(lambda _: None)

    visit(test)
