"""Chooses the number of slots, the context of each, and the batch sizes.

Arguments after ``--`` (``ExtraArgs``) win over ``Settings``, and these over the profile, whose values can be
reduced to fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.argv_builder import CommandLine, asked_with
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.inputs import PlanInputs, out_of_range
from llamasup.core.planning.memory.kv_cache import ContextShape
from llamasup.core.settings.model import Settings
from llamasup.errors import UsageInvalid

_AUTO = -1  # as --parallel: four slots that share the context
_AUTO_SLOTS = 4
_FALLBACK_CONTEXT = 4096  # of a model without a context length
_MAX_SLOTS = 256  # LLAMA_MAX_SEQ: "n_seq_max must be <= 256" (b11434 [run])
# A context of one token, or a batch of fewer tokens than slots, aborts in llama-server's own warm-up
# ("get_sub_batch: failed to add token", b11434 [run]).
_MIN_TOKENS = 2
_EXTEND = (
    "Set --ctx-size to {} or less; or, if the model is made for it, extend its context with YaRN "
    "(docs/planning.md)."
)
_MAX_TOKENS = 2**31 - 1  # llama-server reads --ctx-size as a C int

# Classes whose whole input must be in one micro-batch.
_WHOLE_INPUT = frozenset({ModelClass.ENCODER, ModelClass.RERANKER, ModelClass.ENCODER_DECODER})


class Context(Struct, frozen=True):
    per_request: int  # tokens that one request may use
    parallel: int
    total: int  # as llama-server's --ctx-size
    least_of_slot: int | None  # tokens that the profile requires; None: a slot has no more than these
    batch: int
    ubatch: int
    image_tokens: int  # of the largest image, which must fit in one micro-batch; 0: any micro-batch does
    unified: bool
    why_unified: str | None  # None if the flag is not needed
    why_total: str
    why_parallel: str
    why_batch: str
    cut: tuple[str, str] | None = None  # message and remedy, if a request can have less than the user set


class Reach(Struct, frozen=True):
    """A context of ``total`` tokens for ``parallel`` slots, so that one request may have ``per_request``."""

    parallel: int
    total: int
    per_request: int
    why: str


def decide_context(inputs: PlanInputs, reach: Reach | None = None, *, image_tokens: int = 0) -> Context:
    """Choose the slots, and the tokens of each: the smallest preferred context, or ``reach``.

    ``image_tokens``: what the projector needs in one micro-batch. Raises UsageInvalid for invalid numbers.
    """
    capabilities, model, extra_args = inputs.capabilities, inputs.model, inputs.extra_args
    settings, prefers = inputs.settings, inputs.prefers
    parallel, auto, why_parallel = _parallel(inputs)
    if reach is not None and reach.parallel < parallel:
        parallel, why_parallel = reach.parallel, "fewer slots, each of which takes a longer request"
    why_unified = None
    if _shares_context(capabilities) and parallel > 1 and not prefers.server_defaults:
        if _has_pool(inputs):
            why_unified = "the slots share one context: a long request can use what the others leave free"
        elif extra_args.has("--ctx-size") and settings.parallel is None and not extra_args.has("--parallel"):
            # As llama-server itself treats -c without a number of slots.
            why_unified = "the slots share the context set after --, so one request can use all of it"
    if extra_args.has("--kv-unified"):
        unified = extra_args.switch("--kv-unified")
        why_unified = why_unified if unified else None
    else:
        unified = why_unified is not None
    unified = unified or auto  # "auto" shares even with --no-kv-unified (b11434 [run])
    total, why_total = extra_args.number("--ctx-size"), "set after --"
    if total is None and settings.ctx_size is None and prefers.server_defaults:
        total, why_total = capabilities.default_number("--ctx-size") or 0, "llama-server's own choice"
    if total == 0:
        # b11434 gives the model's context to every slot, b10068 divides it [run]. The option is between them.
        copies = parallel if capabilities.knows("--kv-unified-per-slot") and not unified else 1
        total = (model.context_length or _FALLBACK_CONTEXT) * copies
    least = None
    if total is None:
        tokens, why = _per_request(inputs)
        slots = "the only slot" if parallel == 1 else f"each of {parallel} slots"
        total, why_total = tokens * parallel, f"{tokens} tokens for {slots}: {why}"
        if reach is not None:
            total, why_total, least = reach.total, reach.why, tokens
        if unified:
            why_total += "; a request can use what the others leave free"
    elif total < _MIN_TOKENS * parallel:
        share = f", since {parallel} slots share it" if parallel > 1 else ""
        at_least = f"{_MIN_TOKENS * parallel} or more{share}"
        raise out_of_range("--ctx-size", total, f"{at_least}, or 0 for the model's own context")
    if total > _MAX_TOKENS:
        raise out_of_range("--ctx-size times --parallel", total, f"at most {_MAX_TOKENS}")
    per_request = total if unified else total // parallel
    own, cut = model.context_length, None
    if _shares_context(capabilities) and 0 < own < per_request:
        # "the slot context exceeds the training context of the model - capping" (b11434 [run]).
        per_request = own
        why_total += f"; this build limits each request to the model's {own}"
        if total > own * parallel:  # else the slots share it
            is_passed = extra_args.has("--ctx-size")
            asked = total if is_passed else settings.ctx_size
            why = f"--ctx-size {asked} is more than the {own} tokens that the model was trained for"
            cut = (f"{why}. This llama-server gives no request more: {own} are used.", _EXTEND.format(own))
            if not is_passed:
                total = own * parallel
                why_total = f"{own} tokens for each slot: {why}, and this build gives no request more"
    cells = ContextShape(total, parallel, ubatch=1, unified=unified).cells_per_stream
    if image_tokens:
        image_tokens = max(image_tokens, extra_args.number("--image-max-tokens") or 0)
    batch, ubatch, why_batch = _batches(inputs, cells, parallel, image_tokens)
    return Context(
        *(per_request, parallel, total, least, batch, ubatch, image_tokens, unified),
        *(why_unified, why_total, why_parallel, why_batch, cut),
    )


def give_context(line: CommandLine, settings: Settings, context: Context) -> None:
    """Add the flags of slots, context and batches."""
    asked = asked_with("--ctx-size", settings.ctx_size)
    line.give("--ctx-size", context.total, context.why_total, asked=asked)
    asked = asked_with("--parallel", settings.parallel)
    line.give("--parallel", context.parallel, context.why_parallel, asked=asked)
    by_itself = "this build does so by default"
    line.give("--cont-batching", None, "requests can join and leave a running batch", otherwise=by_itself)
    if context.why_unified is not None:
        line.give("--kv-unified", None, context.why_unified)
        # Else it moves all idle conversations to its prompt cache at each new request, or drops them if that
        # is too small, although the pool has room (b10068, b11434).
        why = "idle slots keep their conversations until the others need the tokens"
        line.give("--no-cache-idle-slots", None, why, otherwise="this build does not clear idle slots")
    line.give("--batch-size", context.batch, context.why_batch)
    line.give("--ubatch-size", context.ubatch, context.why_batch, essential=context.image_tokens > 0)


def reaches(inputs: PlanInputs) -> Iterator[Reach]:
    """The longer contexts that a plan may choose in place of the smallest preferred one, the best first.

    Where the slots share one context, all of them stay. In other builds, fewer slots are longer ones. The
    lengths are round, so that they seldom depend on a little more or less free memory.
    """
    own, smallest = inputs.model.context_length, inputs.prefers.ctx_size
    if not inputs.prefers.grows or inputs.serves is not ModelClass.DECODER:
        return
    if inputs.bounds.parallel is not None or inputs.bounds.ctx_size is not None:
        return  # the memory was too small for more
    if inputs.sets_length:
        return
    parallel, auto, _ = _parallel(inputs)
    extra_args = inputs.extra_args
    divides = extra_args.has("--kv-unified") and not extra_args.switch("--kv-unified")
    shares = auto or (_shares_context(inputs.capabilities) and not divides)
    if shares or parallel == 1:
        lengths = (length for length in _round_lengths(own) if length > smallest * parallel)
        yield from (Reach(parallel, length, length, _why_reach(length, own)) for length in lengths)
        return
    for length in _round_lengths(own):
        if length > smallest:
            fixed = inputs.settings.parallel is not None or extra_args.has("--parallel")
            counts = [parallel >> halved for halved in range(1 if fixed else parallel.bit_length())]
            yield from (Reach(count, count * length, length, _why_reach(length, own)) for count in counts)


def _why_reach(length: int, own: int) -> str:
    if length == own:
        return "the longest context that the model was trained for"
    return f"as much of the model's {own} tokens as the free memory holds comfortably"


def _round_lengths(most: int) -> Iterator[int]:
    """``most``, and below it the powers of two and the numbers halfway between two of them."""
    yield most
    power = 1 << most.bit_length()
    while power > _FALLBACK_CONTEXT:
        for length in (power, power * 3 // 4):
            if length < most:
                yield length
        power //= 2


def _has_pool(inputs: PlanInputs) -> bool:
    """Whether the slots share one context by llamasup's choice."""
    prefers = inputs.prefers
    if inputs.serves is not ModelClass.DECODER:
        return False
    grows = prefers.grows and not inputs.sets_length
    return prefers.shared_cells or (grows and inputs.model.context_length > prefers.ctx_size)


