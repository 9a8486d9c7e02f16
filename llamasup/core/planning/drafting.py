"""Speculative decoding: which draft a model uses, whether the two match, and the flags for the draft.

A draft is another model of the same vocabulary, a head that was trained for this one model (EAGLE-3, DFlash,
MTP), or the MTP layers in the model's own file. If the two do not match, llama-server (b11434) serves without
drafting and reports this only in its log, so llamasup refuses the pair.
"""

from __future__ import annotations

from pathlib import PurePath

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass, ModelFacts, Vocabulary
from llamasup.core.gguf.tensor_types import kv_block
from llamasup.core.llama_server.argv_builder import CommandLine, ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.inputs import PlanInputs, absolute_path
from llamasup.core.planning.measured.load_history import DraftCounts, acceptance
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.errors import DraftMismatch, UsageInvalid

_ASKED = "--draft-model"
DRAFT_MODEL = ("--spec-draft-model", "--model-draft")
_LAYERS = ("--spec-draft-ngl", "--gpu-layers-draft")
_TYPE_K = ("--spec-draft-type-k", "--cache-type-k-draft")
_TYPE_V = ("--spec-draft-type-v", "--cache-type-v-draft")

# Draft heads by architecture; any other head predicts the next tokens of its target (gemma4-assistant, MTP).
_HEADS = {"eagle3": "draft-eagle3", "dflash": "draft-dflash"}
_DSPARK = "draft-dspark"

# How many tokens to draft at a time; llama.cpp's default was 16 and is 3 since #22397.
_DRAFT_TOKENS = {
    "draft-simple": (8, "the most tokens that the draft model proposes at a time"),
    "draft-mtp": (2, "an MTP layer is trained to predict one more token, and is right less often beyond"),
    "draft-dflash": (15, "a DFlash head drafts a block of 16 tokens at once, which includes the given one"),
}

_DEFAULT_DRAFT_TOKENS = 3

_SIZE_TOLERANCE = 128  # SPEC_VOCAB_MAX_SIZE_DIFFERENCE: vocabularies of one family are padded differently
_FIT_TARGET_MIB = 1024  # what --fit leaves free on each device by default
_MIB = 1 << 20


class Drafter(Struct, frozen=True):
    """The draft of a model. ``path`` is None if the model drafts for itself.

    ``facts`` describe the file, or only the model's own MTP layers; None for an unread file after
    ``--``. ``spec_type`` is the value of ``--spec-type``, None if the build has no such value or detects it.
    """

    path: str | None
    facts: ModelFacts | None
    spec_type: str | None
    extra_args: bool = False
    note: str = ""


def extra_draft_path(extra_args: ExtraArgs) -> str | None:
    """The path of the draft model in the arguments after ``--``."""
    return extra_args.value("--model-draft")


def decide_drafter(inputs: PlanInputs) -> Drafter | None:
    """Choose the draft of the model, if any.

    If a flag switches drafting off, llamasup leaves out its own ``--draft-model``, which would only take
    memory.

    Raises UsageInvalid for a file that cannot draft, DraftMismatch for a draft of another model.
    """
    capabilities, model, settings = inputs.capabilities, inputs.model, inputs.settings
    draft, extra_args = inputs.draft, inputs.extra_args
    passed = extra_draft_path(extra_args)
    path = settings.draft_model if passed is None else passed
    if path is None:
        return None if settings.profile == "plain" else _mtp_layers(inputs)
    if passed is None and drafting_off(capabilities, extra_args) is not None:
        return None
    if draft is None:
        return Drafter(path, None, _available(capabilities, "draft-simple"), extra_args=passed is not None)
    if draft.model_class not in (ModelClass.DECODER, ModelClass.DRAFT):
        raise UsageInvalid(
            f"{PurePath(path).name} is of class {draft.model_class}, but a draft model must be a decoder",
            remedy=f"pass a small model of the same family with {_ASKED}",
        )
    if draft.model_class is ModelClass.DRAFT:
        _refuse_foreign_mtp_layers(model, draft, path)
        return Drafter(path, draft, _type_of_head(capabilities, draft, path), extra_args=passed is not None)
    chosen = extra_args.value("--spec-type")
    if chosen is None or "draft-simple" in chosen.split(","):
        _refuse_mismatch(model.vocabulary, draft.vocabulary, path)
    return Drafter(
        path,
        draft,
        _available(capabilities, "draft-simple"),
        extra_args=passed is not None,
        note=_size_note(model.vocabulary.size, draft.vocabulary.size),
    )


