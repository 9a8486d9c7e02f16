"""What a model hub answers: lists of files, and refusals with what to do about them.

The hub's protocol as it is documented and as its own client reads it (huggingface_hub 1.33): a list comes in
pages with a Link header; ``X-Error-Code`` says what a status does not. A private repository and one that does
not exist answer the same to who may not see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urljoin, urlsplit

import msgspec

from llamasup.downloads.choose import RepoFile
from llamasup.downloads.reference import Ref, RepoRef, shown_url
from llamasup.errors import AccessDenied, DownloadFailed, LlamasupError, ModelMissing
from llamasup.system.text import INVALID_JSON, printable

__all__ = ["is_transient", "next_page", "read_page", "refusal"]

_NEXT = re.compile(r'<([^<>]*)>\s*;[^,<]*rel="?next"?')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SAID = 200
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
    """The files of one page of ``/api/models/…/tree/…``. Raises DownloadFailed for something else."""
    try:
        entries = _decode(body)
    except INVALID_JSON as error:
        raise DownloadFailed(
            f"The hub's list of files cannot be read: {error}.",
            remedy="If HF_ENDPOINT or --endpoint is set, check that it is a model hub.",
        ) from None
    return tuple(_file(each) for each in entries if each.type == "file")


def _file(entry: _Entry) -> RepoFile:
    if entry.lfs is None:
        return RepoFile(entry.path, entry.size)
    size = entry.size if entry.lfs.size is None else entry.lfs.size
    return RepoFile(entry.path, size, entry.lfs.oid if _SHA256.fullmatch(entry.lfs.oid) else None)


def next_page(link: str | None, url: str) -> str | None:
    """The URL of the page after the one at ``url``; on the same host, whatever a mirror's answer says.

    Raises DownloadFailed for what is no URL.
    """
    found = _NEXT.search(link or "")
    if found is None:
        return None
    try:
        after = urlsplit(urljoin(url, str(found[1])))
    except ValueError as error:
        raise DownloadFailed(
            f"The hub's list of files goes on at what is no URL: {error}.",
            remedy="If HF_ENDPOINT or --endpoint is set, check that it is a model hub.",
        ) from None
    here = urlsplit(url)
    return after._replace(scheme=here.scheme, netloc=here.netloc).geturl()


def is_transient(status: int) -> bool:
    """Whether the same question may be answered a little later."""
    return status in (408, 425, 429) or status >= 500


def refusal(
    ref: Ref, url: str, status: int, headers: Mapping[str, str], *, endpoint: str, with_token: bool
) -> LlamasupError:
    """What an answer other than success means, for the person who asked for ``ref``."""
    code = headers.get("x-error-code", "")
    said = printable(headers.get("x-error-message", ""))[:_MAX_SAID]
    where = f" ({shown_url(url)} answered {status}{f': {said}' if said else ''})"
    if isinstance(ref, RepoRef) and (code == "GatedRepo" or (status == 403 and with_token)):
        return AccessDenied(
            f"{ref.repo} is gated: its owner asks for consent first{where}.",
            remedy=f"Agree on {endpoint}/{ref.repo} with your account, "
            + (
                "whose token is the one given."
                if with_token
                else "and set HF_TOKEN, or --token-file, to its token."
            ),
        )
    if status in (401, 403):
        if isinstance(ref, RepoRef) and not with_token:
            return AccessDenied(
                f"There is no {ref.repo}, or it is private{where}.",
                remedy="Check the name; for a private or gated repository set HF_TOKEN or give --token-file.",
            )
        return AccessDenied(
            f"{ref} may not be downloaded{where}.",
            remedy=(
                "Check the name, and that the token is valid and may read this repository."
                if with_token
                else "The server wants credentials, and llamasup sends a token to the hub alone."
            ),
        )
    if status in (404, 410) or code in _NO_SUCH:
        return ModelMissing(
            f"There is no {_what(ref, code)}{where}.", remedy="Check the spelling, capitals included."
        )
    if status == 451:
        return AccessDenied(f"{ref} is not handed out{where}.", remedy="Ask the owner of the repository.")
    return DownloadFailed(
        f"{ref} cannot be downloaded{where}.",
        remedy="Try again later; what has come is kept."
        if is_transient(status)
        else "Check the URL and the endpoint.",
    )


def _what(ref: Ref, code: str) -> str:
    if isinstance(ref, RepoRef) and code == "RevisionNotFound":
        return f"revision {ref.revision!r} of {ref.repo}"
    return f"repository {ref.repo}" if isinstance(ref, RepoRef) and code != "EntryNotFound" else str(ref)
