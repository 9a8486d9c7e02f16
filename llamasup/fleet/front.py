"""Makes a front of ``serve``: the models of its config are those of the fleet, and it loads none itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamasup.fleet.membership import FleetMembership
from llamasup.fleet.secret_file import fleet_secret
from llamasup.peers.membership import ExpectedModel

if TYPE_CHECKING:
    from llamasup.config import Config
    from llamasup.service.serve import ServeOptions

__all__ = ["as_front"]


def as_front(options: ServeOptions, directory: str, environ: Mapping[str, str]) -> ServeOptions:
    """``options`` for a front of the fleet with this directory. Raises ConfigInvalid without its secret."""
    initial, read, adjust = options.initial_config, options.config, options.adjust
    assert initial is not None
    assert initial.fleet is not None
    secret = fleet_secret(initial.fleet, environ)
    return replace(
        options,
        config=lambda: _without_models(read()),
        initial_config=_without_models(initial),
        adjust=None if adjust is None else lambda config: _without_models(adjust(config)),
        membership=partial(FleetMembership, directory, secret, _models_of(initial)),
    )


def _models_of(config: Config) -> tuple[ExpectedModel, ...]:
    message = "The directory of the fleet has not answered yet"
    return tuple(
        ExpectedModel(rule.name, rule.aliases, message) for rule in config.rules if not rule.is_pattern
    )


def _without_models(config: Config) -> Config:
    return replace(config, models={}, models_dir=(), caches=(), groups={}, default_model=None)
