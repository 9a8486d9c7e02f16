"""Multimodal projectors: which projector in a folder belongs to a model, and the flag that loads it.

A projector does not name its model. Its header shows the width of its embeddings, which must be the model's
(else llama-server ends), and its file name usually follows the model's: ``mmproj-NAME-f16.gguf`` or
``NAME.mmproj-Q8_0.gguf`` next to ``NAME-Q4_K_M.gguf``, or ``mmproj-F16.gguf`` in the model's own folder.
A wrong projector of the right width would load and produce nonsense, so a doubtful projector is not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from msgspec import Struct

from llamasup.core.gguf.facts import PURPOSES, ModelClass, ModelFacts
from llamasup.core.gguf.tensor_types import PREFERRED_TYPES, name_words
from llamasup.core.hub.choose import quant_tag
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.inputs import PlanInputs, absolute_path, served_as
from llamasup.core.settings.model import Settings
from llamasup.errors import ProjectorMismatch, UsageInvalid

ABOVE = "above the model's folder"
SEEING = (ModelClass.DECODER, ModelClass.DECISION)
"""The classes of models that get the projector of their folder."""
_FLAG = "--mmproj"
_BY_HAND = "choose one with --mmproj, or use --mmproj none"


class Candidate(Struct, frozen=True):
    """A projector in the folder of the model."""

    path: str
    facts: ModelFacts


class Pairing(Struct, frozen=True):
    """The projector that belongs to a model, or None, with the reason.

    ``undecided``: paths of projectors that may belong to the model.
    """

    projector: Candidate | None
    reason: str
    undecided: tuple[str, ...] = ()


def is_of_quantization(folder: PurePath) -> bool:
    """Whether a repository has this folder for the files of one quantization: ``REPO/UD-Q4_K_XL/x.gguf``.

    Like ``llama-server -hf``, llamasup pairs such a model with the projector of the folder above.
    """
    return bool(quant_tag(folder.name)) and not name_words(folder.name)


def place_of(folder: PurePath) -> PurePath:
    """The folder without the revision in the hub's cache, where a projector may be in another snapshot."""
    parts = list(folder.parts)
    for number in range(2, len(parts)):
        if parts[number - 1] == "snapshots" and parts[number - 2].startswith("models--"):
            return PurePath(*parts[:number], "*", *parts[number + 1 :])
    return folder


def pair_projector(
    model: ModelFacts,
    model_path: str,
    candidates: Sequence[Candidate],
    neighbours: Iterable[str],
    *,
    where: str = "in the model's folder",
) -> Pairing | None:
    """Choose the projector of ``candidates`` that belongs to the model.

    None: no candidate has its byte order.

    ``neighbours`` are the names of the other model files in ``where``, the place of the candidates.
    """
    # llama-server does not convert byte orders (b11434).
    candidates = [candidate for candidate in candidates if candidate.facts.big_endian == model.big_endian]
    if not candidates:
        return None
    width = model.embedding_length
    fitting = [candidate for candidate in candidates if candidate.facts.projection_length in (0, width)]
    if not fitting:
        return Pairing(
            None,
            f"{_listed(candidates)} {where} is for models of width "
            f"{candidates[0].facts.projection_length}, and this model has width {width}",
        )
    group, why = _named_alike(model_path, fitting), "its name matches the model's"
    if not group:
        own = name_words(model_path)
        neighbour = next((name for name in neighbours if name_words(name) != own), None)
        if neighbour is not None:
            neighbour = PurePath(neighbour).name
            reason = f"{_listed(fitting)} may belong to this model or to {neighbour}: {_BY_HAND}"
            return Pairing(None, reason, _paths(fitting))
        group = [
            candidate
            for candidate in fitting
            if not name_words(candidate.path) or candidate.facts.projection_length
        ]
        why = "the only model in its folder"
    if not group:
        return Pairing(None, f"{_listed(fitting)} has the name of another model: {_BY_HAND}", _paths(fitting))
    if len({(candidate.facts.parameters, name_words(candidate.path)) for candidate in group}) > 1:
        return Pairing(None, f"{_listed(group)} are different projectors: {_BY_HAND}", _paths(group))
    best = min(group, key=_preference)
    return Pairing(best, f"the projector {where} ({why}); --mmproj none disables it")


def chosen_by_user(extra_args: ExtraArgs) -> bool:
    """Whether arguments after ``--`` select a projector, or none (``--no-mmproj``)."""
    return extra_args.has(_FLAG) or extra_args.has("--mmproj-url") or extra_args.has("--no-mmproj")


def projector_loaded(
    capabilities: Capabilities,
    model: ModelFacts,
    settings: Settings,
    extra_args: ExtraArgs,
    mmproj: ModelFacts | None,
    found: Pairing | None,
) -> ModelFacts | None:
    """The projector that llama-server will load: the user's ``mmproj``, or else the one that was found.

    Raises what ``refuse_wrong_projector`` raises, and UsageInvalid for the projector of a reranker.
    """
    reads_only_text = served_as(model, extra_args) is ModelClass.RERANKER
    if mmproj is not None:
        if reads_only_text:
            file = PurePath(extra_args.value(_FLAG) or settings.mmproj or "").name
            raise UsageInvalid(
                f"{_FLAG} {file} would be loaded and never used, because a reranker reads only text",
                remedy=f"leave {_FLAG} out",
            )
        refuse_wrong_projector(model, mmproj, extra_args.value(_FLAG) or settings.mmproj or "")
        return mmproj
    if found is None or found.projector is None or reads_only_text or settings.profile == "plain":
        return None
    return found.projector.facts if capabilities.knows(_FLAG) else None