def _shares_context(capabilities: Capabilities) -> bool:
    """Whether one request can use a whole unified KV cache. Builds before November 2025 divide it (#16736).

    Since the same change, the number of slots is "auto" by default.
    """
    return capabilities.default_number("--parallel") == _AUTO


def _parallel(inputs: PlanInputs) -> tuple[int, bool, str]:
    """The number of slots, whether llama-server chooses it, and the reason."""
    capabilities, settings, extra_args = inputs.capabilities, inputs.settings, inputs.extra_args
    prefers, bounds = inputs.prefers, inputs.bounds
    passed = extra_args.number("--parallel")
    if passed == _AUTO:
        why = f"set after --: llama-server chooses, and takes {_AUTO_SLOTS} slots with one KV cache"
        return _AUTO_SLOTS, True, why
    for asked in (passed, settings.parallel):
        if asked is not None and not 1 <= asked <= _MAX_SLOTS:
            raise out_of_range("--parallel", asked, f"1 to {_MAX_SLOTS}")
    if passed is not None:
        return passed, False, "set after --"
    if settings.parallel is not None:
        return settings.parallel, False, "set with --parallel"
    if prefers.server_defaults:
        auto = _shares_context(capabilities)
        return _AUTO_SLOTS if auto else 1, auto, "llama-server's own choice"
    if extra_args.has("--ctx-size") and not _shares_context(capabilities):
        return 1, False, "the context set after -- is for one request, and this build would divide it"
    if inputs.serves is ModelClass.ENCODER_DECODER:
        return 1, False, "llama.cpp runs an encoder-decoder model on one sequence at a time"
    if bounds.parallel is not None and bounds.parallel < prefers.parallel:
        return bounds.parallel, False, f"reduced from {prefers.parallel}: {bounds.why}"
    if prefers.parallel == 1:
        return 1, False, "one request at a time uses the whole machine"
    return prefers.parallel, False, f"{prefers.parallel} requests can run at a time, each in its own slot"


