"""Chooses the files of a model in a repository: one quantization, all its parts, its projector.

Only names and sizes of files are known. llamasup chooses as llama.cpp does (common/download.cpp, b11434):
Q4_K_M by default, no drafts or importance matrices, a projector from the model's folder or one above. Unlike
llama.cpp, several matching models are an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from llamasup.core.gguf.tensor_types import PREFERRED_TYPES, name_words
from llamasup.core.hub.reference import RepoRef, is_safe_path
from llamasup.core.system.text import memory_text
from llamasup.errors import ModelInvalid, ModelMissing, UsageInvalid

DEFAULT = "Q4_K_M"
# The default and types of about its size first, then larger ones (slower, not worse), then smaller ones
# (worse). A model with MXFP4 was trained in it.
_PREFERENCE = (
    *("Q4_K_M", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "UD-Q4_K_M", "Q4_0"),
    *("IQ4_NL", "IQ4_XS", "Q4_1", "NVFP4", "Q5_K_M", "UD-Q5_K_XL", "Q5_K_L", "Q5_K_S", "Q5_0", "Q5_1"),
    *("Q6_K", "UD-Q6_K_XL", "Q6_K_L", "Q8_0", "UD-Q8_K_XL", "Q3_K_XL", "UD-Q3_K_XL", "Q3_K_L", "Q3_K_M"),
    *("IQ3_M", "Q3_K_S", "IQ3_S", "IQ3_XS", "F16", "BF16", "F32", "IQ3_XXS", "UD-IQ3_XXS", "Q2_K_L"),
    *("UD-Q2_K_XL", "Q2_K", "IQ2_M", "UD-IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "UD-IQ2_XXS", "TQ2_0"),
    *("TQ1_0", "IQ1_M", "UD-IQ1_M", "IQ1_S", "UD-IQ1_S"),
)
_RANK = {tag: rank for rank, tag in enumerate(_PREFERENCE)}
_TAG = re.compile(
    r"(?<![A-Za-z0-9])(?:UD[-_.])?"
    r"(?:I?Q\d(?:_(?:[0-9KSML]|K|X?XS|XL|NL))*|TQ\d_\d|(?:MX|NV)FP4(?:[-_]MOE)?|BF16|FP?16|FP?32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SPLIT = re.compile(
    r"(?P<prefix>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.DOTALL | re.IGNORECASE
)
_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_MAX_LISTED = 40
_MAX_UNSAFE_LISTED = 5
_MAX_NAME_SHOWN = 200  # characters of a name from a server


class RepoFile(Struct, frozen=True):
    """A file of a repository: ``path`` in the repository; ``size`` in bytes; ``sha256`` in lower-case hex, if
    the hub has it.
    """

    path: str
    size: int
    sha256: str | None = None


class Choice(Struct, frozen=True):
    """The chosen files: ``parts`` of the model in order; ``name``: the quantization or file that gives the
    same choice again; ``notes`` for the user.
    """

    parts: tuple[RepoFile, ...]
    projector: RepoFile | None
    name: str
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[RepoFile, ...]:
        """All files: the small projector first, so that errors of the repository show early."""
        return self.parts if self.projector is None else (self.projector, *self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class _Candidate(Struct, frozen=True):
    """The files of one model. ``tag`` is the quantization in its name, or ""."""

    files: tuple[RepoFile, ...]
    tag: str
    count: int

    @property
    def first(self) -> RepoFile:
        return self.files[0]

    @property
    def depth(self) -> int:
        return self.first.path.count("/")


def choose(ref: RepoRef, files: Iterable[RepoFile], *, exact: bool = False) -> Choice:
    """Return the files of ``ref`` among all ``files`` of the repository.

    With ``exact``, similar names do not match.

    Raises ModelMissing if none match, UsageInvalid if several models match, and ModelInvalid if a part is
    missing, each with a list of the models.
    """
    all_files = [file for file in files if file.path.lower().endswith(".gguf")]
    safe = [file for file in all_files if is_safe_path(file.path)]
    unsafe = [file.path for file in all_files if not is_safe_path(file.path)]
    notes = tuple(
        f"{path[:_MAX_NAME_SHOWN]!a} is ignored: its name is not safe as a path"
        for path in unsafe[:_MAX_UNSAFE_LISTED]
    )
    if len(unsafe) > _MAX_UNSAFE_LISTED:
        notes += (f"and {len(unsafe) - _MAX_UNSAFE_LISTED} more",)
    candidates = sorted(_candidates(safe), key=lambda candidate: (_rank(candidate), candidate.first.path))
    if ref.file is not None:
        chosen, reason = _by_file(ref, safe, candidates, exact=exact), "the file asked for"
    elif ref.quant is not None:
        chosen, reason = _by_quant(ref, ref.quant, candidates, exact=exact)
    else:
        chosen, reason = _default(ref, candidates)
    if len(chosen.files) != chosen.count:
        raise ModelInvalid(
            f"{ref.repo} has {len(chosen.files)} of the {chosen.count} parts of "
            f"{PurePosixPath(chosen.first.path).name}.",
            remedy="Choose another quantization.",
            details=_listed(candidates),
        )
    projector, more = _projector(chosen, safe)
    alone = chosen.tag and sum(candidate.tag == chosen.tag for candidate in candidates) == 1
    name = chosen.tag if alone else chosen.first.path
    return Choice(chosen.files, projector, name, reason, (*notes, *more))


def _candidates(files: Sequence[RepoFile]) -> list[_Candidate]:
    found: dict[tuple[str, int, str], dict[int, RepoFile]] = {}
    for file in files:
        if any(word in PurePosixPath(file.path).name.lower() for word in _NOT_MODELS):
            continue
        part = _SPLIT.fullmatch(file.path)
        key = (part["prefix"], int(part["count"]), part["ending"]) if part else (file.path, 1, "")
        found.setdefault(key, {})[int(part["part"]) if part else 1] = file
    return [
        _Candidate(tuple(parts[number] for number in sorted(parts)), quant_tag(name), count)
        for (name, count, _), parts in found.items()
    ]


def quant_tag(path: str) -> str:
    """Return the quantization in a path, such as ``Q4_K_M``: from the name, else from the folders."""
    for name in reversed(path.removesuffix(".gguf").split("/")):
        if found := _TAG.findall(name):
            tag = re.sub(r"[-.]", "_", found[-1].upper())
            tag = re.sub(r"^UD_", "UD-", tag)
            return re.sub(r"^FP(16|32)$", r"F\1", tag)
    return ""


def _rank(candidate: _Candidate) -> int:
    return _RANK.get(candidate.tag, len(_RANK))


# --- the model -----------------------------------------------------------------------------------


def _by_file(
    ref: RepoRef, files: Sequence[RepoFile], candidates: Sequence[_Candidate], *, exact: bool
) -> _Candidate:
    wanted = ref.file or ""
    same = [file for file in files if file.path == wanted]
    if not same and not exact:
        name = PurePosixPath(wanted.lower()).name
        same = [file for file in files if PurePosixPath(file.path).name.lower() == name]
    if not same:
        raise ModelMissing(
            f"{ref.repo} has no file {wanted}.", remedy=_remedy(ref, candidates), details=_listed(candidates)
        )
    if len(same) > 1:
        raise _ambiguous(ref, [_Candidate((file,), quant_tag(file.path), 1) for file in same])
    (file,) = same
    return next(
        (candidate for candidate in candidates if file in candidate.files),
        _Candidate((file,), quant_tag(file.path), 1),
    )


def _by_quant(
    ref: RepoRef, quant: str, candidates: Sequence[_Candidate], *, exact: bool
) -> tuple[_Candidate, str]:
    wanted = quant_tag(quant) or quant.upper()
    same = [candidate for candidate in candidates if candidate.tag == wanted]
    if same:
        return _topmost(ref, same), "the quantization asked for"
    # llama.cpp also accepts a part of the name, such as q4, or the name of a variant.
    near = [
        candidate
        for candidate in candidates
        if not exact
        and (wanted in re.split(r"[^A-Z0-9]", candidate.tag) or _is_word(wanted, candidate.first.path))
    ]
    if near:
        best = _topmost(ref, [candidate for candidate in near if candidate.tag == near[0].tag])
        return best, f"{best.tag or PurePosixPath(best.first.path).name} matches {quant}"
    raise ModelMissing(
        f"{ref.repo} has no quantization {quant}.",
        remedy=_remedy(ref, candidates),
        details=_listed(candidates),
    )


def _is_word(word: str, path: str) -> bool:
    return re.search(rf"(?<![A-Z0-9]){re.escape(word)}(?![A-Z0-9])", path.upper()) is not None


def _default(ref: RepoRef, candidates: Sequence[_Candidate]) -> tuple[_Candidate, str]:
    if not candidates:
        raise ModelMissing(
            f"{ref.repo} has no GGUF file of a model.",
            remedy="Choose a repository of the same model whose name ends in -GGUF.",
        )
    best = _topmost(ref, [candidate for candidate in candidates if candidate.tag == candidates[0].tag])
    if len(candidates) == 1:
        return best, "the only model"
    if best.tag == DEFAULT:
        return best, f"{DEFAULT}, the default of llama.cpp: small, with little loss of quality"
    return best, f"there is no {DEFAULT}; {best.tag} is closest to it"


def _topmost(ref: RepoRef, same: Sequence[_Candidate]) -> _Candidate:
    """The candidate in the topmost folder. Raises UsageInvalid if there are two."""
    highest = min(candidate.depth for candidate in same)
    top = [candidate for candidate in same if candidate.depth == highest]
    if len(top) > 1:
        raise _ambiguous(ref, top)
    return top[0]


# --- projectors ----------------------------------------------------------------------------------


def _projector(chosen: _Candidate, files: Sequence[RepoFile]) -> tuple[RepoFile | None, tuple[str, ...]]:
    model = PurePosixPath(chosen.first.path)
    found = [
        file
        for file in files
        if "mmproj" in PurePosixPath(file.path).name.lower()
        and file not in chosen.files
        and model.is_relative_to(PurePosixPath(file.path).parent)
    ]
    if "mmproj" in model.name.lower() or not found:
        return None, ()
    deepest = max(file.path.count("/") for file in found)
    nearest = [file for file in found if file.path.count("/") == deepest]
    own = name_words(str(model))
    named = [file for file in nearest if name_words(file.path) <= own]
    most = max((len(name_words(file.path)) for file in named), default=0)
    best = [file for file in named if len(name_words(file.path)) == most]
    if not best and len({name_words(file.path) for file in nearest}) == 1:
        best = nearest
    if not best:
        names = ", ".join(PurePosixPath(file.path).name for file in nearest[:4])
        return None, (f"no projector is used, since none matches the name of the model: {names}",)
    return min(best, key=_projector_rank), ()


def _projector_rank(file: RepoFile) -> tuple[int, str]:
    tag = quant_tag(file.path)
    return (PREFERRED_TYPES.index(tag) if tag in PREFERRED_TYPES else len(PREFERRED_TYPES), file.path)


# --- messages ------------------------------------------------------------------------------------


def _ambiguous(ref: RepoRef, candidates: Sequence[_Candidate]) -> UsageInvalid:
    return UsageInvalid(
        f"{ref} matches {len(candidates)} models.",
        remedy=f"Name the file, for example {ref.repo}:{candidates[0].first.path}.",
        details=_listed(candidates),
    )


def _remedy(ref: RepoRef, candidates: Sequence[_Candidate]) -> str:
    if not candidates:
        return "The repository has no GGUF file: choose one whose name ends in -GGUF."
    best = candidates[0]
    return f"Choose one of these, for example {ref.repo}:{best.tag or best.first.path}."


def _listed(candidates: Sequence[_Candidate]) -> tuple[str, ...]:
    shown = [
        f"{candidate.tag or '-':<12} {memory_text(sum(file.size for file in candidate.files)):>8}  "
        + candidate.first.path
        + (f" ({len(candidate.files)} of {candidate.count} parts)" if candidate.count > 1 else "")
        for candidate in candidates[:_MAX_LISTED]
    ]
    more = len(candidates) - len(shown)
    return (*shown, *([f"and {more} more"] if more else []))
