"""References to models that can be downloaded, and the paths of their files in the models folder.

A reference is a repository of a model hub (``org/repo``, ``org/repo:Q4_K_M``, ``org/repo:file.gguf``, a page
of its web site) or the https URL of a GGUF file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.system.text import printable
from llamasup.errors import UsageInvalid

HUB = "https://huggingface.co"

_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PORTS = {"http": 80, "https": 443}
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")
# llama.cpp finds the other parts by the name of the first one (b11434).
_SPLIT_URL = re.compile(r"(?P<prefix>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 999
# File systems allow 255; llamasup adds ".part.json" and a leading dot.
_MAX_NAME_BYTES = 220
_SYNTAX = "Write org/repo, org/repo:QUANT, org/repo:FILE.gguf, or the https URL of a .gguf file."


class RepoRef(Struct, frozen=True):
    """A repository of the hub, with a ``quant``, a ``file`` (a path in it), or neither.

    ``sha256`` (lower-case hex) is the expected checksum, if the URL has one.
    """

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str = "main"
    sha256: str | None = None

    def __str__(self) -> str:
        choice = self.file or self.quant
        return f"{self.repo}:{choice}" if choice else self.repo


class UrlRef(Struct, frozen=True):
    """The URL of a GGUF file. ``sha256`` (lower-case hex) is the expected checksum, if the URL has one."""

    url: str
    sha256: str | None = None

    def __str__(self) -> str:
        return shown_url(self.url)


Ref = RepoRef | UrlRef


def parse_ref(text: str, endpoint: str = HUB) -> Ref | None:
    """Return the reference in ``text``; None if it is something else, such as a path.

    ``endpoint`` is the hub, whose web pages are also references. Raises UsageInvalid.
    """
    if text[:8].lower().startswith(("http://", "https://")):
        return _url(text, endpoint)
    prefix = next(
        (known for known in ("hf://", "hf:", "hf.co/", "huggingface.co/") if text.startswith(known)), ""
    )
    repo, colon, said = text.removeprefix(prefix).partition(":")
    if prefix == "hf://" and repo.count("/") > 1 and not colon:
        org, name, said = repo.split("/", 2)
        repo, colon = f"{org}/{name}", ":"
    if not prefix and (not _REPO.fullmatch(repo) or (not colon and repo.lower().endswith(".gguf"))):
        return None
    return _repo(repo, said if colon else None, text)


def names_of(ref: Ref) -> tuple[str, ...]:
    """Return the names of ``ref`` to record with a downloaded file, the exact one last.

    Queries are hashed.
    """
    if isinstance(ref, RepoRef):
        return (f"{ref.revision}:{ref.file or ref.quant or ''}",)
    url = split_urls(ref.url)[0]
    shown, query = shown_url(url), urlsplit(url).query
    return (shown, f"{shown}?{hashlib.sha256(query.encode()).hexdigest()}") if query else (shown,)


def is_reference(text: str) -> bool:
    """Return whether ``text`` looks like a reference rather than a path; it may be invalid."""
    try:
        return parse_ref(text) is not None
    except UsageInvalid:
        return True


def _repo(repo: str, said: str | None, text: str, revision: str = "main") -> RepoRef:
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise UsageInvalid(f"{printable(text)!r} is not a valid repository.", remedy=_SYNTAX)
    if said is None:
        return RepoRef(repo, revision=revision)
    if said.lower().endswith(".gguf"):
        if not is_safe_path(said):
            raise UsageInvalid(
                f"{printable(text)!r}: {printable(said)!r} is not a valid path in a repository.",
                remedy="Give the path that the repository's page shows.",
            )
        return RepoRef(repo, file=said, revision=revision)
    if not _QUANT.fullmatch(said):
        raise UsageInvalid(
            f"{printable(text)!r}: {printable(said)!r} is neither a quantization nor a .gguf file.",
            remedy=f"Write it as {repo}:Q4_K_M or {repo}:FILE.gguf.",
        )
    return RepoRef(repo, quant=said, revision=revision)


def _url(text: str, endpoint: str) -> Ref:
    try:
        parts = urlsplit(text)
        origin = origin_of(text)
    except ValueError as error:  # the URL is not shown, since its query cannot be removed
        raise UsageInvalid(f"The URL is invalid: {error}.", remedy=_SYNTAX) from None
    if parts.username is not None or parts.password is not None:
        raise UsageInvalid(
            f"{shown_url(text)} contains a user name or a password, which logs and ps would show.",
            remedy="Remove it; give a token for the hub with HF_TOKEN or --token-file.",
        )
    if not parts.hostname:
        raise UsageInvalid("The URL has no host.", remedy=_SYNTAX)
    is_hub = origin == origin_of(endpoint) or (parts.scheme == "https" and parts.hostname in _HUB_HOSTS)
    segments = [unquote(segment) for segment in parts.path.split("/") if segment]
    found = _page(segments, text) if is_hub else None
    is_heading = found is not None and found.file is None and not parts.fragment.startswith("sha256=")
    sha256 = None if is_heading else _pinned(parts.fragment, text)
    if found is not None:
        if sha256 is not None and found.file is None:
            raise UsageInvalid(
                f"{shown_url(text)} has a checksum but names no file.",
                remedy="Give the URL of the file, or remove the checksum.",
            )
        return replace(found, sha256=sha256)
    name = segments[-1] if segments else ""
    if not name.lower().endswith(".gguf") or not is_safe_path("/".join(segments)):
        raise UsageInvalid(
            f"{shown_url(text)} does not end in the name of a .gguf file.",
            remedy="Give the URL of the file, not of a web page.",
        )
    return UrlRef(parts._replace(fragment="").geturl(), sha256)


def _pinned(fragment: str, text: str) -> str | None:
    """The checksum after the # of a URL."""
    if not fragment:
        return None
    digest = _SHA256.fullmatch(fragment)
    if digest is None:
        raise UsageInvalid(
            f"{shown_url(text)}: the text after # is not a checksum.",
            remedy="Write #sha256= and 64 hexadecimal digits.",
        )
    return digest[1].lower()


