"""The routes of the web console: its files, and signing in and out (docs/console.md).

The proxy has checked Host, Origin and the right to each of these requests (``proxy/console_access.py``). The
files need no right; neither does signing in, which checks a token or a key here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from llamasup._version import __version__
from llamasup.core.auth.api_key import ApiKey
from llamasup.core.auth.key_source import PROCESS_SALT
from llamasup.core.auth.keys import Keys
from llamasup.core.control.interface import ControlTarget
from llamasup.core.control.json_body import read_body
from llamasup.core.control.private_socket import client_of
from llamasup.core.http.address import Address, TcpAddress, UnixAddress, is_loopback
from llamasup.core.http.errors import error_object, type_of
from llamasup.core.proxy.console_access import (
    CONSOLE_HEADER,
    CONSOLE_PATH,
    ConsoleAccess,
)
from llamasup.core.proxy.proxy import Proxy
from llamasup.core.system.native import native
from llamasup.core.system.text import json_text
from llamasup.errors import Conflict, NotAllowed
from llamasup.features.console.sessions import IDLE_S, TOKEN_S, ConsoleSessions, Opened, Session
from llamasup.features.console.static_files import StaticFile, answer_of, read_static_files

_API = "/llamasup/v1/console"
_FRESH = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_RANDOM_BYTES = 32


class _SignIn(msgspec.Struct):
    token: str | None = None
    key: str | None = None


def page_address(address: Address, names: Sequence[str]) -> str | None:
    """Return the URL of the console for a browser on this machine; None for a Unix socket.

    A certificate is for one of the ``names``, and not for a loopback address.
    """
    if isinstance(address, UnixAddress):
        return None
    if address.tls and names and (is_loopback(address.host) or address.url != f"https://{address.authority}"):
        address = TcpAddress(names[0], address.port, tls=True)
    return address.url + CONSOLE_PATH


class Console:
    """The ``ConsolePages``. ``page_url`` is the URL for a browser on this machine, or None if it has no such
    URL.

    ``describe``: further fields of ``GET console/session``.
    """

    def __init__(
        self,
        access: ConsoleAccess,
        keys: Keys,
        on_closed: Callable[[], None],
        page_url: str | None,
        *,
        describe: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = native.awake_and_asleep_s,
    ) -> None:
        self._access = access
        self._keys = keys
        self._page_url = page_url
        self._describe = describe
        self._files: Mapping[str, StaticFile] | None = None
        self.sessions = ConsoleSessions(
            keys, PROCESS_SALT, clock, lambda: secrets.token_urlsafe(_RANDOM_BYTES), on_closed
        )
        access.sessions = self.sessions

    @property
    def routes(self) -> Sequence[BaseRoute]:
        token = Route(f"{_API}/token", self._new_token, methods=["POST"])
        if not self._access.is_on:
            return [token]  # answers that the console is off
        return [
            token,
            Route(f"{_API}/session", self._show_session, methods=["GET"]),
            Route(f"{_API}/session", self._sign_in, methods=["POST"]),
            Route(f"{_API}/session", self._sign_out, methods=["DELETE"]),
            # No other path: an unknown one of the control API must not need "another method".
            Route(CONSOLE_PATH, self._show_file, methods=["GET"]),
            Route(CONSOLE_PATH + "assets/{name:path}", self._show_file, methods=["GET"]),
        ]

    def is_open_for(self, request: Request) -> Callable[[], bool]:
        session, client = self._session_of(request), client_of(request.headers)
        if session is not None:
            return lambda: self.sessions.is_open(session)
        key = self._keys.of_client(client)
        return lambda: not client or (key is not None and self._keys.current(key) == key)

    # --- files

    async def _show_file(self, request: Request) -> Response:
        if self._files is None:
            # In a thread, because a disk may be slow.
            self._files = await asyncio.to_thread(read_static_files, page_secret=self._access.page_secret)
        file = self._files.get(request.url.path.removeprefix(CONSOLE_PATH))
        if file is None:
            raise HTTPException(404)
        asked = request.headers
        status, body, headers = answer_of(
            file,
            asked.get("accept-encoding", ""),
            asked.get("if-none-match", ""),
            sandboxed=not self._access.owns_address,
        )
        return Response(body, status, headers)

    # --- signing in and out

    async def _new_token(self, request: Request) -> Response:
        if not self._access.is_on:
            raise Conflict(
                "This llamasup serves no web console.",
                remedy="Start run or serve without --no-ui and without `http: {ui: false}`; wrap has none.",
            )
        if self._page_url is None:
            raise Conflict(
                "This llamasup listens only on a Unix socket, which a browser cannot open.",
                remedy="Add an address to --host or listen, such as --host 127.0.0.1,PATH.sock.",
            )
        token = self.sessions.new_token(self._key_of(request))
        url = f"{self._page_url}#token={token}"  # a browser sends no fragment: it reaches no log
        return _json({"token": token, "url": url, "expires_s": int(TOKEN_S)})

    def _key_of(self, request: Request) -> ApiKey | None:
        """The key that a request for a token acts as; None on the private socket."""
        session = self._session_of(request)
        if session is not None:
            return session.signed_in_with
        client = client_of(request.headers)
        if not client:
            return None
        key = self._keys.of_client(client)
        if key is None or not key.controls:
            raise NotAllowed(
                "Only a key with the right `control` creates a token for the console.",
                remedy="Use such a key, or run `llamasup ui` on the machine of this llamasup.",
            )
        return key

    async def _show_session(self, request: Request) -> Response:
        session = self._session_of(request)
        if session is None:
            return self._not_signed_in("This browser is not signed in to the console.", "session")
        return _json(self._described(session))

    async def _sign_in(self, request: Request) -> Response:
        sign_in = await read_body(request, _SignIn)
        if sign_in.token is not None:
            opened: Opened | ApiKey | None = self.sessions.open_with_token(sign_in.token)
        else:
            opened = self.sessions.open_with_key(sign_in.key or "")
        if opened is None and sign_in.token is not None:
            return self._not_signed_in(
                f"The token is unknown, was used already, or is older than {TOKEN_S:.0f} s.", "console_token"
            )
        if opened is None:
            return self._not_signed_in("The key is unknown.", "api_key")
        if isinstance(opened, ApiKey):
            return self._not_signed_in(
                f"The key {opened.name!r} does not have the right `control`.", "key_rights"
            )
        before = self._session_of(request)
        if before is not None:  # this page was signed in
            self.sessions.close(before)
        return _json({**self._described(opened.session), "secret": opened.secret})

    async def _sign_out(self, request: Request) -> Response:
        session = self._session_of(request)
        if session is not None:
            self.sessions.close(session)
        return _json({"ended": session is not None})

    def _described(self, session: Session) -> Mapping[str, Any]:
        return {
            "name": session.acts_as.name,
            "version": __version__,
            "models_need_key": self._keys.needed,
            "inference_key": session.inference_key,
            "idle_s": int(IDLE_S),
            **self._describe(),
        }

    def _not_signed_in(self, message: str, cause: str) -> Response:
        error = NotAllowed(
            message,
            remedy="Run `llamasup ui` on the machine of this llamasup"
            + (", or enter a key with the right `control`." if self._keys.ring.controls else "."),
        )
        shown = {**error_object(error)["error"], "type": type_of(401), "code": 401, "cause": cause}
        return _json({"error": shown, "accepts_key": self._keys.ring.controls}, 401)

    def _session_of(self, request: Request) -> Session | None:
        return self.sessions.find(request.headers.get(CONSOLE_HEADER, "").encode("latin-1"))


def _json(shown: Any, status: int = 200) -> Response:
    return Response(json_text(shown), status, _FRESH, media_type="application/json")


def pages(
    proxy: Proxy, address: Address, hosts: Sequence[str], target: ControlTarget, wake: Callable[[], None]
) -> Console:
    return Console(
        proxy.console,
        proxy.keys,
        wake,
        page_address(address, hosts),
        describe=lambda: {"config": target.config is not None},
    )
