"""Decides whether a request has access: Host (X2), Origin (X3), key (X4) and closed paths (X7).

Decides by the head alone, before the body arrives, and by the raw path: an unusual spelling of a path never
counts as a public path.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from llamasup.auth.key_limits import Keys
from llamasup.auth.keys import ApiKey
from llamasup.http.heads import Head, HttpError, parse_authority
from llamasup.http.routes import CONTROL, closed_by_default, misspelled
from llamasup.proxy.console_access import ConsoleAccess, is_same_origin
from llamasup.proxy.settings import ProxyConfig

if TYPE_CHECKING:
    from llamasup.proxy.dialect import Dialect

__all__ = ["HEALTH_PATHS", "PUBLIC_PATHS", "AccessPolicy"]

HEALTH_PATHS = frozenset({b"/health", b"/v1/health"})  # llama-server's own
PUBLIC_PATHS = HEALTH_PATHS | {b"/livez", b"/readyz"}

_FOR_ANY_KEY = frozenset({"/metrics", "/v1/models", "/models"})  # routes that a key of any right may read
_READS = frozenset({b"GET", b"HEAD"})
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x1f\x7f]")

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_ACCEPTED_HOSTS = 256  # a client repeats one spelling; the limit keeps other clients from filling memory


class AccessPolicy:
    """The policy of one listener. ``trusted``: a Unix socket, for which the file permissions decide.
    ``dialect``: another API that it speaks.
    """

    __slots__ = (
        "_accepted_hosts",
        "_names",
        "_open_paths",
        "_origins",
        "_public_paths",
        "_trusted",
        "console",
        "dialect",
        "keys",
        "own_paths",
        "rules",
    )

    def __init__(
        self,
        config: ProxyConfig,
        keys: Keys,
        *,
        trusted: bool = False,
        console: ConsoleAccess | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self._names = frozenset((*_LOOPBACK, *(name.lower().rstrip(".") for name in config.hosts)))
        self._accepted_hosts: set[bytes] = set()
        self._origins = frozenset(origin.lower().encode() for origin in config.origins)
        self.keys = keys
        self.console = ConsoleAccess() if console is None else console
        self._open_paths = frozenset(path.encode() for path in config.open_paths)
        self._trusted = trusted
        self.dialect = dialect
        self.rules = config.rules
        health = frozenset(config.rules.prefix + path for path in HEALTH_PATHS)
        self._public_paths = PUBLIC_PATHS | health
        # The paths that llamasup answers itself; for a transparent proxy, only while llama-server cannot.
        self.own_paths = health if config.rules.transparent else PUBLIC_PATHS

    @property
    def needs_key(self) -> bool:
        """Whether a connection without a valid key can reach only public paths."""
        return self.keys.needed and not self._trusted and not self.rules.transparent

    def authorize(self, head: Head, local_host: str) -> ApiKey | HttpError | None:
        """The key of the request, None if it needs no key, or the refusal.

        ``local_host``: our address of this connection.
        """
        if self.rules.transparent:
            return None
        if head.authority not in self._accepted_hosts and (
            refusal := self._judge_host(head.authority, local_host)
        ):
            return refusal
        path = head.path
        if head.origin is not None and (refusal := self._judge_origin(head)):
            return refusal
        if path in self._public_paths or (head.origin is not None and self.is_preflight(head)):
            return None
        if self.console.redirects(head):
            return None
        keys = self.keys
        key = keys.ring.find(head.credentials) if keys.needed or keys.has_minted else None
        if head.route is CONTROL:
            return self._judge_control(head, key)
        if key is None:
            if keys.needed:
                return _unauthorized(head)
        elif not key.infers and not (head.route.label in _FOR_ANY_KEY and head.method in _READS):
            return _without_right(key, "control", "inference")
        if path not in self._open_paths and (refusal := self._judge_path(head)):
            return refusal
        return key

    @property
    def shows_diagnosis(self) -> bool:
        """Whether a client without a key can see why the server is not ready."""
        return self._trusted or not (self.keys.needed or self.rules.transparent)

    def allows_origin(self, origin: bytes) -> bool:
        """Whether the configuration names this origin, so that its answers get CORS headers."""
        return origin.lower() in self._origins

    def is_preflight(self, head: Head) -> bool:
        return head.method == b"OPTIONS" and head.origin is not None and self.allows_origin(head.origin)

    def _judge_host(self, value: bytes, local_host: str) -> HttpError | None:
        parsed = parse_authority(value)
        if parsed is None:
            if not value:
                return HttpError(400, "the Host header is empty or missing", close=True)
            return HttpError(400, "the Host header is malformed", close=True)
        name = parsed[0]
        if name not in self._names and not _same_address(name, local_host):
            return HttpError(
                403,
                f"Host {name!r} is not a name of this server",
                type="permission_error",
                cause="foreign_host",
                remedy="use localhost or the address of the server, or add the name to the configured hosts",
            )
        if len(self._accepted_hosts) < MAX_ACCEPTED_HOSTS:
            self._accepted_hosts.add(value)
        return None

    def _judge_origin(self, head: Head) -> HttpError | None:
        origin = head.origin or b""
        if is_same_origin(head) or self.allows_origin(origin):
            return None
        return HttpError(
            403,
            f"web pages from {origin.decode('latin-1')[:200]!r} may not call this server",
            type="permission_error",
            cause="foreign_origin",
            remedy="if you trust the page, add its origin to the configured origins",
        )

    def _judge_path(self, head: Head) -> HttpError | None:
        path, prefix = head.path, self.rules.prefix
        if closed_by_default(head.method, path, prefix):
            return HttpError(
                403,
                f"{head.method.decode()} {path.decode('latin-1')} is closed",
                type="permission_error",
                cause="closed_path",
                remedy="no setting opens this path; if clients need it, use llamasup wrap without --strict",
            )
        route = misspelled(path, prefix)
        if route is None:
            return None
        return HttpError(
            404,
            f"unknown spelling of a path: {path.decode('latin-1')[:200]!r}",
            type="not_found_error",
            cause="path_spelling",
            remedy=f"use the path {prefix.decode('latin-1')}{route.label}",
        )

    def _judge_control(self, head: Head, key: ApiKey | None) -> ApiKey | HttpError | None:
        if _CONTROL_CHARACTER.search(unquote_to_bytes(head.path)):
            return HttpError(400, "the path contains a control character", cause="path_spelling")
        if self._trusted or (key is not None and key.controls):
            return key
        if self.console.decides(head):
            return self.console.judge(head)
        if not self.keys.ring.controls:
            return HttpError(
                403,
                "the control API is closed over TCP, because no key has the right `control`",
                type="permission_error",
                cause="control_closed",
                remedy="use the llamasup command on this machine, or create a key with --rights control",
            )
        return _unauthorized(head) if key is None else _without_right(key, "inference", "control")


def _without_right(key: ApiKey, has: str, right: str) -> HttpError:
    return HttpError(
        403,
        f"the key {key.name!r} has only the right `{has}`",
        type="permission_error",
        cause="key_rights",
        remedy=f"use a key with rights={right}",
    )


def _unauthorized(head: Head) -> HttpError:
    message = "Invalid API Key" if head.credentials else "an API key is required"
    return HttpError(
        401,
        message,
        type="authentication_error",
        cause="api_key",
        remedy="send Authorization: Bearer KEY, or x-api-key: KEY",
    )


def _same_address(name: str, local_host: str) -> bool:
    if name == local_host:
        return True
    if ":" not in name:  # dotted quads have one spelling
        return False
    try:
        return ip_address(name) == ip_address(local_host.partition("%")[0])
    except ValueError:
        return False
