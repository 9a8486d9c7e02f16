"""The options of ``serve``, and the service that is made from these options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from llamasup.core.llama_server.argv_builder import ignored_variables
from llamasup.service.config_source import ConfigOptions, ConfigSource
from llamasup.service.configured_models import ConfiguredModels
from llamasup.service.options import ServiceSpec, checked_proxy, listening_spec, load_tls

_log = logging.getLogger(__name__)


class ServeOptions(ConfigOptions, frozen=True, kw_only=True):
    """The options of ``llamasup serve``."""

    def spec(self, environ: Mapping[str, str]) -> ServiceSpec:
        """Read and check the config. Its models raise ConfigInvalid, those of a program their own errors."""
        proxy = checked_proxy(self, route_by_model=True)
        tls = load_tls(self)
        source = ConfigSource(self, environ)
        configured = source.first()
        source.check_all(configured)
        if ignored := ignored_variables(environ):
            _log.warning("%s", ignored)
        return listening_spec(self, tls, proxy, partial(ConfiguredModels, configured, source))
