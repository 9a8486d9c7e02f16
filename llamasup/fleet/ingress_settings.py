"""Reads from a config what the ingress of a fleet needs to know about clients, and refuses an unsafe one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llamasup.core.auth.api_key import ApiKey, plain_keys
from llamasup.core.auth.key_source import KeyFile, environment_keys
from llamasup.core.http.address import is_loopback
from llamasup.core.supervision.states import Policy
from llamasup.errors import UnsafeBind
from llamasup.fleet.ingress import IngressSettings
from llamasup.fleet.secret import derived
from llamasup.fleet.settings import FLEET, Fleet

if TYPE_CHECKING:
    from llamasup.core.config.config_keys import Config


def ingress_settings(config: Config, secret: str, environ: Mapping[str, str]) -> IngressSettings | None:
    """None without ``fleet.ingress``. Only digests of keys leave this machine, with a salt of the fleet:
    another one would replace the ingress at each deployment. Raises ConfigInvalid.
    """
    fleet = config.of(FLEET) or Fleet()
    if not fleet.ingress:
        return None
    keys = _keys(config, derived(secret, "keys of clients").hex().encode(), environ)
    directory = urlsplit(fleet.directory or "").hostname
    own, usual = config.defaults, Policy()
    return IngressSettings(
        keys=keys,
        hosts=(*config.http.allow_hosts, *([] if directory is None else [directory])),
        remote_media=config.http.remote_media,
        insecure_no_auth=config.auth.insecure_no_auth,
        wait_timeout_s=usual.wait_timeout_s if own.wait_timeout_s is None else own.wait_timeout_s,
        max_queued=usual.max_queued if own.max_queued is None else own.max_queued,
    )


def _keys(config: Config, salt: bytes, environ: Mapping[str, str]) -> tuple[ApiKey, ...]:
    path, found = config.auth.api_key_file, plain_keys(environment_keys(environ), salt)
    if path is None:
        return found
    return (*KeyFile(path, of="auth.api_key_file", salt=salt).keys, *found)


def refuse_without_key(settings: IngressSettings, host: str, port: int) -> None:
    """X1, for the address of Ray Serve. Raises UnsafeBind."""
    if not settings.keys and not settings.insecure_no_auth and not is_loopback(host):
        raise UnsafeBind(
            f"With fleet.ingress, Ray Serve at {host}:{port} serves the models to other machines, and no API "
            "key is set.",
            remedy="Set auth.api_key_file or $LLAMASUP_API_KEY; or let Serve listen on 127.0.0.1 "
            "(fleet.listen); or accept requests without a key with `auth: {insecure_no_auth: true}`.",
        )