def no_drafts(capabilities: Capabilities) -> tuple[str, str] | None:
    """The flag and value that switch drafting off; None for a build that has none."""
    types = capabilities.find("--spec-type")
    if types is None:
        return ("--draft-max", "0") if capabilities.knows("--draft-max") else None
    listed = (types.argument or "") + " ".join(types.allowed)
    return ("--spec-type", "none") if "none" in listed else None


def drafting_off(capabilities: Capabilities, extra_args: ExtraArgs) -> str | None:
    """The flag that switches drafting off, with its value; None if none does."""
    off = no_drafts(capabilities)
    return " ".join(off) if off is not None and extra_args.value(off[0]) == off[1] else None


def draft_shape(draft: ModelFacts, shape: ContextShape) -> ContextShape:
    """The draft model's context: as its target's, with cache types that its heads allow."""
    return replace(
        shape,
        k_type=_suitable_type(shape.k_type, draft.key_length),
        v_type=_suitable_type(shape.v_type, draft.value_length),
    )


def shape_with_drafts(shape: ContextShape, drafter: Drafter, extra_args: ExtraArgs) -> ContextShape:
    """The model's own context, which checks the drafted tokens and rolls back the ones that it rejects.

    Recurrent states cannot be truncated like a KV cache: draft-mtp keeps a snapshot for each drafted token
    (``rs_seq`` in b11434's log); other types copy the states to the host if needed.
    """
    ahead = extra_args.number("--spec-draft-n-max")
    if ahead is None:
        ahead = _DRAFT_TOKENS.get(drafter.spec_type or "", (_DEFAULT_DRAFT_TOKENS, ""))[0]
    outputs = shape.outputs_per_slot
    return replace(
        shape,
        rollback=ahead if drafter.spec_type == "draft-mtp" else 0,
        outputs_per_slot=None if outputs is None else outputs + ahead,
    )


def draft_gpu_layers(draft: ModelFacts, extra_args: ExtraArgs, model_layers: int | None) -> int | None:
    """Count the layers of the draft on devices, next to ``model_layers`` of the model (None: as many as fit).

    Without a number, llama-server puts the whole draft on the devices if any layer of the model is on one.
    """
    asked = extra_args.value("--gpu-layers-draft")
    if model_layers == 0 or asked is None or not asked.isdecimal():
        return model_layers and draft.layers + 1
    return int(asked)


def give_drafter(
    line: CommandLine,
    capabilities: Capabilities,
    drafter: Drafter,
    shape: ContextShape,
    *,
    memory_bytes: int,
    on_device: bool,
    counts: DraftCounts | None,
) -> None:
    """Add the flags of a draft with this context and memory. Raises UsageInvalid.

    ``counts`` are the counts of earlier requests.
    """
    seen = "" if counts is None else f"; {acceptance(counts.proposed, counts.accepted)}"
    if drafter.path is not None:
        _give_path(line, capabilities, drafter)
    if capabilities.knows("--spec-type"):
        _give_type(line, drafter, seen)
    else:
        ahead, why = _DRAFT_TOKENS["draft-simple"]
        line.give("--draft-max", ahead, why + seen)
        line.give("--ctx-size-draft", shape.ctx_total, "the draft model gets the same context as the model")
    if drafter.path is not None and capabilities.devices:
        _give_layers(line, capabilities, on_device=on_device)
    is_head = drafter.facts is not None and drafter.facts.model_class is ModelClass.DRAFT
    if is_head and capabilities.devices and on_device:
        _reserve_memory(line, memory_bytes)
    for flags, cache_type in ((_TYPE_K, shape.k_type), (_TYPE_V, shape.v_type)):
        if cache_type != "f16":
            line.give(flags, cache_type, "the type of the model's own cache", otherwise="this build uses f16")


