"""Chooses the number of slots, the context of each, and the batch sizes.

Arguments after ``--`` (``ExtraArgs``) win over ``Settings``, and these over the profile, whose values can be
reduced to fit in memory.
"""

from __future__ import annotations

from msgspec import Struct

from llamasup.errors import UsageInvalid
from llamasup.gguf.facts import ModelClass, ModelFacts
from llamasup.llama_server.argv_builder import CommandLine, ExtraArgs, asked_with
from llamasup.llama_server.help_text import Capabilities
from llamasup.llama_server.plan_limits import PlanLimits
from llamasup.planning.memory.kv_cache import ContextShape
from llamasup.planning.profiles import Preferences
from llamasup.settings.model import Settings

__all__ = ["Context", "decide_context", "give_context"]

_AUTO = -1  # as --parallel: four slots that share the context
_AUTO_SLOTS = 4
_FALLBACK_CONTEXT = 4096  # of a model without a context length
_MAX_SLOTS = 256  # LLAMA_MAX_SEQ: "n_seq_max must be <= 256" (b11434 [run])
# A context of one token, or a batch of fewer tokens than slots, aborts in llama-server's own warm-up
# ("get_sub_batch: failed to add token", b11434 [run]).
_MIN_TOKENS = 2
_MAX_TOKENS = 2**31 - 1  # llama-server reads --ctx-size as a C int

# Classes whose whole input must be in one micro-batch.
_WHOLE_INPUT = frozenset({ModelClass.ENCODER, ModelClass.RERANKER, ModelClass.ENCODER_DECODER})


class Context(Struct, frozen=True):
    per_request: int  # tokens that one request may use
    parallel: int
    total: int  # as llama-server's --ctx-size
    batch: int
    ubatch: int
    unified: bool
    why_unified: str | None  # None if the flag is not needed
    why_total: str
    why_parallel: str
    why_batch: str


def decide_context(
    capabilities: Capabilities,
    model: ModelFacts,
    serves: ModelClass,
    settings: Settings,
    extra_args: ExtraArgs,
    prefers: Preferences,
    bounds: PlanLimits,
) -> Context:
    """The slots, and the tokens of each. Raises UsageInvalid for invalid numbers."""
    parallel, auto, why_parallel = _parallel(capabilities, serves, settings, extra_args, prefers, bounds)
    why_unified = None
    if capabilities.knows("--kv-unified") is not None and parallel > 1 and not prefers.server_defaults:
        if prefers.shared_cells and serves is ModelClass.DECODER:
            why_unified = "the slots share one context: a long request can use what the others leave free"
        elif extra_args.has("--ctx-size") and settings.parallel is None and not extra_args.has("--parallel"):
            # As llama-server itself treats -c without a number of slots.
            why_unified = "the slots share the context set after --, so one request can use all of it"
    shares = why_unified is not None
    if extra_args.has("--kv-unified"):
        shares = extra_args.switch("--kv-unified")
    unified = shares or auto  # "auto" shares even with --no-kv-unified (b11434 [run])
    total, why_total = extra_args.number("--ctx-size"), "set after --"
    if total is None and settings.ctx_size is None and prefers.server_defaults:
        total, why_total = capabilities.default_number("--ctx-size") or 0, "llama-server's own choice"
    if total == 0:
        # b11434 gives the model's context to every slot, b10068 divides it [run]. The option is between them.
        copies = parallel if capabilities.knows("--kv-unified-per-slot") and not unified else 1
        total = (model.context_length or _FALLBACK_CONTEXT) * copies
    if total is None:
        tokens, why = _per_request(model, settings, prefers, bounds)
        slots = "the only slot" if parallel == 1 else f"each of {parallel} slots"
        total, why_total = tokens * parallel, f"{tokens} tokens for {slots}: {why}"
        if unified:
            why_total += "; a request can use what the others leave free"
    elif total < _MIN_TOKENS * parallel:
        share = f", since {parallel} slots share it" if parallel > 1 else ""
        least = f"{_MIN_TOKENS * parallel} or more{share}"
        raise _bad("--ctx-size", total, f"{least}, or 0 for the model's own context")
    if total > _MAX_TOKENS:
        raise _bad("--ctx-size times --parallel", total, f"at most {_MAX_TOKENS}")
    per_request = total if unified else total // parallel
    if _has_auto_slots(capabilities) and 0 < model.context_length < per_request:
        # "the slot context exceeds the training context of the model - capping" (b11434 [run]).
        per_request = model.context_length
        why_total += f"; this build limits each request to the model's {per_request}"
    cells = ContextShape(total, parallel, ubatch=1, unified=unified).cells_per_stream
    batch, ubatch, why_batch = _batches(serves, cells, parallel, extra_args, prefers)
    return Context(
        per_request, parallel, total, batch, ubatch, unified, why_unified, why_total, why_parallel, why_batch
    )


