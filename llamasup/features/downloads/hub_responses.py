"""The responses of a model hub: lists of files, and errors with their remedies.

The protocol follows the hub's documentation and huggingface_hub 1.33: lists have pages with a Link header,
and ``X-Error-Code`` details a status. Without access, a private repository looks like a missing one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urljoin, urlsplit

import msgspec

from llamasup.core.hub.choose import RepoFile
from llamasup.core.hub.reference import Ref, RepoRef, shown_url
from llamasup.core.system.text import INVALID_JSON, printable
from llamasup.errors import AccessDenied, DownloadFailed, LlamasupError, ModelMissing

_NEXT = re.compile(r'<([^<>]*)>\s*;[^,<]*rel="?next"?')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_MESSAGE = 200
_NO_SUCH = frozenset({"RepoNotFound", "RevisionNotFound", "EntryNotFound"})


class _Lfs(msgspec.Struct):
    oid: str = ""
    size: int | None = None


class _Entry(msgspec.Struct):
    path: str
    type: str = "file"
    size: int = 0
    lfs: _Lfs | None = None


_decode = msgspec.json.Decoder(list[_Entry]).decode


def read_page(body: bytes) -> tuple[RepoFile, ...]:
    """Read the files of one page of ``/api/models/…/tree/…``. Raises DownloadFailed if it is invalid."""
    try:
        entries = _decode(body)
    except INVALID_JSON as error:
        raise DownloadFailed(
            f"The list of files from the hub is invalid: {error}.",
            remedy="If HF_ENDPOINT or --endpoint is set, check that it is a model hub.",
        ) from None
    return tuple(_file(entry) for entry in entries if entry.type == "file")


def _file(entry: _Entry) -> RepoFile:
    if entry.lfs is None:
        return RepoFile(entry.path, entry.size)
    size = entry.size if entry.lfs.size is None else entry.lfs.size
    return RepoFile(entry.path, size, entry.lfs.oid if _SHA256.fullmatch(entry.lfs.oid) else None)


def next_page(link: str | None, url: str) -> str | None:
    """Return the URL of the page after ``url``, on the same host even if a mirror names another one.

    Raises DownloadFailed for an invalid URL.
    """
    found = _NEXT.search(link or "")
    if found is None:
        return None
    try:
        after = urlsplit(urljoin(url, str(found[1])))
    except ValueError as error:
        raise DownloadFailed(
            f"The next page of the hub's list of files has an invalid URL: {error}.",
            remedy="If HF_ENDPOINT or --endpoint is set, check that it is a model hub.",
        ) from None
    here = urlsplit(url)
    return after._replace(scheme=here.scheme, netloc=here.netloc).geturl()


def is_transient(status: int) -> bool:
    """Whether a retry may help."""
    return status in (408, 425, 429) or status >= 500


def refusal(
    ref: Ref, url: str, status: int, headers: Mapping[str, str], *, endpoint: str, with_token: bool
) -> LlamasupError:
    """Return the error for a response to the request for ``ref`` that is not a success."""
    code = headers.get("x-error-code", "")
    message = printable(headers.get("x-error-message", ""))[:_MAX_MESSAGE]
    where = f" ({shown_url(url)} answered {status}{f': {message}' if message else ''})"
    if isinstance(ref, RepoRef) and (code == "GatedRepo" or (status == 403 and with_token)):
        return AccessDenied(
            f"{ref.repo} is gated: its owner must grant access first{where}.",
            remedy=f"Request access on {endpoint}/{ref.repo} "
            + (
                "with the account of your token."
                if with_token
                else "and set HF_TOKEN, or --token-file, to a token of your account."
            ),
        )
    if status in (401, 403):
        if isinstance(ref, RepoRef) and not with_token:
            return AccessDenied(
                f"The repository {ref.repo} does not exist or is private{where}.",
                remedy="Check the name; for a private or gated repository set HF_TOKEN or --token-file.",
            )
        return AccessDenied(
            f"The server denied access to {ref}{where}.",
            remedy=(
                "Check the name, and that the token is valid and may read this repository."
                if with_token
                else "Download the file yourself: llamasup sends a token only to the hub."
            ),
        )
    if status in (404, 410) or code in _NO_SUCH:
        return ModelMissing(
            f"{_what(ref, code)} does not exist{where}.", remedy="Check the spelling, including capitals."
        )
    if status == 451:
        return AccessDenied(
            f"{ref} is unavailable for legal reasons{where}.", remedy="Ask the owner of the repository."
        )
    return DownloadFailed(
        f"{ref} cannot be downloaded{where}.",
        remedy="Try again later: the same command continues the download."
        if is_transient(status)
        else "Check the URL and the endpoint.",
    )


def _what(ref: Ref, code: str) -> str:
    if isinstance(ref, RepoRef) and code == "RevisionNotFound":
        return f"The revision {ref.revision!r} of {ref.repo}"
    return f"The repository {ref.repo}" if isinstance(ref, RepoRef) and code != "EntryNotFound" else str(ref)
