"""The interfaces behind ``HostedModels``: a config as it applies to this machine, and names of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from llamasup.core.config import Config
from llamasup.core.config.inventory import ModelInventory
from llamasup.core.control.interface import OtherModels
from llamasup.core.models.search import Search
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.options import PoolOptions
from llamasup.core.proxy.backend import Backend
from llamasup.features.downloads.manager import DownloadSettings
from llamasup.features.peers.membership import Peer

if TYPE_CHECKING:
    from llamasup.core.llama_server.inspect import Runtime


class Configured(Struct, frozen=True):
    """A config, and the inventory and options that result from it on this machine."""

    config: Config
    inventory: ModelInventory
    options: PoolOptions
    downloads: DownloadSettings
    peers: tuple[Peer, ...] = ()


class Source(Protocol):
    @property
    def watched_runtime(self) -> str | None:
        """The path of a llama-server that is followed (``runtime.watch``)."""
        ...

    def read(self, before: Search | None = None) -> Configured:
        """Read the config and the folders; for a missing folder use the search ``before``. Blocks; raises
        ConfigInvalid.
        """
        ...

    def check(
        self, configured: Configured, before: Mapping[str, ModelSpec], *, less_memory: bool = False
    ) -> None:
        """Blocks; raises ConfigInvalid for a model whose config differs from ``before`` and that is missing,
        broken or too large. ``less_memory``: also for a model that no longer fits.
        """
        ...

    def use_runtime(self, runtime: Runtime) -> None:
        """Check configs with this build from now on."""
        ...

    def stamp(self) -> object:
        """A value that changes with the config's file. None if there is no file to watch."""
        ...


class CatalogueSource(OtherModels, Protocol):
    """Names in front of those of another backend, which lead to its models."""

    @property
    def backend(self) -> Backend:
        """The names, and the backend behind them."""
        ...

    def apply(self, config: Config) -> None:
        """Use this config from now on: it was read again."""
        ...
