"""The model that a name resolves to, and the errors for other names."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.models.registry import Registry, build
from llamasup.core.models.rules import ModelRule
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.pool import Pool
from llamasup.core.supervision.events import Bus
from llamasup.errors import ModelUnknown
from tests.core.models.test_registry import DECODER, found
from tests.core.pool.pools import registry_of

GOOD = ModelSpec("qwen", "/m/qwen.gguf")
BROKEN = ModelSpec("half", "/m/half.gguf", problem="truncated")


def catalog_of(registry: Registry) -> Catalog:
    """A catalog in the running loop, without any process."""
    return Catalog(registry, pool_of())


def pool_of() -> Pool:
    return Pool(PoolOptions({"ram": 1 << 30}), cast("Any", None), Bus())


def test_request_without_a_model_gets_the_available_names() -> None:
    async def visit() -> None:
        catalog = catalog_of(registry_of(GOOD, ModelSpec("bge", "/m/bge.gguf"), BROKEN))
        error = catalog._refusal(None)
        assert error.remedy == 'set "model" to qwen or bge'

    asyncio.run(visit())


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [("qwn", "Did you mean qwen?"), ("zzz", "llamasup ps --all lists the models.")],
)
def test_command_with_an_unknown_name_gets_a_remedy(asked: str, remedy: str) -> None:
    async def visit() -> None:
        with pytest.raises(ModelUnknown) as raised:
            catalog_of(build([ModelRule("qwen", source="org/qwen")])).known(asked)
        assert raised.value.remedy == remedy

    asyncio.run(visit())


def test_a_name_of_two_publishers_is_404_and_names_both() -> None:
    async def visit() -> None:
        files = [found(f"/m/{org}/r/x.gguf", DECODER, "x", f"{org}/repo:x.gguf") for org in ("a", "b")]
        catalog = Catalog(build((), files), pool_of(), lambda name: ModelSpec(name, "org/x"))
        refusal = catalog.resolve("x", create=True)
        assert isinstance(refusal, HttpError)
        assert (refusal.status, refusal.cause) == (404, "model_not_found")
        assert refusal.message == "Several files have the name 'x', so none of them is served under it"
        assert refusal.remedy == "use a/repo:x.gguf or b/repo:x.gguf"
        assert not isinstance(catalog.resolve("b/repo:x.gguf", create=True), HttpError)

    asyncio.run(visit())


def test_duplicate_name_shows_paths_to_commands_not_clients() -> None:
    async def visit() -> None:
        files = [found("/a/x.gguf"), found("/b/x.gguf")]
        catalog = Catalog(build((), files), pool_of(), lambda name: ModelSpec(name, "org/x"))
        with pytest.raises(ModelUnknown) as raised:
            catalog.known("x", create=True)
        assert "/a/x.gguf, /b/x.gguf" in raised.value.message
        assert raised.value.remedy.startswith("Rename all but one")
        refusal = catalog.resolve("x", create=True)
        assert isinstance(refusal, HttpError)
        assert (refusal.status, refusal.cause) == (404, "model_not_found")
        assert "Several files have the name 'x'" in refusal.message
        assert "/a" not in refusal.message + refusal.remedy

    asyncio.run(visit())
