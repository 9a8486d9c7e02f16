"""Multimodal projectors: which of those beside a model belongs to it, and the flag that says so.

Nothing in a projector names its model. Known are the width of the embeddings that it makes, which has to be
the model's (llama-server ends otherwise), and how people name such files: ``mmproj-NAME-f16.gguf`` or
``NAME.mmproj-Q8_0.gguf`` beside ``NAME-Q4_K_M.gguf``, or just ``mmproj-F16.gguf`` in a folder of its own.
A wrong projector of the right width would be loaded and see nonsense, so in doubt there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from llamasup.errors import ProjectorMismatch, UsageInvalid
from llamasup.gguf.facts import ModelClass, ModelFacts
from llamasup.gguf.types import PREFERRED_TYPES, name_words
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import CommandLine, ExtraArgs
from llamasup.llama_server.settings import Settings
from llamasup.planning.purpose import served_as

__all__ = [
    "Candidate",
    "Pairing",
    "give_projector",
    "pair_projector",
    "pairings_of",
    "projector_loaded",
    "refuse_wrong_projector",
    "unwanted",
]

_FLAG = "--mmproj"
_BY_HAND = "give it with --mmproj, or --mmproj none"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A projector in the folder of the model."""

    path: str
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Pairing:
    """The projector that belongs to a model, or None; and why.

    ``undecided``: paths of projectors of which one may belong to the model.
    """

    projector: Candidate | None
    reason: str
    undecided: tuple[str, ...] = ()


def pair_projector(
    model: ModelFacts, model_path: str, candidates: Sequence[Candidate], neighbours: Iterable[str]
) -> Pairing | None:
    """Which of the ``candidates`` belongs to the model; None if there are none to speak of.

    ``neighbours`` are the names of the other model files in the folder.
    """
    # llama-server turns no file's bytes round (b11434).
    candidates = [each for each in candidates if each.facts.big_endian == model.big_endian]
    if not candidates:
        return None
    width = model.embedding_length
    fitting = [each for each in candidates if each.facts.projection_length in (0, width)]
    if not fitting:
        return Pairing(
            None,
            f"{_listed(candidates)} beside the model is for models of width "
            f"{candidates[0].facts.projection_length}, and this one has {width}",
        )
    group, why = _named_alike(model_path, fitting), "its name is the model's"
    if not group:
        own = name_words(model_path)
        stranger = next((name for name in neighbours if name_words(name) != own), None)
        if stranger is not None:
            stranger = PurePath(stranger).name
            reason = f"{_listed(fitting)} may belong to this model or to {stranger}: {_BY_HAND}"
            return Pairing(None, reason, _paths(fitting))
        group = [each for each in fitting if not name_words(each.path) or each.facts.projection_length]
        why = "the only model in its folder"
    if not group:
        return Pairing(None, f"{_listed(fitting)} has another model's name: {_BY_HAND}", _paths(fitting))
    if len({(each.facts.parameters, name_words(each.path)) for each in group}) > 1:
        return Pairing(None, f"{_listed(group)} are different projectors: {_BY_HAND}", _paths(group))
    best = min(group, key=_preference)
    return Pairing(best, f"the projector beside the model ({why}); --mmproj none leaves it out")


def unwanted(extra_args: ExtraArgs) -> bool:
    """Whether the user's own arguments settle the projector: another one, or none (``--no-mmproj``)."""
    return extra_args.has(_FLAG) or extra_args.has("--mmproj-url") or extra_args.has("--no-mmproj")


def projector_loaded(
    capabilities: Capabilities,
    model: ModelFacts,
    settings: Settings,
    extra_args: ExtraArgs,
    mmproj: ModelFacts | None,
    found: Pairing | None,
) -> ModelFacts | None:
    """The projector that llama-server will load: ``mmproj``, which the user named, or else the one found.

    Raises what ``refuse_wrong_projector`` raises, and UsageInvalid for one that is given to a reranker.
    """
    reads_text_alone = served_as(model, extra_args) is ModelClass.RERANKER
    if mmproj is not None:
        if reads_text_alone:
            file = PurePath(extra_args.value(_FLAG) or settings.mmproj or "").name
            raise UsageInvalid(
                f"{_FLAG} {file} would be loaded and never used: a reranker reads text alone",
                remedy=f"leave {_FLAG} out",
            )
        refuse_wrong_projector(model, mmproj, extra_args.value(_FLAG) or settings.mmproj or "")
        return mmproj
    if found is None or found.projector is None or reads_text_alone or settings.profile == "plain":
        return None
    return found.projector.facts if capabilities.knows(_FLAG) else None


