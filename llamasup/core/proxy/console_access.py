"""Decides which requests reach the web console and, with the secret of a session, the control API
(docs/console.md).

The pages open to every client that the checks of Host and Origin admit. Everything else needs a key with the
right `control`, or the secret of a session, which only a page of the console has. No cookie gives a right.

If llama-server's pages have the same address, the console's page is sandboxed: its origin is ``null`` and its
own, so no other page can reach into it. Pages of other sites can also have the origin ``null``. They know
neither the secret of a session, nor the secret of the page, with which the page signs in.
"""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import Final, Protocol

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.http.heads import Head, HttpError

CONSOLE_PATH: Final = "/llamasup/"
CONSOLE_HEADER: Final = "x-llamasup-console"
"""The secret of a session. A sign-in has none yet, and sends the secret of the page."""

_READS = frozenset({b"GET", b"HEAD"})
_OPAQUE = b"null"
_PAGE = CONSOLE_PATH.encode()
_SIGN_IN_PATH = b"/llamasup/v1/console/session"
# No dot segment and no escape fits: a spelling of another path is not public.
_is_page = re.compile(rb"/llamasup/(?:assets/[A-Za-z0-9_-]+(?:[./][A-Za-z0-9_-]+)*)?").fullmatch

# In the lines of ``Head.opening``, whose names are in lower case.
_ACCEPTS_PAGES = re.compile(rb"\r\naccept:[^\r]*text/html")

_SESSION_ENDED = HttpError(
    401,
    "the session of the console has ended",
    type="authentication_error",
    cause="session",
    remedy="sign in again: run `llamasup ui`, or enter a key with the right `control`",
)
_UNKNOWN_PAGE = HttpError(
    401,
    "this is not a current page of the console",
    type="authentication_error",
    cause="console_page",
    remedy="reload the page; llamasup may have started again",
)
_FOREIGN = HttpError(
    403,
    "only the console's own pages may use its session",
    type="permission_error",
    cause="foreign_origin",
    remedy="use the pages of the console, or a key with the right `control`",
)


class Sessions(Protocol):
    """The sessions of the console."""

    def has(self, secret: bytes) -> bool:
        """Whether a session has this secret."""
        ...

    def key_of(self, secret: bytes) -> ApiKey | None:
        """The key that a request with this secret acts as; None if no session has it. Counts as a use of the
        session.
        """
        ...


class ConsoleAccess:
    """``page_secret`` is in the console's page, which only pages of this address can read.
    ``owns_address``: no other page has this address, so a browser that asks for ``/`` is led to the console.
    ``sessions`` exist once the control application is loaded.
    """

    def __init__(self, page_secret: str = "", *, is_on: bool = False, owns_address: bool = False) -> None:
        self.is_on = is_on
        self.page_secret = page_secret
        self.sessions: Sessions | None = None
        self.owns_address = owns_address

    def redirects(self, head: Head) -> bool:
        """Whether the answer leads a browser to the console."""
        if not self.is_on or head.method not in _READS:
            return False
        if head.path == b"/llamasup":
            return True
        return head.path == b"/" and self.owns_address and bool(_ACCEPTS_PAGES.search(head.opening))

    def may_be_own(self, head: Head) -> bool:
        """Whether the console's page may have sent this cross-origin request, and so may read the answer."""
        if head.origin != _OPAQUE or not self.is_on or self.owns_address:
            return False
        is_asset = _is_public(head) and head.path != _PAGE  # the page contains its secret
        is_preflight = head.method == b"OPTIONS" and CONSOLE_HEADER.encode() in head.asked_headers.lower()
        return bool(head.console_secret) or is_asset or is_preflight

    def judge_origin(self, head: Head) -> HttpError | None:
        """The refusal of a request that ``may_be_own`` and is not, because its secret is unknown."""
        secret = head.console_secret
        if not secret or (self.sessions is not None and self.sessions.has(secret)):
            return None
        if head.path != _SIGN_IN_PATH:
            return _SESSION_ENDED
        return None if compare_digest(secret, self.page_secret.encode()) else _UNKNOWN_PAGE

    def decides(self, head: Head) -> bool:
        """Whether ``judge`` decides about a request below ``/llamasup/`` that has no key."""
        return self.is_on and (head.path == _SIGN_IN_PATH or _is_public(head) or bool(head.console_secret))

    def judge(self, head: Head) -> ApiKey | HttpError | None:
        """The key that the request acts as, None if it needs none, or the refusal.

        A request for a session needs none: its body has a token or a key.
        """
        if _is_public(head):
            return None
        if head.origin not in (None, _OPAQUE) and not is_same_origin(head):
            return _FOREIGN
        key = None if self.sessions is None else self.sessions.key_of(head.console_secret)
        return _SESSION_ENDED if key is None and head.path != _SIGN_IN_PATH else key


def _is_public(head: Head) -> bool:
    """Whether the request is for a page or one of its files."""
    return head.method in _READS and bool(_is_page(head.path))


def is_same_origin(head: Head) -> bool:
    """Whether the Origin is the address that the request itself names."""
    scheme, separator, authority = (head.origin or b"").lower().partition(b"://")
    return (
        bool(separator and authority)
        and scheme in (b"http", b"https")
        and authority == head.authority.lower()
    )