def refuse_wrong_projector(model: ModelFacts, mmproj: ModelFacts, path: str) -> None:
    """Raise UsageInvalid for a file that is not a projector, ProjectorMismatch for one of another model."""
    name = PurePath(path).name
    if mmproj.model_class is not ModelClass.PROJECTOR:
        raise UsageInvalid(
            f"{_FLAG} {name} is not a projector: {mmproj.contents or PURPOSES[mmproj.model_class]}",
            remedy="give the mmproj file that was published with the model",
        )
    if mmproj.projection_length not in (0, model.embedding_length):
        raise ProjectorMismatch(
            f"{_FLAG} {name} is for models of width {mmproj.projection_length}, and this model has width "
            f"{model.embedding_length}",
            remedy="give the mmproj file that was published with the model",
        )


def give_projector(line: CommandLine, inputs: PlanInputs, found: Pairing | None) -> None:
    """Add the projector that the user set, or else the one that was found in the model's folder.

    b11434 embeds images too (``multimodal_data`` at /embeddings), and reranks only strings [run].
    """
    settings, serves, ffmpeg = inputs.settings, inputs.serves, _FFMPEG[inputs.hardware.has_ffmpeg]
    if settings.mmproj is not None:
        why = f"set with {_FLAG}"
        if serves is ModelClass.ENCODER:
            why += ", to embed images too"
        line.give(_FLAG, absolute_path("mmproj", settings.mmproj), why + ffmpeg, asked=_FLAG)
    elif found is not None and found.projector is not None and serves is ModelClass.RERANKER:
        line.leave_out(_FLAG, "a reranker reads only text")
    elif found is not None and found.projector is not None:
        why = found.reason + ffmpeg
        line.give(_FLAG, found.projector.path, why, otherwise="this build cannot read images")
    elif found is not None:
        line.leave_out(_FLAG, found.reason)


_FFMPEG = {
    None: "",  # not known
    True: "; ffmpeg, for WebP images and videos, is on PATH",
    False: "; WebP images and videos are refused, because ffmpeg and ffprobe are not both on PATH",
}


# --- names ---------------------------------------------------------------------------------------


def _named_alike(model_path: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose names have only words of the model's name, and the most of these words."""
    own = name_words(model_path)
    shared = {one.path: len(words) for one in candidates if (words := name_words(one.path)) <= own}
    most = max(shared.values(), default=0)
    return [candidate for candidate in candidates if most and shared.get(candidate.path) == most]


def _preference(candidate: Candidate) -> tuple[int, str]:
    kind = candidate.facts.quantization
    return (PREFERRED_TYPES.index(kind) if kind in PREFERRED_TYPES else len(PREFERRED_TYPES), candidate.path)


def _paths(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple(candidate.path for candidate in candidates)


def _listed(candidates: Sequence[Candidate]) -> str:
    names = [PurePath(candidate.path).name for candidate in candidates]
    return " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def pairings_of(models: Mapping[str, ModelFacts], broken: Iterable[str] = ()) -> dict[str, Pairing]:
    """The projector of each model, as ``run`` would pair them, among the files of any number of folders.

    ``broken`` are unreadable files: a projector could belong to one of them.
    """
    places: dict[PurePath, list[str]] = defaultdict(list)
    for path in (*models, *broken):
        places[place_of(PurePath(path).parent)].append(path)
    of_quantizations: dict[PurePath, list[str]] = defaultdict(list)
    for place, paths in places.items():
        if is_of_quantization(place):
            of_quantizations[place.parent] += paths
    pairs = {}
    for place, paths in places.items():
        candidates, where, others = _candidates(paths, models), "in the model's folder", paths
        if not candidates and is_of_quantization(place):
            above = places.get(place.parent, [])
            candidates, where = _candidates(above, models), ABOVE
            others = above + of_quantizations[place.parent]
        if not candidates:
            continue
        others = [path for path in others if not has_projector_name(path)]
        for path in paths:
            if has_projector_name(path) or path not in models or models[path].model_class not in SEEING:
                continue
            neighbours = (other for other in others if other != path)
            found = pair_projector(models[path], path, candidates, neighbours, where=where)
            if found is not None:
                pairs[path] = found
    return pairs


def _candidates(paths: Iterable[str], models: Mapping[str, ModelFacts]) -> list[Candidate]:
    return [
        Candidate(path, models[path])
        for path in paths
        if has_projector_name(path) and path in models and models[path].model_class is ModelClass.PROJECTOR
    ]


def has_projector_name(path: str) -> bool:
    """Whether the file is named like a projector. The name of an unreadable file decides what it is."""
    return "mmproj" in PurePath(path).name.lower()