def refuse_wrong_projector(model: ModelFacts, mmproj: ModelFacts, path: str) -> None:
    """Raise UsageInvalid for a file that is no projector, ProjectorMismatch for one of other models."""
    name = PurePath(path).name
    if mmproj.model_class is not ModelClass.PROJECTOR:
        raise UsageInvalid(
            f"{_FLAG} {name} is of class {mmproj.model_class}, and has to be a projector",
            remedy="give the mmproj file that was published with the model",
        )
    if mmproj.projection_length not in (0, model.embedding_length):
        raise ProjectorMismatch(
            f"{_FLAG} {name} is for models of width {mmproj.projection_length}, and this one has "
            f"{model.embedding_length}",
            remedy="give the mmproj file that was published with the model",
        )


def give_projector(line: CommandLine, serves: ModelClass, settings: Settings, found: Pairing | None) -> None:
    """Pass the projector asked for, or else the one that was found beside the model.

    b11434 embeds images, too (``multimodal_data`` at /embeddings), and reranks nothing but strings [run].
    """
    if settings.mmproj is not None:
        if not PurePath(settings.mmproj).is_absolute():
            raise ValueError(f"the path of mmproj must be absolute here: {settings.mmproj!r}")
        why = "the projector asked for"
        if serves is ModelClass.ENCODER:
            why += ", for images among what is embedded"
        line.give(_FLAG, settings.mmproj, why, asked=_FLAG)
    elif found is not None and found.projector is not None and serves is ModelClass.RERANKER:
        line.leave_out(_FLAG, "a reranker reads text alone")
    elif found is not None and found.projector is not None:
        line.give(_FLAG, found.projector.path, found.reason, otherwise="this build sees no images")
    elif found is not None:
        line.leave_out(_FLAG, found.reason)


# --- names ---------------------------------------------------------------------------------------


def _named_alike(model_path: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those whose name says nothing but the model's, and of these the ones that say the most of it."""
    own = name_words(model_path)
    said = {each.path: len(words) for each in candidates if (words := name_words(each.path)) <= own}
    most = max(said.values(), default=0)
    return [each for each in candidates if most and said.get(each.path) == most]


def _preference(candidate: Candidate) -> tuple[int, str]:
    kind = candidate.facts.quantization
    return (PREFERRED_TYPES.index(kind) if kind in PREFERRED_TYPES else len(PREFERRED_TYPES), candidate.path)


def _paths(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple(each.path for each in candidates)


def _listed(candidates: Sequence[Candidate]) -> str:
    names = [PurePath(each.path).name for each in candidates]
    return " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def pairings_of(models: Mapping[str, ModelFacts], broken: Iterable[str] = ()) -> dict[str, Pairing]:
    """Model → its projector, or why none of those beside it is, of the files of any number of folders: those
    that ``run`` would pair.

    ``broken`` are the model files that cannot be read: whose a projector is may be in doubt for them, too.
    """
    folders: dict[PurePath, list[str]] = defaultdict(list)
    for path in (*models, *broken):
        folders[PurePath(path).parent].append(path)
    pairs = {}
    for paths in folders.values():
        named = [path for path in paths if "mmproj" in PurePath(path).name.lower()]
        candidates = [
            Candidate(path, models[path])
            for path in named
            if path in models and models[path].model_class is ModelClass.PROJECTOR
        ]
        others = [path for path in paths if path not in named]
        if not candidates:
            continue
        for path in others:
            if path not in models or models[path].model_class is not ModelClass.DECODER:
                continue
            neighbours = (other for other in others if other != path)
            found = pair_projector(models[path], path, candidates, neighbours)
            if found is not None:
                pairs[path] = found
    return pairs
