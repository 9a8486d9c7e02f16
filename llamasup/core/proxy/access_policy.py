"""Decides whether a request has access: Host (X2), Origin (X3), key (X4) and closed paths (X7).

Decides by the head alone, before the body arrives, and by the raw path: an unusual spelling of a path never
counts as a public path.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from msgspec.structs import replace

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import TrustedProxies, is_local_name
from llamasup.core.http.heads import Head, HttpError, parse_authority
from llamasup.core.http.response_heads import is_shown_or_run
from llamasup.core.http.routes import CONTROL, closed_by_default, misspelled
from llamasup.core.proxy.console_access import ConsoleAccess, is_same_origin
from llamasup.core.proxy.settings import ProxyConfig

if TYPE_CHECKING:
    from llamasup.core.proxy.context import Dialect

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

    def __init__(
        self,
        config: ProxyConfig,
        keys: Keys,
        *,
        trusted: bool = False,
        console: ConsoleAccess | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        names = (*config.hosts, config.machine)
        self._names = frozenset((*_LOOPBACK, *(name.lower().rstrip(".") for name in names)))
        self._accepted_hosts: set[bytes] = set()
        self._origins = frozenset(origin.lower().encode() for origin in config.origins)
        # A Unix socket whose permissions decide has no proxies before it.
        self.proxies = TrustedProxies(() if trusted else config.trusted_proxies)
        self.keys = keys
        self.console = ConsoleAccess() if console is None else console
        self._open_paths = frozenset(path.encode() for path in config.open_paths)
        self._trusted = trusted
        self.router = config.router
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
        keys = self.keys
        key = keys.ring.find(head.credentials) if keys.needed or keys.has_minted else None
        # A client without a Host, which only HTTP/1.0 allows, is no browser. A browser adds no key by itself.
        if (
            head.authority
            and head.authority not in self._accepted_hosts
            and (refusal := self._judge_host(head.authority, local_host, has_key=key is not None))
        ):
            return refusal
        path = head.path
        if head.origin is not None and (refusal := self._judge_origin(head)):
            return refusal
        if path in self._public_paths or (head.origin is not None and self.is_preflight(head)):
            return None
        if head.method in _READS and self.console.redirects(head):
            return None
        if head.route is CONTROL:
            return self._judge_control(head, key)
        if head.route.of_router and self.router is not None:
            return self._judge_router(head, key, open_to_all=self.router.inference_keys)
        if key is None:
            if keys.needed:
                return _unauthorized(head)
        elif not key.infers and not (head.route.label in _FOR_ANY_KEY and head.method in _READS):
            return _without_right(key, "control", "inference")
        elif head.from_node and not key.is_node:
            return _without_right(key, "inference", "inference,node")
        if path not in self._open_paths and (refusal := self._judge_path(head)):
            return refusal
        return key

    @property
    def shows_diagnosis(self) -> bool:
        """Whether a client without a key can see why the server is not ready."""
        return self._trusted or not (self.keys.needed or self.rules.transparent)

    def allows_origin(self, head: Head) -> bool:
        """Whether a page of this other origin may read the answer: one that the configuration names, or the
        console's.
        """
        return (head.origin or b"").lower() in self._origins or self.console.may_be_own(head)

    def is_preflight(self, head: Head) -> bool:
        return head.method == b"OPTIONS" and self.allows_origin(head)

    def _judge_host(self, value: bytes, local_host: str, *, has_key: bool) -> HttpError | None:
        parsed = parse_authority(value)
        if parsed is None:
            return HttpError(400, "the Host header is malformed", close=True)
        name = parsed[0]
        if has_key:
            return None
        if not (name in self._names or is_local_name(name) or _same_address(name, local_host)):
            return HttpError(
                403,
                f"Host {name!r} is not a name of this server",
                type="permission_error",
                cause="foreign_host",
                remedy="use localhost or the address of the server, or allow the name with "
                f"--allow-host {name} (in a config: http.allow_hosts)",
            )
        if len(self._accepted_hosts) < MAX_ACCEPTED_HOSTS:
            self._accepted_hosts.add(value)
        return None

    def _judge_origin(self, head: Head) -> HttpError | None:
        origin = head.origin or b""
        if is_same_origin(head) or origin.lower() in self._origins:
            return None
        if self.console.may_be_own(head):
            return self.console.judge_origin(head)
        return HttpError(
            403,
            f"web pages from {origin.decode('latin-1')[:200]!r} may not call this server",
            type="permission_error",
            cause="foreign_origin",
            remedy="if you trust the page, allow it with --allow-origin (in a config: http.allow_origins)",
        )

    def _judge_path(self, head: Head) -> HttpError | None:
        path, prefix = head.path, self.rules.prefix
        if is_shown_or_run(head.fetch_dest, self.rules) and not _is_answered_here(head):
            use = head.fetch_dest.decode("latin-1")[:40]
            return HttpError(
                403,
                f"the answer to this path is data, and no browser may use it as {use!r}",
                type="permission_error",
                cause="fetch_destination",
                remedy="read it with the function fetch of a page, or with another client, such as curl",
            )
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

    def _judge_router(
        self, head: Head, key: ApiKey | None, *, open_to_all: bool
    ) -> ApiKey | HttpError | None:
        """``open_to_all``: to every client that may use a model."""
        if open_to_all and (key is not None or not self.needs_key):
            return key
        found = self._judge_control(head, key)
        if not isinstance(found, HttpError):
            return found
        return replace(
            found, remedy=f"{found.remedy}, or set `router: {{inference_keys: true}}` in the config"
        )


def _is_answered_here(head: Head) -> bool:
    """Whether llamasup answers itself: lists of models, metrics, files and batches."""
    return head.route.lists or head.route.of_batches or head.route.label == "/metrics"


def _without_right(key: ApiKey, has: str, right: str) -> HttpError:
    return HttpError(
        403,
        f"the key {key.name!r} has only the right `{has}`",
        type="permission_error",
        cause="key_rights",
        remedy=f"use a key with rights={right}",
    )


def _unauthorized(head: Head) -> HttpError:
    if head.credentials:
        message, remedy = "Invalid API Key", "it is not among the keys of this server: perhaps it was revoked"
    else:
        message, remedy = "an API key is required", "send Authorization: Bearer KEY, or x-api-key: KEY"
    return HttpError(401, message, type="authentication_error", cause="api_key", remedy=remedy)


def _same_address(name: str, local_host: str) -> bool:
    if name == local_host:
        return True
    if ":" not in name:  # dotted quads have one spelling
        return False
    try:
        return ip_address(name) == ip_address(local_host.partition("%")[0])
    except ValueError:
        return False
