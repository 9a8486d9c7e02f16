"""Decides which URLs in a body llama-server may fetch (X7); ``body_scan.py`` finds them.

llama-server (b11434) takes every string that begins with ``http`` for a URL, and parses it by its own rules:
the text before an ``@``, anywhere in the URL, is a user, so it fetches ``http://good.example/@bad.example/``
from bad.example. Only URLs that all parsers read in the same way are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from llamasup.core.http.heads import HttpError

# Visible ASCII, but no @ and no backslash.
_PLAIN = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?:/[!-?A-\[\]-~]*)?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MAX_SHOWN = 80


def refused_media(urls: Iterable[str | None], allowed: tuple[str, ...]) -> HttpError | None:
    """Return the refusal of the first URL whose host is not in ``allowed``: ``HOST:PORT``, or ``HOST`` for
    the default port of the scheme. A None in ``urls`` is an unreadable URL.
    """
    for url in urls:
        plain = None if url is None else _PLAIN.fullmatch(url)
        if plain is None:
            what = "an ambiguous or overlong URL" if allowed else "a remote URL"
        else:
            port = plain["port"] or _DEFAULT_PORTS[plain["scheme"]]
            host = plain["host"].lower()
            if f"{host}:{port}" in allowed or (port == _DEFAULT_PORTS[plain["scheme"]] and host in allowed):
                continue
            shown = host if plain["port"] is None else f"{host}:{port}"
            what = f"a URL of {shown[:_MAX_SHOWN]!r}"
        return HttpError(
            400,
            f"The body contains {what} that llama-server would fetch as media",
            cause="remote_media",
            remedy="send the media itself as a data: URL, or allow the host with --remote-media or"
            " http.remote_media",
        )
    return None