def _page(segments: list[str], text: str) -> RepoRef | None:
    """The repository or file of a page of the hub; None for other pages."""
    if len(segments) < 2 or segments[0] in ("api", "datasets", "spaces"):
        return None
    name, colon, said = segments[1].partition(":")
    repo = f"{segments[0]}/{name}"
    if len(segments) == 2:
        return _repo(repo, said if colon else None, text)
    kind, revision, path = segments[2], "".join(segments[3:4]), "/".join(segments[4:])
    if kind in ("resolve", "blob") and path:
        if not path.lower().endswith(".gguf"):
            raise UsageInvalid(
                f"{shown_url(text)} is not a .gguf file.", remedy=f"Give the URL of one, or {repo}."
            )
        return _repo(repo, path, text, revision)
    if kind == "tree" and revision and not path:
        return _repo(repo, None, text, revision)
    raise UsageInvalid(
        f"{shown_url(text)} is neither a repository nor a file in one.",
        remedy=_SYNTAX,
    )


# --- URLs ----------------------------------------------------------------------------------------


def origin_of(url: str) -> tuple[str, str, int]:
    """Return the scheme, host and port, in lower case. Raises ValueError for an invalid URL."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise ValueError(f"the scheme is {scheme!r}, but must be https")
    return scheme, (parts.hostname or "").lower(), parts.port or _PORTS[scheme]


def shown_url(url: str) -> str:
    """Return the URL for messages: without query (signatures), user and fragment."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return printable(f"{parts.scheme}://{host}{port}{parts.path}")
    except ValueError:
        return "an invalid URL"


def split_urls(url: str) -> tuple[str, ...]:
    """Return the URLs of all parts of the model of ``url``, in order; only ``url`` if it has one file."""
    parts = urlsplit(url)
    found = _SPLIT_URL.fullmatch(parts.path)
    if found is None or not 1 <= int(found["count"]) <= _MAX_PARTS:
        return (url,)
    count = int(found["count"])
    return tuple(
        parts._replace(path=f"{found['prefix']}-{part:05d}-of-{count:05d}.gguf").geturl()
        for part in range(1, count + 1)
    )


def resolve_url(endpoint: str, ref: RepoRef, path: str, revision: str) -> str:
    """Return the URL of a file in a repository."""
    return f"{endpoint}/{ref.repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


def tree_url(endpoint: str, ref: RepoRef) -> str:
    """Return the URL of the list of files in a repository."""
    return f"{endpoint}/api/models/{ref.repo}/tree/{quote(ref.revision, safe='')}?recursive=true&expand=false"


# --- local paths --------------------------------------------------------------------------------------


def is_safe_path(path: str) -> bool:
    """Return whether a path from a server may be used below the models folder (X10)."""
    names = path.split("/")
    return len(path) < 1024 and all(map(_is_safe_name, names))


def _is_safe_name(name: str) -> bool:
    return (
        name.isprintable()
        and not name.startswith((".", "~"))
        and not name.endswith((".", " "))
        and not any(letter in name for letter in '\\:*?"<>|')
        and 0 < len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
    )


def local_path(ref: Ref, path: str) -> PurePosixPath:
    """Return the path of a file relative to the models folder; ``path`` is that in the repository or the URL.

    ``org/repo/…`` for repositories, ``@host/…`` for URLs; no organisation's name starts with @.
    """
    if isinstance(ref, RepoRef):
        return PurePosixPath(ref.repo) / path
    scheme, host, port = origin_of(ref.url)
    site = host.replace(":", "_") + ("" if port == _PORTS[scheme] else f"_{port}")
    *folders, name = [part for part in path.split("/") if part]
    # One level, since folders of models are searched only six levels deep.
    return PurePosixPath(f"@{site}", *([_folder_name(folders)] if folders else []), name)


def _folder_name(folders: list[str]) -> str:
    """A single folder name for nested folders, different for each path."""
    joined = "--".join(folders)
    is_plain = len(folders) == len(joined.split("--")) and not any(
        folder.startswith("-") or folder.endswith("-") for folder in folders
    )
    if is_plain and len(joined.encode()) <= _MAX_NAME_BYTES:
        return joined
    digest = hashlib.sha256("/".join(folders).encode()).hexdigest()[:16]
    tail = joined.encode()[-(_MAX_NAME_BYTES - len(digest) - 2) :].decode(errors="ignore")
    return f"{digest}--{tail}"
