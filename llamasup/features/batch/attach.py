"""Attaches the API for batches to a service, and its folder to the check of a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llamasup.core.auth.keys import Keys
from llamasup.core.config.config_keys import Config
from llamasup.core.settings.declaration import Place
from llamasup.core.system.storage.folders import given_folder, state_folder
from llamasup.core.system.storage.paths import PathKind, path_kind
from llamasup.errors import FolderUnusable, LlamasupError
from llamasup.features.batch.settings import BATCHES, Batches

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from llamasup.features.batch.api.service import BatchService


def batches(settings: Batches, keys: Keys) -> tuple[BatchService, Sequence[BaseRoute]]:
    """The batches, and the routes of their API."""
    from llamasup.features.batch.api.routes import routes_of  # here, because few configs have batches
    from llamasup.features.batch.api.service import BatchService

    service = BatchService(settings, settings.folder or state_folder() / "batch-api", keys)
    return service, routes_of(service)


def config_problems(config: Config) -> Iterator[tuple[Place, LlamasupError]]:
    batches = config.of(BATCHES)
    folder = batches.folder
    if batches.enabled and folder is not None and path_kind(folder) is not PathKind.NOTHING:
        from llamasup.features.batch.api.store import DATABASE  # here, to keep the start short

        try:
            given_folder(folder, DATABASE)
        except FolderUnusable as error:
            yield ("batches", "folder"), error