# --- the draft -----------------------------------------------------------------------------------


def _mtp_layers(inputs: PlanInputs) -> Drafter | None:
    capabilities, model = inputs.capabilities, inputs.model
    chosen = inputs.extra_args.value("--spec-type")
    if not model.drafts_itself or inputs.serves is not ModelClass.DECODER:
        return None
    if _available(capabilities, "draft-mtp") is None:
        return None
    if chosen is not None and "draft-mtp" not in chosen.split(","):
        return None
    # llama-server creates a second context for these layers, with the same weights (b11434).
    trunk = model.layers - model.mtp_layers
    layers = replace(
        model,
        weights_bytes=0,
        layer_bytes=(0,) * model.layers,
        expert_bytes=(0,) * model.layers,
        input_bytes=0,
        output_bytes=0,
        kv_layers=(False,) * trunk + (True,) * model.mtp_layers,
        recurrent=None,
        recurrent_layers=(),
    )
    return Drafter(None, layers, "draft-mtp")


def _type_of_head(capabilities: Capabilities, head: ModelFacts, path: str) -> str | None:
    wanted = _HEADS.get(head.architecture, "draft-mtp")
    if _available(capabilities, wanted) is None:
        raise UsageInvalid(
            f"{PurePath(path).name} is a draft head ({head.architecture}), and this llama-server "
            f"({capabilities.version}) has no --spec-type {wanted}",
            remedy="use a newer build (--runtime), or a small model of the same family as the draft",
        )
    if wanted == "draft-dflash" and _available(capabilities, _DSPARK) is not None:
        return None  # a DSpark head has the same architecture; builds that know both tell them apart
    return wanted


def _refuse_foreign_mtp_layers(model: ModelFacts, head: ModelFacts, path: str) -> None:
    """MTP layers in a separate file have the architecture and the width of their original model.

    b11434 loads the layers of any model and drafts nonsense: one of 35 tokens was accepted [run].
    """
    ours, theirs = (model.architecture, model.embedding_length), (head.architecture, head.embedding_length)
    if head.mtp_layers and ours != theirs:
        raise DraftMismatch(
            f"{PurePath(path).name} cannot draft for this model: it has the MTP layers of a {theirs[0]} "
            f"model of width {theirs[1]}, and this model is {ours[0]} of width {ours[1]}",
            remedy="give the MTP file that was published with the model, or leave the draft out",
        )


def _available(capabilities: Capabilities, spec_type: str) -> str | None:
    types = capabilities.find("--spec-type")
    return spec_type if types is not None and spec_type in types.allowed else None


def _suitable_type(cache_type: str, head_length: int) -> str:
    return "f16" if head_length % kv_block(cache_type) else cache_type


# --- vocabularies --------------------------------------------------------------------------------


def _refuse_mismatch(model: Vocabulary, draft: Vocabulary, path: str) -> None:
    difference = _difference(model, draft)
    if difference is not None:
        raise DraftMismatch(
            f"{PurePath(path).name} cannot draft for this model: {difference}",
            remedy="give a smaller model of the same family (same tokenizer), or leave the draft out",
        )


def _difference(model: Vocabulary, draft: Vocabulary) -> str | None:
    """The difference that b11434 would find (common_speculative_are_compatible); missing facts are none.

    llama-server does not compare pre-tokenizers, because drafts are tokens, not text. It compares all tokens;
    here up to 63 at the end are not compared if the sizes differ.
    """
    if model.model != draft.model:
        return f"the draft's tokenizer is {draft.model!r}, the model's {model.model!r}"
    for name in ("bos", "eos"):
        (adds, token), (draft_adds, draft_token) = _special(model, name), _special(draft, name)
        if None in (adds, draft_adds):
            continue
        if adds != draft_adds:
            owner = "the model" if adds else "the draft"
            return f"only {owner} puts {name.upper()} {_WHERE[name]} of a text"
        if adds and None not in (token, draft_token) and token != draft_token:
            return f"the draft's {name.upper()} token is {draft_token}, the model's {token}"
    if abs(model.size - draft.size) > _SIZE_TOLERANCE:
        return f"the draft's vocabulary has {draft.size} tokens, the model's {model.size}"
    digests, draft_digests = dict(model.digests), dict(draft.digests)
    compared = max(digests.keys() & draft_digests.keys(), default=0)
    if digests.get(compared) != draft_digests.get(compared):
        return f"some of the first {compared} tokens of their vocabularies differ"
    return None


