"""What names a model that can be downloaded, and where in the models folder its files go.

A reference is a repository of a model hub (``org/repo``, ``org/repo:Q4_K_M``, ``org/repo:file.gguf``, a page
of the hub's own web site) or the https URL of a GGUF file. Nothing here asks anybody.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from llamasup.errors import UsageInvalid
from llamasup.system.text import printable

__all__ = [
    "HUB",
    "Ref",
    "RepoRef",
    "UrlRef",
    "asked_as",
    "is_reference",
    "is_safe_path",
    "local_path",
    "origin_of",
    "parse_ref",
    "resolve_url",
    "shown_url",
    "split_urls",
    "tree_url",
]

HUB = "https://huggingface.co"

_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PORTS = {"http": 80, "https": 443}
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")
# As llama.cpp finds the other parts of a set by the name of the first one (b11434).
_SPLIT_URL = re.compile(r"(?P<prefix>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 999
# Of the 255 that file systems take: a name gets ".part.json" behind it, and dots before it.
_MAX_NAME_BYTES = 220
_HOW = "Write org/repo, org/repo:QUANT, org/repo:FILE.gguf, or the https URL of a .gguf file."


@dataclass(frozen=True, slots=True)
class RepoRef:
    """A repository of the hub, and what of it is meant: ``quant`` or ``file`` (a path in it), or neither.

    ``sha256`` (lower-case hex) is what the file must have, where its URL says so.
    """

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str = "main"
    sha256: str | None = None

    def __str__(self) -> str:
        said = self.file or self.quant
        return f"{self.repo}:{said}" if said else self.repo


@dataclass(frozen=True, slots=True)
class UrlRef:
    """A GGUF file somewhere. ``sha256`` (lower-case hex) is what its URL says it must have."""

    url: str
    sha256: str | None = None

    def __str__(self) -> str:
        return shown_url(self.url)


Ref = RepoRef | UrlRef


def parse_ref(text: str, endpoint: str = HUB) -> Ref | None:
    """What ``text`` refers to; None where it is no reference but, say, a path.

    ``endpoint`` is the hub that is asked: URLs of its web site name repositories. Raises UsageInvalid for a
    reference that cannot be followed.
    """
    if text[:8].lower().startswith(("http://", "https://")):
        return _url(text, endpoint)
    prefix = next(
        (each for each in ("hf://", "hf:", "hf.co/", "huggingface.co/") if text.startswith(each)), ""
    )
    repo, colon, said = text.removeprefix(prefix).partition(":")
    if prefix == "hf://" and repo.count("/") > 1 and not colon:
        org, name, said = repo.split("/", 2)
        repo, colon = f"{org}/{name}", ":"
    if not prefix and (not _REPO.fullmatch(repo) or (not colon and repo.lower().endswith(".gguf"))):
        return None
    return _repo(repo, said if colon else None, text)


def asked_as(ref: Ref) -> tuple[str, ...]:
    """What a file downloaded for ``ref`` remembers of it, all that was said last; no query is shown."""
    if isinstance(ref, RepoRef):
        return (f"{ref.revision}:{ref.file or ref.quant or ''}",)
    url = split_urls(ref.url)[0]
    shown, query = shown_url(url), urlsplit(url).query
    return (shown, f"{shown}?{hashlib.sha256(query.encode()).hexdigest()}") if query else (shown,)


def is_reference(text: str) -> bool:
    """Whether ``text`` looks like a reference rather than a path; it may still be a wrong one."""
    try:
        return parse_ref(text) is not None
    except UsageInvalid:
        return True


def _repo(repo: str, said: str | None, text: str, revision: str = "main") -> RepoRef:
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise UsageInvalid(f"{printable(text)!r} names no repository.", remedy=_HOW)
    if said is None:
        return RepoRef(repo, revision=revision)
    if said.lower().endswith(".gguf"):
        if not is_safe_path(said):
            raise UsageInvalid(
                f"{printable(text)!r}: {printable(said)!r} is no file of a repository.",
                remedy="Give its path as the repository's page shows it.",
            )
        return RepoRef(repo, file=said, revision=revision)
    if not _QUANT.fullmatch(said):
        raise UsageInvalid(
            f"{printable(text)!r}: {printable(said)!r} is neither a quantization nor a .gguf file.",
            remedy=f"Such as {repo}:Q4_K_M or {repo}:FILE.gguf.",
        )
    return RepoRef(repo, quant=said, revision=revision)


def _url(text: str, endpoint: str) -> Ref:
    try:
        parts = urlsplit(text)
        origin = origin_of(text)
    except ValueError as error:  # it is not shown: where its query begins cannot be told
        raise UsageInvalid(f"What is given is no URL: {error}.", remedy=_HOW) from None
    if parts.username is not None or parts.password is not None:
        raise UsageInvalid(
            f"{shown_url(text)} carries a user name or a password, which would be seen in logs and by ps.",
            remedy="Leave them out; a token for the hub comes from HF_TOKEN or --token-file.",
        )
    if not parts.hostname:
        raise UsageInvalid("The URL that is given names no host.", remedy=_HOW)
    is_hub = origin == origin_of(endpoint) or (parts.scheme == "https" and parts.hostname in _HUB_HOSTS)
    segments = [unquote(each) for each in parts.path.split("/") if each]
    found = _page(segments, text) if is_hub else None
    is_heading = found is not None and found.file is None and not parts.fragment.startswith("sha256=")
    sha256 = None if is_heading else _pinned(parts.fragment, text)
    if found is not None:
        if sha256 is not None and found.file is None:
            raise UsageInvalid(
                f"{shown_url(text)} names no file, and a checksum is that of one.",
                remedy="Give the URL of the file, or leave the checksum out.",
            )
        return replace(found, sha256=sha256)
    name = segments[-1] if segments else ""
    if not name.lower().endswith(".gguf") or not is_safe_path("/".join(segments)):
        raise UsageInvalid(
            f"{shown_url(text)} does not end in the name of a .gguf file.",
            remedy="Give the URL of the file itself, not of a page about it.",
        )
    return UrlRef(parts._replace(fragment="").geturl(), sha256)


def _pinned(fragment: str, text: str) -> str | None:
    """The checksum behind the # of a URL."""
    if not fragment:
        return None
    digest = _SHA256.fullmatch(fragment)
    if digest is None:
        raise UsageInvalid(
            f"{shown_url(text)}: behind the # is not a checksum.",
            remedy="Write #sha256= and 64 hexadecimal digits.",
        )
    return digest[1].lower()