def _per_request(inputs: PlanInputs) -> tuple[int, str]:
    own, asked = inputs.model.context_length, inputs.settings.ctx_size
    prefers, bounds = inputs.prefers, inputs.bounds
    if asked is None:
        preferred = min(own, prefers.ctx_size) if own else prefers.ctx_size
        if bounds.ctx_size is not None and bounds.ctx_size < preferred:
            return bounds.ctx_size, f"reduced from {preferred}: {bounds.why}"
        if preferred == own:
            return own, "the longest context that the model was trained for"
        return preferred, f"the default; the model was trained for {own}" if own else "the default"
    if asked < _MIN_TOKENS:
        least = f"{_MIN_TOKENS} or more tokens per request"
        raise out_of_range("--ctx-size", asked, f"{least}; leave it out for the default")
    if 0 < own < asked:
        return asked, f"set with --ctx-size, above the {own} that the model was trained for"
    return asked, "set with --ctx-size"


def _batches(inputs: PlanInputs, cells: int, parallel: int, image_tokens: int) -> tuple[int, int, str]:
    batch, ubatch = inputs.prefers.batch, inputs.prefers.ubatch
    why = "reads prompts fast with a small compute buffer"
    reads_whole = inputs.serves in _WHOLE_INPUT or (
        inputs.serves is ModelClass.DECISION and inputs.model.embeds_decisions
    )
    if reads_whole and not inputs.prefers.server_defaults:
        # Else: "input is too large to process. increase the physical batch size".
        # A slot has at least 256 cells, and an input can fill them all.
        batch = ubatch = max(cells, parallel)
        why = "the whole input of a request must fit in one micro-batch"
    if ubatch < image_tokens:
        ubatch, why = image_tokens, f"an image of {image_tokens} tokens must fit in one micro-batch"
    passed = {name: inputs.extra_args.number(name) for name in ("--batch-size", "--ubatch-size")}
    least = {"--batch-size": max(parallel, _MIN_TOKENS), "--ubatch-size": 1}
    for name, value in passed.items():
        if value is not None and value < least[name]:
            raise out_of_range(name, value, f"{least[name]} or more")
    batch = passed["--batch-size"] or batch
    ubatch = min(passed["--ubatch-size"] or ubatch, batch)
    if ubatch < min(image_tokens, batch):  # a larger image is computed in pieces of a batch
        raise UsageInvalid(
            f"--ubatch-size {ubatch} is smaller than an image of this projector, which has {image_tokens} "
            "tokens: llama-server would abort",
            remedy=f"Give {image_tokens} or more, or leave it out.",
        )
    return batch, ubatch, why