def give_context(line: CommandLine, settings: Settings, context: Context) -> None:
    """Slots, context and batches."""
    asked = asked_with("--ctx-size", settings.ctx_size)
    line.give("--ctx-size", context.total, context.why_total, asked=asked)
    asked = asked_with("--parallel", settings.parallel)
    line.give("--parallel", context.parallel, context.why_parallel, asked=asked)
    by_itself = "this build does so by default"
    line.give("--cont-batching", None, "requests can join and leave a running batch", otherwise=by_itself)
    if context.why_unified is not None:
        line.give("--kv-unified", None, context.why_unified)
    line.give("--batch-size", context.batch, context.why_batch)
    line.give("--ubatch-size", context.ubatch, context.why_batch)


def _has_auto_slots(capabilities: Capabilities) -> bool:
    return capabilities.default_number("--parallel") == _AUTO


def _parallel(
    capabilities: Capabilities,
    serves: ModelClass,
    settings: Settings,
    extra_args: ExtraArgs,
    prefers: Preferences,
    bounds: PlanLimits,
) -> tuple[int, bool, str]:
    """The number of slots, whether llama-server chooses it, and the reason."""
    passed = extra_args.number("--parallel")
    if passed == _AUTO:
        why = f"set after --: llama-server chooses, and takes {_AUTO_SLOTS} slots with one KV cache"
        return _AUTO_SLOTS, True, why
    for asked in (passed, settings.parallel):
        if asked is not None and not 1 <= asked <= _MAX_SLOTS:
            raise _bad("--parallel", asked, f"1 to {_MAX_SLOTS}")
    if passed is not None:
        return passed, False, "set after --"
    if settings.parallel is not None:
        return settings.parallel, False, "set with --parallel"
    if prefers.server_defaults:
        auto = _has_auto_slots(capabilities)
        return _AUTO_SLOTS if auto else 1, auto, "llama-server's own choice"
    if extra_args.has("--ctx-size") and capabilities.knows("--kv-unified") is None:
        return 1, False, "the context set after -- is for one request, and this build would divide it"
    if serves is ModelClass.ENCODER_DECODER:
        return 1, False, "llama.cpp runs an encoder-decoder model on one sequence at a time"
    if bounds.parallel is not None and bounds.parallel < prefers.parallel:
        return bounds.parallel, False, f"reduced from {prefers.parallel}: {bounds.why}"
    if prefers.parallel == 1:
        return 1, False, "one request at a time uses the whole machine"
    return prefers.parallel, False, f"{prefers.parallel} requests can run at a time, each in its own slot"


def _per_request(
    model: ModelFacts, settings: Settings, prefers: Preferences, bounds: PlanLimits
) -> tuple[int, str]:
    own = model.context_length
    asked = settings.ctx_size
    if asked is None:
        preferred = min(own, prefers.ctx_size) if own else prefers.ctx_size
        if bounds.ctx_size is not None and bounds.ctx_size < preferred:
            return bounds.ctx_size, f"reduced from {preferred}: {bounds.why}"
        if preferred == own:
            return own, "the longest context that the model was trained for"
        return preferred, f"the default; the model was trained for {own}" if own else "the default"
    if asked < _MIN_TOKENS:
        least = f"{_MIN_TOKENS} or more tokens per request"
        raise _bad("--ctx-size", asked, f"{least}; leave it out for the default")
    if 0 < own < asked:
        return asked, f"set with --ctx-size, above the {own} that the model was trained for"
    return asked, "set with --ctx-size"


def _batches(
    serves: ModelClass, cells: int, parallel: int, extra_args: ExtraArgs, prefers: Preferences
) -> tuple[int, int, str]:
    batch, ubatch = prefers.batch, prefers.ubatch
    why = "reads prompts fast with a small compute buffer"
    if serves in _WHOLE_INPUT and not prefers.server_defaults:
        # Else: "input is too large to process. increase the physical batch size".
        # A slot has at least 256 cells, and an input can fill them all.
        batch = ubatch = max(cells, parallel)
        why = "the whole input of a request must fit in one micro-batch"
    passed = {name: extra_args.number(name) for name in ("--batch-size", "--ubatch-size")}
    least = {"--batch-size": max(parallel, _MIN_TOKENS), "--ubatch-size": 1}
    for name, value in passed.items():
        if value is not None and value < least[name]:
            raise _bad(name, value, f"{least[name]} or more")
    batch = passed["--batch-size"] or batch
    return batch, min(passed["--ubatch-size"] or ubatch, batch), why


def _bad(flag: str, value: int, allowed: str) -> UsageInvalid:
    return UsageInvalid(f"{flag} {value} is out of range", remedy=f"give {allowed}")
