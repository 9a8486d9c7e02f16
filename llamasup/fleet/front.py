"""Makes a front of ``serve``: the models of its config are those of the fleet, and it loads none itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamasup.core.settings.sections import RuntimeChoice
from llamasup.errors import UsageInvalid
from llamasup.features.peers.membership import ExpectedModel
from llamasup.fleet.membership import FleetMembership
from llamasup.fleet.secret_file import fleet_secret

if TYPE_CHECKING:
    from llamasup.core.config import Config
    from llamasup.service.serve import ServeOptions


def as_front(
    options: ServeOptions, environ: Mapping[str, str], *, has_own_models: bool = False
) -> ServeOptions:
    """Return ``options`` for a front of the fleet in its config. ``has_own_models``: the caller adds models
    to the config. Raises UsageInvalid for these, and ConfigInvalid without the secret of the fleet.
    """
    initial, read, adjust = options.initial_config, options.config, options.adjust
    assert initial is not None
    assert initial.fleet is not None
    assert initial.fleet.directory is not None
    if has_own_models:
        raise UsageInvalid(
            "A front of a fleet serves only the models of the fleet.",
            remedy="Name no other models or folders, or remove fleet.directory from the config.",
        )
    secret = fleet_secret(initial.fleet, environ)
    return replace(
        options,
        config=lambda: read().without_models(),
        initial_config=initial.without_models(),
        configured_runtime=RuntimeChoice(),
        adjust=None if adjust is None else lambda config: adjust(config).without_models(),
        membership=partial(FleetMembership, initial.fleet.directory, secret, _models_of(initial)),
    )


def _models_of(config: Config) -> tuple[ExpectedModel, ...]:
    message = "The directory of the fleet has not answered yet"
    return tuple(
        ExpectedModel(rule.name, rule.aliases, message) for rule in config.rules if not rule.is_pattern
    )