def _size_note(model_tokens: int, draft_tokens: int) -> str:
    """A note on different sizes: the extra tokens are mostly padding, else b11434 aborts in get_sub_batch."""
    if model_tokens == draft_tokens:
        return ""
    return (
        f"; its vocabulary has {draft_tokens} tokens and the model's {model_tokens}: llama-server aborts if "
        "one of them generates a token that the other lacks"
    )


_WHERE = {"bos": "at the beginning", "eos": "at the end"}
# llama-vocab.cpp: the defaults of a SentencePiece vocabulary. Those of others depend on the pre-tokenizer.
_SPM_DEFAULTS = {"bos": (True, 1), "eos": (False, 2)}


def _special(vocabulary: Vocabulary, name: str) -> tuple[bool | None, int | None]:
    """Whether the token is added to every text, and its id."""
    stated: dict[str, tuple[bool | None, int | None]] = {
        "bos": (vocabulary.add_bos, vocabulary.bos),
        "eos": (vocabulary.add_eos, vocabulary.eos),
    }
    adds, token = stated[name]
    if vocabulary.model == "llama":
        adds_default, token_default = _SPM_DEFAULTS[name]
        adds = adds_default if adds is None else adds
        token = token_default if token is None else token
    return adds, token


# --- flags ---------------------------------------------------------------------------------------


def _give_path(line: CommandLine, capabilities: Capabilities, drafter: Drafter) -> None:
    if not capabilities.knows("--spec-type", "--draft-max"):
        # llama-server of August 2024 lists --model-draft, which only llama.cpp's examples use.
        raise UsageInvalid(
            f"{_ASKED} is not possible: this llama-server ({capabilities.version}) does not draft",
            remedy="use a build with --spec-type or --draft-max (--runtime)",
        )
    if drafter.path is not None and not drafter.extra_args:
        path = absolute_path("draft_model", drafter.path)
        line.give(DRAFT_MODEL, path, f"set with {_ASKED}{drafter.note}", asked=_ASKED)


def _give_type(line: CommandLine, drafter: Drafter, seen: str) -> None:
    spec_type = drafter.spec_type
    if spec_type is None:
        line.leave_out("--spec-type", "llama-server detects the type of this draft from its file")
    elif drafter.path is None:
        line.give("--spec-type", spec_type, "the model's own MTP layers predict the tokens after the next")
    elif spec_type == "draft-simple":
        # A plain draft model is loaded and not used without the type (#25345).
        why = "without it, llama-server would load the draft model and not use it"
        line.give("--spec-type", spec_type, why, essential=True)
    else:
        line.give("--spec-type", spec_type, "the type of this draft head", essential=True)
    ahead = _DRAFT_TOKENS.get(spec_type or "draft-dflash")
    if ahead is not None:
        line.give("--spec-draft-n-max", ahead[0], ahead[1] + seen)


def _give_layers(line: CommandLine, capabilities: Capabilities, *, on_device: bool) -> None:
    if not on_device:
        line.give(_LAYERS, 0, "the model is not on the device, so its draft is not either")
    elif capabilities.knows("--fit"):
        line.leave_out(_LAYERS[0], "llama-server also fits the draft's layers to its devices")
    else:
        line.give(_LAYERS, 999, "a draft model helps only if it is fast")


def _reserve_memory(line: CommandLine, memory_bytes: int) -> None:
    """``--fit`` measures the draft too (b11434), also MTP layers in the model's own file [run].

    It cannot measure a head that uses tensors of its target: "failed to measure the memory of the extra
    model, fitting without it", and then the head does not fit (#28172, #23472).
    """
    needed_mib = -(-memory_bytes // _MIB)
    line.give(
        "--fit-target",
        _FIT_TARGET_MIB + needed_mib,
        f"--fit may not be able to measure the {needed_mib} MiB of the draft head",
        otherwise="this build does not fit layers to its devices",
    )
