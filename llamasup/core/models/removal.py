"""Removes a model from the models folder: its files, its projector and its unfinished downloads.

Touches no file outside of the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.files import parts_of
from llamasup.core.hub.choose import quant_tag
from llamasup.core.hub.part_file import Busy, PartFile, leftovers_of
from llamasup.core.hub.reference import Ref, RepoRef, UrlRef, parse_ref
from llamasup.core.hub.store import downloaded, paths_of_url
from llamasup.core.models.by_name import did_you_mean, file_of
from llamasup.core.models.file_use import adapters_in
from llamasup.core.models.folder import list_models
from llamasup.core.models.found import FoundModel, projector_going_with
from llamasup.core.system.storage.paths import PathKind, path_kind
from llamasup.core.system.text import printable
from llamasup.errors import FolderUnusable, LlamasupError, ModelMissing, UsageInvalid

if TYPE_CHECKING:
    import psutil

_MAX_LINKS = 40  # as Linux follows


class Removal(Struct, frozen=True):
    """One model to remove, by the user's ``name``. ``leftovers`` are records and unfinished downloads."""

    name: str
    files: tuple[Path, ...]
    leftovers: tuple[Path, ...]

    @property
    def downloads(self) -> tuple[Path, ...]:
        """The unfinished downloads among the leftovers."""
        return tuple(path for path in self.leftovers if path.name.endswith(".part"))

    @property
    def entries(self) -> frozenset[str]:
        """The entries of folders that are removed."""
        return frozenset(str(_resolved(path)) for path in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(path.lstat().st_size for path in (*self.files, *self.leftovers))


def to_remove(names: Iterable[str], folder: Path, endpoint: str) -> tuple[Removal, ...]:
    """Find the models with these ``names``, each file once.

    A name is a path in the folder, a name in ``list``, or a reference.

    Raises ModelMissing, UsageInvalid for an ambiguous name, and FolderUnusable for a file outside the folder.
    """
    removals: list[Removal] = []
    going: set[Path] = set()
    for name in names:
        removal = _removal(name, folder, endpoint, going)
        removal = replace(
            removal,
            files=tuple(path for path in removal.files if path not in going),
            leftovers=tuple(path for path in removal.leftovers if path not in going),
        )
        going |= {*removal.files, *removal.leftovers}
        if removal.files or removal.leftovers:  # else an earlier name stood for the same files
            removals.append(removal)
    return tuple(removals)


def _removal(name: str, folder: Path, endpoint: str, going: Set[Path]) -> Removal:
    """Collect the files of one model. ``going`` are the files of earlier names."""
    first = _path_of(name, folder)
    if first is None:
        ref = parse_ref(name, endpoint)
        if isinstance(ref, UrlRef):
            name = str(ref)  # without its query
        found = downloaded(ref, folder) if ref is not None else None
        if found is not None:
            parts = found.parts
        elif (listed := file_of(name, folders=(folder,), required=False)) != name:
            parts = parts_of(Path(listed))
        else:
            return _only_leftovers(name, ref, folder)
    else:
        parts = parts_of(first)
    parts = tuple(file for file in parts if file.is_symlink() or file.exists())
    for file in parts:
        _refuse_outside(file, folder)
    files = (*parts, *_projector_going_with(parts, folder, going))
    return Removal(name, files, tuple(leftover for file in files for leftover in leftovers_of(file)))


def entries_of(path: str) -> tuple[str, ...]:
    """List the entries of folders that a load of this file reads (``file_use``). Blocks."""
    return tuple(str(entry) for part in parts_of(Path(path)) for entry in _links_of(part))


def _links_of(path: Path) -> Iterator[Path]:
    """The path with its folder resolved, and, if it is a link, where it leads."""
    for _ in range(_MAX_LINKS):
        path = _resolved(path)
        yield path
        try:
            path = path.parent / path.readlink()
        except OSError:  # not a link
            return


def _projector_going_with(parts: Sequence[Path], folder: Path, going: Set[Path]) -> list[Path]:
    """The projector, if no remaining model and no unfinished download may need it."""
    if not parts:
        return []
    gone = {_resolved(path) for path in going}
    found: dict[Path, FoundModel] = {}
    # Also list the folder of the model, which may be below the depth of the first list.
    for top, deepest in ((folder, None), (parts[0].parent, 0)):
        with contextlib.suppress(LlamasupError):
            models = list_models(top) if deepest is None else list_models(top, deepest=deepest)
            for model in models.models:
                path = _resolved(Path(model.path))
                if path not in gone:
                    found[path] = replace(model, path=str(path))
    projector = projector_going_with(str(_resolved(parts[0])), list(found.values()))
    if projector is None:
        return []
    path = parts[0].with_name(Path(projector).name)
    return [] if _has_unfinished(path.parent, {path, *parts, *going}) else [path]


def _has_unfinished(folder: Path, going: Set[Path]) -> bool:
    """Whether ``folder`` holds an unfinished download of another file than those ``going``.

    It may be another quantization of the model, which shares the projector.
    """
    gone = {_resolved(path) for path in going}
    with contextlib.suppress(OSError):
        for part in folder.glob("*.part"):
            path = part.with_suffix("")
            if _resolved(path) not in gone and _resolved(part) not in gone and part in leftovers_of(path):
                return True
    return False


def _resolved(path: Path) -> Path:
    """The path with its folder resolved, but not the file itself, which may be a link."""
    return path.parent.resolve() / path.name


def refuse_loaded(removal: Removal) -> None:
    """Refuse files with which a process of this user was started. Raises UsageInvalid."""
    import psutil

    files = {str(file.resolve()) for file in removal.files}
    for process in psutil.process_iter(["cmdline"]):
        command_line = process.info["cmdline"] or ()
        # llama-server has the path after a flag; a program that only reads the file has it as an argument.
        values = [value for flag, value in pairwise(command_line) if flag.startswith("-")]
        paths = (path for value in values for path in (value, *adapters_in(value)))
        models = [path for path in paths if path.lower().endswith(".gguf")]
        if models and not files.isdisjoint(_real_paths(models, process)):
            raise UsageInvalid(
                f"{printable(removal.name)} is loaded by process {process.pid}.",
                remedy="Unload it first (llamasup unload MODEL), or stop that process.",
            )


def _real_paths(paths: Sequence[str], process: psutil.Process) -> Iterator[str]:
    """The paths, relative to the working directory of ``process``."""
    import psutil

    try:
        folder = process.cwd()
    except psutil.Error:  # another user's process, or an ended one
        folder = "/"
    return (os.path.realpath(os.path.join(folder, path)) for path in paths)  # noqa: PTH118 - text, as given


def remove(removal: Removal, folder: Path) -> None:
    """Remove the files, the leftovers, and folders that become empty.

    Raises FolderUnusable, and UsageInvalid while another process downloads the model.
    """
    try:
        unfinished = [PartFile(path.with_suffix("")) for path in removal.downloads]
    except Busy as busy:
        raise UsageInvalid(
            f"{removal.name} is being downloaded by process {busy.pid}.",
            remedy="Stop that process first.",
        ) from None
    try:
        for part_file in unfinished:
            part_file.discard()
        # The first part last: until then the files are a model with missing parts.
        for path in (*reversed(removal.files), *removal.leftovers):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderUnusable(
            f"{error.filename}: cannot be removed: {error.strerror}.",
            remedy="Check the owner and the permissions of its folder.",
        ) from None
    for path in (*removal.files, *removal.leftovers):
        _remove_empty(path.parent, folder)


def _path_of(name: str, folder: Path) -> Path | None:
    """The file at ``name`` as a path, from the working folder or the models folder; None if there is none."""
    for path in (Path(name), folder / name):
        try:
            path = path.expanduser().absolute()
            is_model = path.name.lower().endswith(".gguf") and (path.is_symlink() or path.is_file())
        except (OSError, RuntimeError):  # too long for a path; no such user
            continue
        if is_model:
            _refuse_outside(path, folder)
            return path
    return None


def _refuse_outside(path: Path, folder: Path) -> None:
    # The folder of the path decides: a link is removed, not its target.
    if not path.parent.resolve().is_relative_to(folder.resolve()) or ".." in path.parts:
        raise FolderUnusable(
            f"{printable(str(path))} is not in the models folder {folder}.",
            remedy="Remove it by hand, or give its folder with --folder.",
        )


def _only_leftovers(name: str, ref: Ref | None, folder: Path) -> Removal:
    """An unfinished download without a complete file."""
    unfinished: list[Path] = []
    match ref:
        case RepoRef():
            top = folder / ref.repo
            found = (part.with_suffix("") for part in sorted(top.rglob("*.part")))
            unfinished = [part for part in found if _is_of(ref, str(part.relative_to(top)))]
        case UrlRef():
            unfinished = list(paths_of_url(ref, folder))
        case None:
            pass
    # Keep the record of origin of a complete file.
    leftovers = tuple(
        leftover
        for path in unfinished
        for leftover in leftovers_of(path)
        if leftover.name.startswith(f"{path.name}.part") or path_kind(path) is not PathKind.FILE
    )
    for leftover in leftovers:
        _refuse_outside(leftover, folder)
    if leftovers:
        return Removal(name, (), leftovers)
    near = did_you_mean(name, folder) if ref is None else ""
    raise ModelMissing(
        f"{folder} has no model {printable(name)!r}.",
        remedy=f"{near}Give a name of `llamasup list`, a path in that folder, or org/repo[:quant].",
    )


def _is_of(ref: RepoRef, path: str) -> bool:
    if ref.file is not None:
        return path == ref.file
    return ref.quant is None or quant_tag(path) == (quant_tag(ref.quant) or ref.quant.upper())


def _remove_empty(path: Path, folder: Path) -> None:
    top = folder.resolve()
    path = path.resolve()
    while path != top and path.is_relative_to(top):
        try:
            path.rmdir()
        except OSError:  # not empty, or gone already
            return
        path = path.parent