def _page(segments: list[str], text: str) -> RepoRef | None:
    """What a page of the hub's web site is about; None where it is about no model's repository."""
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
                f"{shown_url(text)} is no .gguf file.", remedy=f"Give one, or all of it: {repo}"
            )
        return _repo(repo, path, text, revision)
    if kind == "tree" and revision and not path:
        return _repo(repo, None, text, revision)
    raise UsageInvalid(
        f"{shown_url(text)} is neither a repository nor a file of one.",
        remedy=_HOW,
    )


# --- URLs ----------------------------------------------------------------------------------------


def origin_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port, in lower case. Raises ValueError for what is no such URL."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise ValueError(f"its scheme is {scheme!r}, and has to be https")
    return scheme, (parts.hostname or "").lower(), parts.port or _PORTS[scheme]


def shown_url(url: str) -> str:
    """For people and logs: without query (signatures), user and fragment."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return printable(f"{parts.scheme}://{host}{port}{parts.path}")
    except ValueError:
        return "a URL that cannot be read"


def split_urls(url: str) -> tuple[str, ...]:
    """The URLs of all files of the set that ``url`` is a part of, first part first; just itself of no set."""
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
    """Where the hub has a file of a repository."""
    return f"{endpoint}/{ref.repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


def tree_url(endpoint: str, ref: RepoRef) -> str:
    """Where the hub lists the files of a repository."""
    return f"{endpoint}/api/models/{ref.repo}/tree/{quote(ref.revision, safe='')}?recursive=true&expand=false"


# --- places --------------------------------------------------------------------------------------


def is_safe_path(path: str) -> bool:
    """Whether a path that somebody else has named may be one below the models folder (X10)."""
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
    """Where a file goes, relative to the models folder; ``path``: in the repository, or of a URL.

    ``org/repo/…`` as in the repository; ``@host/…`` for URLs, which is no organisation's name.
    """
    if isinstance(ref, RepoRef):
        return PurePosixPath(ref.repo) / path
    scheme, host, port = origin_of(ref.url)
    place = host.replace(":", "_") + ("" if port == _PORTS[scheme] else f"_{port}")
    *folders, name = [each for each in path.split("/") if each]
    # One level: folders of models are looked into six levels deep, and no more.
    return PurePosixPath(f"@{place}", *([_joined(folders)] if folders else []), name)


def _joined(folders: list[str]) -> str:
    """One folder's name for several within each other; no two paths have the same."""
    joined = "--".join(folders)
    is_plain = len(folders) == len(joined.split("--")) and not any(
        each.startswith("-") or each.endswith("-") for each in folders
    )
    if is_plain and len(joined.encode()) <= _MAX_NAME_BYTES:
        return joined
    digest = hashlib.sha256("/".join(folders).encode()).hexdigest()[:16]
    kept = joined.encode()[-(_MAX_NAME_BYTES - len(digest) - 2) :].decode(errors="ignore")
    return f"{digest}--{kept}"
