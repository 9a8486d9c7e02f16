"""The model hub on this machine: downloaded models by their reference, its address, and its token.

Nothing here sends a request. Address and token come from the sources of the hub's own tools. Messages show no
token (X13).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.hub.choose import Choice, RepoFile, choose
from llamasup.core.hub.part_file import add_names, origin_of_file
from llamasup.core.hub.reference import (
    HUB,
    Ref,
    RepoRef,
    UrlRef,
    local_path,
    names_of,
    origin_of,
    parse_ref,
    shown_url,
    split_urls,
)
from llamasup.core.system.storage.folders import read_bounded
from llamasup.core.system.storage.paths import PathKind, expanded, path_kind
from llamasup.core.system.text import printable
from llamasup.errors import ConfigInvalid, LlamasupError, UsageInvalid

_MAX_FILES = 10_000  # of one repository
_MAX_DEPTH = 6
_MAIN = "main"


class FetchedModel(Struct, frozen=True):
    """The absolute paths of a downloaded model. ``path`` is the file to load: the first of the ``parts``."""

    path: Path
    parts: tuple[Path, ...]
    mmproj: Path | None = None


class DownloadSettings(Struct, frozen=True, kw_only=True):
    """The settings of downloads. ``folder`` is the absolute path for downloads; ``others`` are searched only.
    ``endpoint`` and ``token_file``: None for those of the environment.
    """

    folder: Path
    others: tuple[Path, ...] = ()
    endpoint: str | None = None
    token_file: Path | None = None
    private_addresses: bool = False
    allow_http: bool = False
    parallel: int = 4

    def find(self, ref: str, environ: Mapping[str, str]) -> FetchedModel | None:
        """Return the model of ``ref``, if it is in one of the folders. Blocks."""
        parsed = parse_ref(ref, hub_endpoint(environ, self.endpoint))
        if parsed is None:
            return None
        return next(
            filter(None, (downloaded(parsed, folder) for folder in (self.folder, *self.others))), None
        )


def downloaded(ref: Ref, folder: Path) -> FetchedModel | None:
    """Return the model of ``ref`` in the models ``folder``; None if it is missing or incomplete.

    A reference without a quantization matches any that is there, and of several the one that would be
    downloaded; likewise the revision and the query of a URL. A quantization, revision or query that is given
    must match exactly. Raises UsageInvalid if several models match.
    """
    found = _from_repo(ref, folder) if isinstance(ref, RepoRef) else _from_url(ref, folder)
    if found is None or ref.sha256 is None:
        return found
    origin = origin_of_file(found.path)
    return found if len(found.parts) == 1 and origin is not None and origin.sha256 == ref.sha256 else None


def record_names(ref: Ref, model: FetchedModel, folder: Path) -> None:
    """Record that ``ref`` refers to ``model``, so that ``downloaded`` finds it without the hub.

    Raises the errors of ``add_names``.
    """
    with contextlib.suppress(UsageInvalid):
        found = downloaded(ref, folder)
        if found is not None and found.path == model.path:
            return
    add_names(model.path, names_of(ref))


def _from_repo(ref: RepoRef, folder: Path) -> FetchedModel | None:
    top = folder / ref.repo
    files = list(_files(top))
    ambiguous: UsageInvalid | None = None
    if ref.revision == _MAIN:
        try:
            return _fetched(top, choose(ref, files, exact=True))
        except UsageInvalid as error:
            ambiguous = error
        except LlamasupError:
            pass
    (name,) = names_of(ref)
    known = {file.path: origin_of_file(top / file.path) for file in files}
    named = [(origin.mtime_ns, path) for path, origin in known.items() if origin and name in origin.names]
    if named:  # the latest one, if the repository has changed
        _, path = max(named)
        with contextlib.suppress(LlamasupError):
            return _fetched(top, choose(replace(ref, file=path, quant=None), files, exact=True))
    if ambiguous is not None:
        raise ambiguous
    return None


def _from_url(ref: UrlRef, folder: Path) -> FetchedModel | None:
    paths = paths_of_url(ref, folder)
    if any(path_kind(path) is not PathKind.FILE for path in paths):
        return None
    model = FetchedModel(paths[0], paths)
    origin = origin_of_file(model.path)
    name = names_of(ref)[-1]
    if origin is None:  # not downloaded by llamasup: only its path is known
        return None if "?" in name else model
    return model if name in (*origin.names, origin.url) else None


def paths_of_url(ref: UrlRef, folder: Path) -> tuple[Path, ...]:
    return tuple(folder / local_path(ref, unquote(urlsplit(url).path)) for url in split_urls(ref.url))


def _fetched(top: Path, choice: Choice) -> FetchedModel:
    parts = tuple(top / part.path for part in choice.parts)
    return FetchedModel(parts[0], parts, top / choice.projector.path if choice.projector else None)


def _files(top: Path) -> Iterator[RepoFile]:
    """The GGUF files below ``top``, as a list of the repository."""
    waiting = [(top, "", 0)]
    seen = 0
    while waiting:
        folder, prefix, depth = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > _MAX_FILES or entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < _MAX_DEPTH:
                    waiting.append((folder / entry.name, f"{prefix}{entry.name}/", depth + 1))
            elif entry.name.lower().endswith(".gguf"):
                # Circular links, unreadable targets and deleted files are skipped.
                with contextlib.suppress(OSError):
                    if entry.is_file():
                        yield RepoFile(prefix + entry.name, entry.stat().st_size)


# --- the hub and its token ------------------------------------------------------------------------


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
    home = environ.get("HF_HOME") or os.path.join(  # noqa: PTH118 - HF_HOME is also text
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
