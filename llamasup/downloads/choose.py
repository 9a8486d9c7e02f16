"""Which files of a repository are the model that is asked for: one quantization, all parts, its projector.

Nothing of a file is known but its name and size. Names are chosen among as llama.cpp does
(common/download.cpp, b11434): Q4_K_M where nothing is asked for, drafts and importance matrices left out, a
projector from the model's folder or one above it. Unlike there, nothing is guessed where two models could be
meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from llamasup.downloads.reference import RepoRef, is_safe_path
from llamasup.errors import ModelInvalid, ModelMissing, UsageInvalid
from llamasup.gguf.types import PREFERRED_TYPES, name_words
from llamasup.system.text import memory_text

__all__ = ["Choice", "RepoFile", "choose", "quant_tag"]

DEFAULT = "Q4_K_M"
# Nearest to the default first: of about its size, then larger ones, which are slower but never worse, and
# last the small ones, which are. MXFP4 is what a model was trained in, where it exists at all.
_NEAREST = (
    *("Q4_K_M", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "UD-Q4_K_M", "Q4_0"),
    *("IQ4_NL", "IQ4_XS", "Q4_1", "NVFP4", "Q5_K_M", "UD-Q5_K_XL", "Q5_K_L", "Q5_K_S", "Q5_0", "Q5_1"),
    *("Q6_K", "UD-Q6_K_XL", "Q6_K_L", "Q8_0", "UD-Q8_K_XL", "Q3_K_XL", "UD-Q3_K_XL", "Q3_K_L", "Q3_K_M"),
    *("IQ3_M", "Q3_K_S", "IQ3_S", "IQ3_XS", "F16", "BF16", "F32", "IQ3_XXS", "UD-IQ3_XXS", "Q2_K_L"),
    *("UD-Q2_K_XL", "Q2_K", "IQ2_M", "UD-IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "UD-IQ2_XXS", "TQ2_0"),
    *("TQ1_0", "IQ1_M", "UD-IQ1_M", "IQ1_S", "UD-IQ1_S"),
)
_RANK = {tag: rank for rank, tag in enumerate(_NEAREST)}
_TAG = re.compile(
    r"(?<![A-Za-z0-9])(?:UD[-_.])?"
    r"(?:I?Q\d(?:_(?:[0-9KSML]|K|X?XS|XL|NL))*|TQ\d_\d|(?:MX|NV)FP4(?:[-_]MOE)?|BF16|FP?16|FP?32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SPLIT = re.compile(
    r"(?P<prefix>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.DOTALL | re.IGNORECASE
)
_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_SHOWN = 40
_SHOWN_UNSAFE = 5
_SHOWN_LETTERS = 200  # of a name that somebody else has made, as long as it pleased them


@dataclass(frozen=True, slots=True)
class RepoFile:
    """``path`` in the repository; ``size`` in bytes; ``sha256`` in lower-case hex where the hub says it."""

    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """``parts`` of the model, first part first; ``name`` under which the same is chosen again (a quantization
    or a file); ``notes`` are what a person may want to know besides.
    """

    parts: tuple[RepoFile, ...]
    projector: RepoFile | None
    name: str
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[RepoFile, ...]:
        """The small projector first: what is wrong with the repository shows before the long wait."""
        return self.parts if self.projector is None else (self.projector, *self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(each.size for each in self.files)


@dataclass(frozen=True, slots=True)
class _Set:
    """The files of one model. ``tag`` is its quantization as its names say it, empty where they do not."""

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
    """The files that ``ref`` means, out of all the repository's; ``exact``: what is near to it is not meant.

    Raises ModelMissing where it has none such, UsageInvalid where several are meant, and ModelInvalid for a
    set that lacks a part; with what is there.
    """
    all_files = [each for each in files if each.path.lower().endswith(".gguf")]
    safe = [each for each in all_files if is_safe_path(each.path)]
    unsafe = [each.path for each in all_files if not is_safe_path(each.path)]
    notes = tuple(
        f"{path[:_SHOWN_LETTERS]!a} is left out: a file of that name is not written"
        for path in unsafe[:_SHOWN_UNSAFE]
    )
    if len(unsafe) > _SHOWN_UNSAFE:
        notes += (f"and {len(unsafe) - _SHOWN_UNSAFE} more",)
    sets = sorted(_sets(safe), key=lambda each: (_rank(each), each.first.path))
    if ref.file is not None:
        chosen, reason = _named(ref, safe, sets, exact=exact), "the file asked for"
    elif ref.quant is not None:
        chosen, reason = _quantized(ref, ref.quant, sets, exact=exact)
    else:
        chosen, reason = _default(ref, sets)
    if len(chosen.files) != chosen.count:
        raise ModelInvalid(
            f"{ref.repo} has {len(chosen.files)} of the {chosen.count} parts of "
            f"{PurePosixPath(chosen.first.path).name}.",
            remedy="Choose another quantization, or tell the repository's owner.",
            details=_listed(sets),
        )
    projector, more = _projector(chosen, safe)
    alone = chosen.tag and sum(each.tag == chosen.tag for each in sets) == 1
    name = chosen.tag if alone else chosen.first.path
    return Choice(chosen.files, projector, name, reason, (*notes, *more))


def _sets(files: Sequence[RepoFile]) -> list[_Set]:
    found: dict[tuple[str, int, str], dict[int, RepoFile]] = {}
    for file in files:
        if any(word in PurePosixPath(file.path).name.lower() for word in _NOT_MODELS):
            continue
        part = _SPLIT.fullmatch(file.path)
        key = (part["prefix"], int(part["count"]), part["ending"]) if part else (file.path, 1, "")
        found.setdefault(key, {})[int(part["part"]) if part else 1] = file
    return [
        _Set(tuple(parts[number] for number in sorted(parts)), quant_tag(name), count)
        for (name, count, _), parts in found.items()
    ]


def quant_tag(path: str) -> str:
    """``Q4_K_M`` of a path: from its name, or else from the folder that it is in."""
    for name in reversed(path.removesuffix(".gguf").split("/")):
        if found := _TAG.findall(name):
            tag = re.sub(r"[-.]", "_", found[-1].upper())
            tag = re.sub(r"^UD_", "UD-", tag)
            return re.sub(r"^FP(16|32)$", r"F\1", tag)
    return ""


def _rank(each: _Set) -> int:
    return _RANK.get(each.tag, len(_RANK))


# --- which one -----------------------------------------------------------------------------------


def _named(ref: RepoRef, files: Sequence[RepoFile], sets: Sequence[_Set], *, exact: bool) -> _Set:
    wanted = ref.file or ""
    same = [each for each in files if each.path == wanted]
    if not same and not exact:
        name = PurePosixPath(wanted.lower()).name
        same = [each for each in files if PurePosixPath(each.path).name.lower() == name]
    if not same:
        raise ModelMissing(
            f"{ref.repo} has no file {wanted}.", remedy=_which(ref, sets), details=_listed(sets)
        )
    if len(same) > 1:
        raise _ambiguous(ref, [_Set((each,), quant_tag(each.path), 1) for each in same])
    (file,) = same
    return next((each for each in sets if file in each.files), _Set((file,), quant_tag(file.path), 1))


def _quantized(ref: RepoRef, quant: str, sets: Sequence[_Set], *, exact: bool) -> tuple[_Set, str]:
    wanted = quant_tag(quant) or quant.upper()
    same = [each for each in sets if each.tag == wanted]
    if same:
        return _only(ref, same), "the quantization asked for"
    # What llama.cpp takes as well: a part of the name, such as q4, or the name of a variant.
    near = [
        each
        for each in sets
        if not exact and (wanted in re.split(r"[^A-Z0-9]", each.tag) or _is_word(wanted, each.first.path))
    ]
    if near:
        best = _only(ref, [each for each in near if each.tag == near[0].tag])
        return best, f"{best.tag or PurePosixPath(best.first.path).name} is the {quant} that there is"
    raise ModelMissing(f"{ref.repo} has no {quant}.", remedy=_which(ref, sets), details=_listed(sets))


def _is_word(word: str, path: str) -> bool:
    return re.search(rf"(?<![A-Z0-9]){re.escape(word)}(?![A-Z0-9])", path.upper()) is not None


def _default(ref: RepoRef, sets: Sequence[_Set]) -> tuple[_Set, str]:
    if not sets:
        raise ModelMissing(
            f"{ref.repo} has no GGUF file to serve.",
            remedy="Look for a repository of the same model whose name ends in -GGUF.",
        )
    best = _only(ref, [each for each in sets if each.tag == sets[0].tag])
    if len(sets) == 1:
        return best, "the only one there is"
    if best.tag == DEFAULT:
        return best, f"{DEFAULT}, as llama.cpp chooses: small, and close to the whole model"
    return best, f"there is no {DEFAULT}, and {best.tag} is the nearest to it"


def _only(ref: RepoRef, same: Sequence[_Set]) -> _Set:
    """The one that lies highest; two at one height are two models."""
    highest = min(each.depth for each in same)
    top = [each for each in same if each.depth == highest]
    if len(top) > 1:
        raise _ambiguous(ref, top)
    return top[0]


# --- projectors ----------------------------------------------------------------------------------


def _projector(chosen: _Set, files: Sequence[RepoFile]) -> tuple[RepoFile | None, tuple[str, ...]]:
    model = PurePosixPath(chosen.first.path)
    found = [
        each
        for each in files
        if "mmproj" in PurePosixPath(each.path).name.lower()
        and each not in chosen.files
        and model.is_relative_to(PurePosixPath(each.path).parent)
    ]
    if "mmproj" in model.name.lower() or not found:
        return None, ()
    deepest = max(each.path.count("/") for each in found)
    beside = [each for each in found if each.path.count("/") == deepest]
    own = name_words(str(model))
    named = [each for each in beside if name_words(each.path) <= own]
    most = max((len(name_words(each.path)) for each in named), default=0)
    best = [each for each in named if len(name_words(each.path)) == most]
    if not best and len({name_words(each.path) for each in beside}) == 1:
        best = beside
    if not best:
        names = ", ".join(PurePosixPath(each.path).name for each in beside[:4])
        return None, (f"none of the projectors has the model's name, so none is taken: {names}",)
    return min(best, key=_projector_rank), ()


def _projector_rank(file: RepoFile) -> tuple[int, str]:
    tag = quant_tag(file.path)
    return (PREFERRED_TYPES.index(tag) if tag in PREFERRED_TYPES else len(PREFERRED_TYPES), file.path)


# --- what is there -------------------------------------------------------------------------------


def _ambiguous(ref: RepoRef, sets: Sequence[_Set]) -> UsageInvalid:
    return UsageInvalid(
        f"{ref} can mean {len(sets)} models.",
        remedy=f"Say which: {ref.repo}:{sets[0].first.path}",
        details=_listed(sets),
    )


def _which(ref: RepoRef, sets: Sequence[_Set]) -> str:
    if not sets:
        return "There is no GGUF file in it: look for a repository whose name ends in -GGUF."
    best = sets[0]
    return f"Choose one of these, for example {ref.repo}:{best.tag or best.first.path}"


def _listed(sets: Sequence[_Set]) -> tuple[str, ...]:
    shown = [
        f"{each.tag or '-':<12} {memory_text(sum(file.size for file in each.files)):>8}  {each.first.path}"
        + (f" ({len(each.files)} of {each.count} parts)" if each.count > 1 else "")
        for each in sets[:_SHOWN]
    ]
    more = len(sets) - len(shown)
    return (*shown, *([f"and {more} more"] if more else []))
