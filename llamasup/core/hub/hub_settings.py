"""The model hub and its token, from the sources of the hub's own tools. Messages show no token (X13)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llamasup.core.hub.reference import HUB, origin_of, shown_url
from llamasup.core.system.storage.folders import read_bounded
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import printable
from llamasup.errors import ConfigInvalid, UsageInvalid

_MAX_BYTES = 64 * 1024
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


def hub_endpoint(environ: Mapping[str, str], given: str | None = None) -> str:
    """Return the base URL of the hub: ``given``, else ``HF_ENDPOINT``, else the default.

    Raises UsageInvalid.
    """
    endpoint = (given or environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        problem = "" if origin_of(endpoint)[1] else "it has no host"
    except ValueError as error:
        problem = str(error)
    shown = printable(endpoint)
    if any(mark in endpoint for mark in "@?#"):  # logs and ps would show it
        problem, shown = "only host, port and path are allowed", shown_url(endpoint)
    if problem:
        raise UsageInvalid(
            f"The endpoint {shown!r} is not a valid URL of a model hub: {problem}.",
            remedy="Set HF_ENDPOINT, or --endpoint, to a URL such as https://huggingface.co.",
        )
    return endpoint


def hub_token(environ: Mapping[str, str], file: Path | None = None) -> str | None:
    """Return the token of ``file``, else of ``HF_TOKEN``, ``HF_TOKEN_PATH``, or the file that ``hf auth
    login`` writes.

    None if there is none. Raises ConfigInvalid if a named one cannot be used.
    """
    if file is not None:
        return _read(expanded(file, ConfigInvalid, of="--token-file"), "--token-file")
    if given := environ.get("HF_TOKEN", "").strip():
        return _checked(given, "$HF_TOKEN")
    if named := environ.get("HF_TOKEN_PATH"):
        return _read(expanded(named, ConfigInvalid, of="$HF_TOKEN_PATH"), "$HF_TOKEN_PATH")
    home = environ.get("HF_HOME") or os.path.join(  # noqa: PTH118 - HF_HOME is text too
        environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    usual = expanded(home, ConfigInvalid, of="$HF_HOME") / "token"
    return _read(usual, repr(str(usual))) if usual.is_file() else None


def _read(path: Path, what: str) -> str:
    try:
        content, _ = read_bounded(path, _MAX_BYTES)
        text = content.decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigInvalid(
            f"The file of {what} cannot be read: {error.strerror}.",  # the path may be a pasted token
            remedy="Give the path of a file that has only the token of the hub.",
        ) from None
    return _checked(text, what)


def _checked(text: str, what: str) -> str:
    # The token itself is not shown: errors end up in logs.
    if not _TOKEN.fullmatch(text):
        raise ConfigInvalid(
            f"{what} is not a valid token ({len(text)} characters, not shown).",
            remedy="A token is one word, such as hf_ and 34 letters.",
        )
    return text
