"""Removes a model of the models folder: its files, its projector, and what its downloads left unfinished.

Nothing outside the folder is ever touched (X10).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from llamasup.downloads.choose import quant_tag
from llamasup.downloads.part_file import Busy, PartFile, leftovers_of
from llamasup.downloads.reference import Ref, RepoRef, UrlRef, parse_ref
from llamasup.downloads.store import downloaded, is_file, paths_of_url
from llamasup.errors import FolderUnusable, LlamasupError, ModelMissing, UsageInvalid
from llamasup.gguf.files import split_name, split_paths
from llamasup.models.attachments import projector_going_with
from llamasup.models.folder import list_models
from llamasup.models.found import FoundModel
from llamasup.system.text import printable

__all__ = ["Removal", "remove", "to_remove"]


@dataclass(frozen=True, slots=True)
class Removal:
    """One model to remove: its ``files``, and ``leftovers``: llamasup's records and unfinished downloads.

    ``name``: as the user gave it.
    """

    name: str
    files: tuple[Path, ...]
    leftovers: tuple[Path, ...]

    @property
    def downloads(self) -> tuple[Path, ...]:
        """The unfinished downloads among the leftovers."""
        return tuple(each for each in self.leftovers if each.name.endswith(".part"))

    @property
    def size_bytes(self) -> int:
        return sum(each.lstat().st_size for each in (*self.files, *self.leftovers))


def to_remove(names: Iterable[str], folder: Path, endpoint: str) -> tuple[Removal, ...]:
    """What each of the ``names`` (a path in the folder, or a reference) stands for; nothing of it twice.

    Raises ModelMissing, UsageInvalid where several models are meant, and FolderUnusable for what is not in
    the folder.
    """
    removals: list[Removal] = []
    going: set[Path] = set()
    for name in names:
        removal = _removal(name, folder, endpoint, going)
        removal = replace(
            removal,
            files=tuple(each for each in removal.files if each not in going),
            leftovers=tuple(each for each in removal.leftovers if each not in going),
        )
        going |= {*removal.files, *removal.leftovers}
        if removal.files or removal.leftovers:  # else it has been named before
            removals.append(removal)
    return tuple(removals)


def _removal(name: str, folder: Path, endpoint: str, going: Set[Path]) -> Removal:
    """Where those ``going`` are no longer there."""
    first = _path_of(name, folder)
    if first is None:
        ref = parse_ref(name, endpoint)
        if isinstance(ref, UrlRef):
            name = str(ref)  # without its query
        found = downloaded(ref, folder) if ref is not None else None
        if found is None:
            return _only_leftovers(name, ref, folder)
        parts = found.parts
    else:
        part = split_name(first.name)
        parts = (first,)
        if part is not None:
            number = int(part.first.removesuffix(".gguf")[-5:])
            parts = tuple(split_paths(first.with_name(part.first), number))
            if first not in parts:  # part 3 of 2
                parts = (first,)
    parts = tuple(each for each in parts if each.is_symlink() or each.exists())
    for each in parts:
        _refuse_outside(each, folder)
    files = (*parts, *_projector_going_with(parts, folder, going))
    return Removal(name, files, tuple(each for file in files for each in leftovers_of(file)))


def _projector_going_with(parts: Sequence[Path], folder: Path, going: Set[Path]) -> list[Path]:
    """The projector, if no remaining model (core.companions) and no unfinished download may need it."""
    if not parts:
        return []
    gone = {_place(each) for each in going}
    found: dict[Path, FoundModel] = {}
    # Also list the folder of the model, which may be deeper than the listing of ``folder`` goes.
    for top, deepest in ((folder, None), (parts[0].parent, 0)):
        with contextlib.suppress(LlamasupError):
            models = list_models(top) if deepest is None else list_models(top, deepest=deepest)
            for each in models.models:
                place = _place(Path(each.path))
                if place not in gone:
                    found[place] = replace(each, path=str(place))
    projector = projector_going_with(str(_place(parts[0])), list(found.values()))
    if projector is None:
        return []
    path = parts[0].with_name(Path(projector).name)
    return [] if _has_unfinished(path.parent, {path, *parts, *going}) else [path]


def _has_unfinished(folder: Path, going: Set[Path]) -> bool:
    """Whether ``folder`` holds an unfinished download of another file than those ``going``.

    It may be another quantization of the model, which shares the projector.
    """
    gone = {_place(each) for each in going}
    with contextlib.suppress(OSError):
        for part in folder.glob("*.part"):
            path = part.with_suffix("")
            if _place(path) not in gone and _place(part) not in gone and part in leftovers_of(path):
                return True
    return False


def _place(path: Path) -> Path:
    """The path with its folder resolved, but not the file itself, which may be a link."""
    return path.parent.resolve() / path.name


def remove(removal: Removal, folder: Path) -> None:
    """Remove the files and what is beside them, and folders that are empty then.

    Raises FolderUnusable, and UsageInvalid where a download of it goes on.
    """
    try:
        unfinished = [PartFile(path.with_suffix("")) for path in removal.downloads]
    except Busy as busy:
        raise UsageInvalid(
            f"{removal.name} is being downloaded by process {busy.pid}.",
            remedy="Stop that one first.",
        ) from None
    try:
        for each in unfinished:
            each.discard()
        # The first part last: until then it is a model that lacks something, afterwards none at all.
        for path in (*reversed(removal.files), *removal.leftovers):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderUnusable(
            f"{error.filename}: cannot be removed: {error.strerror}.",
            remedy="Check who owns the folder that it is in.",
        ) from None
    for path in (*removal.files, *removal.leftovers):
        _remove_empty(path.parent, folder)


def _path_of(name: str, folder: Path) -> Path | None:
    """The file that ``name`` is as a path, from here or from the models folder; None where it is none."""
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
    # The folder that it is in decides: a link that is a model's file is removed, not what it leads to.
    if not path.parent.resolve().is_relative_to(folder.resolve()) or ".." in path.parts:
        raise FolderUnusable(
            f"{printable(str(path))} is not in the models folder {folder}.",
            remedy="Remove it by hand, or name its folder with --folder.",
        )


def _only_leftovers(name: str, ref: Ref | None, folder: Path) -> Removal:
    """Of a download that was never finished."""
    unfinished: list[Path] = []
    match ref:
        case RepoRef():
            top = folder / ref.repo
            found = (each.with_suffix("") for each in sorted(top.rglob("*.part")))
            unfinished = [each for each in found if _is_of(ref, str(each.relative_to(top)))]
        case UrlRef():
            unfinished = list(paths_of_url(ref, folder))
        case None:
            pass
    # Keep the record of origin of a complete file.
    beside = tuple(
        each
        for path in unfinished
        for each in leftovers_of(path)
        if each.name.startswith(f"{path.name}.part") or not is_file(path)
    )
    for each in beside:
        _refuse_outside(each, folder)
    if beside:
        return Removal(name, (), beside)
    raise ModelMissing(
        f"There is no {printable(name)} in {folder}.",
        remedy="Give a path in that folder, or org/repo[:quant]; llamasup list shows what there is.",
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
