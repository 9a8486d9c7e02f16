"""Decides which requests reach the web console and, with its cookie, the control API (docs/console.md).

The pages are files without secrets, so every client may read them that the checks of Host and Origin admit.
Everything else needs a key with the right `control`, or the cookie and the secret of a session. A browser
adds a cookie to each request, whichever page causes it, and sends it to every port of a host: another program
of this machine can get it. The secret is in the storage of this origin, and in a header that no other page
can send. A change also needs the Origin of this server.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from llamasup.auth.keys import ApiKey
from llamasup.http.heads import Head, HttpError

__all__ = [
    "CONSOLE_HEADER",
    "CONSOLE_PATH",
    "SESSION_COOKIE",
    "ConsoleAccess",
    "Sessions",
    "is_same_origin",
    "session_ids",
]

CONSOLE_PATH: Final = "/llamasup/"
SESSION_COOKIE: Final = "llamasup_session"
CONSOLE_HEADER: Final = "x-llamasup-console"
"""A sign-in has none yet, and sends any value: other pages cannot send the header."""

_READS = frozenset({b"GET", b"HEAD"})
_SIGN_IN_PATH = b"/llamasup/v1/console/session"
# No dot segment and no escape fits: a spelling of another path is not public.
_is_page = re.compile(rb"/llamasup/(?:assets/[A-Za-z0-9_-]+(?:[./][A-Za-z0-9_-]+)*)?").fullmatch

# In the lines of ``Head.opening``, whose names are in lower case.
_ACCEPTS_PAGES = re.compile(rb"\r\naccept:[^\r]*text/html")
_COOKIES = re.compile(rb"\r\ncookie:([^\r]*)")
_FETCH_SITES = re.compile(rb"\r\nsec-fetch-site:[ \t]*([^\r \t]*)")
# A site is a name without its port, so another program of this machine is "same-site".
_OWN_SITES = frozenset({b"same-origin", b"none"})

_SESSION_IDS = re.compile(rb"(?:^|[; \t])" + SESSION_COOKIE.encode() + rb"=([A-Za-z0-9_.-]{1,1024})")
_MAX_IDS = 8


class Sessions(Protocol):
    """The sessions of the console."""

    def key_of(self, ids: tuple[bytes, ...], secret: bytes) -> ApiKey | None:
        """The key that a request with these ids and this secret acts as; None if they belong to no session.
        Counts as a use of the session.
        """
        ...


class ConsoleAccess:
    """``is_front_page``: a browser that asks for ``/`` is led to the console. ``sessions`` exist once the
    control application is loaded.
    """

    __slots__ = ("_is_front_page", "is_on", "sessions")

    def __init__(self, *, is_on: bool = False, is_front_page: bool = False) -> None:
        self.is_on = is_on
        self.sessions: Sessions | None = None
        self._is_front_page = is_front_page

    def redirects(self, head: Head) -> bool:
        """Whether the answer leads a browser to the console."""
        if not self.is_on or head.method not in _READS:
            return False
        if head.path == b"/llamasup":
            return True
        return head.path == b"/" and self._is_front_page and bool(_ACCEPTS_PAGES.search(head.opening))

    def decides(self, head: Head) -> bool:
        """Whether ``judge`` decides about a request below ``/llamasup/`` that has no key."""
        if not self.is_on:
            return False
        return head.path == _SIGN_IN_PATH or _is_public(head) or bool(_ids_of(head))

    def judge(self, head: Head) -> ApiKey | HttpError | None:
        """The key that the request acts as, None if it needs none, or the refusal.

        A request for a session needs no cookie: its body has a token or a key.
        """
        if _is_public(head):
            return None
        signs_in = head.path == _SIGN_IN_PATH
        if (refusal := _judge_page(head, signs_in=signs_in)) is not None:
            return refusal
        key = None if self.sessions is None else self.sessions.key_of(_ids_of(head), head.console_secret)
        if key is None and not signs_in:
            return HttpError(
                401,
                "the session of the console has ended",
                type="authentication_error",
                cause="session",
                remedy="sign in again: run `llamasup ui`, or enter a key with the right `control`",
            )
        return key


def _is_public(head: Head) -> bool:
    """Whether the request is for a page or one of its files."""
    return head.method in _READS and bool(_is_page(head.path))


def _ids_of(head: Head) -> tuple[bytes, ...]:
    return session_ids(b"; ".join(_COOKIES.findall(head.opening)))


def _judge_page(head: Head, *, signs_in: bool) -> HttpError | None:
    """Why a page of another site may have caused the request; None if it cannot."""
    if any(site not in _OWN_SITES for site in _FETCH_SITES.findall(head.opening)) or (
        head.origin is not None and not is_same_origin(head)
    ):
        return _refusal("only the console's own pages may use its session", "foreign_origin")
    is_read = head.method in _READS
    if not is_read and head.origin is None and not signs_in:
        return _refusal("a change with the console's session needs an Origin header", "foreign_origin")
    if not head.console_secret and not (is_read and signs_in):
        return _refusal(
            "the console's session needs its secret in the header X-Llamasup-Console", "console_header"
        )
    return None


def _refusal(message: str, cause: str) -> HttpError:
    return HttpError(
        403,
        message,
        type="permission_error",
        cause=cause,
        remedy="use the pages of the console, or a key with the right `control` and no cookie",
    )


def is_same_origin(head: Head) -> bool:
    """Whether the Origin is the address that the request itself names."""
    scheme, separator, authority = (head.origin or b"").lower().partition(b"://")
    return bool(separator) and scheme in (b"http", b"https") and authority == head.authority.lower()


def session_ids(cookies: bytes) -> tuple[bytes, ...]:
    """The ids in a Cookie header. Cookies do not know ports, so the llamasups of one machine share a cookie,
    which has the ids of all of them.
    """
    ids = [id_ for value in _SESSION_IDS.findall(cookies) for id_ in value.split(b".") if id_]
    return tuple(ids[-_MAX_IDS:])
