"""How many slots, how much context for each, and the batches that fill it.

What the user set (``Settings``) or passes straight to llama-server (``ByHand``, which wins) stands; the rest
starts from what the profile prefers and stays within the bounds of this machine's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamasup.core.bounds import Bounds
from llamasup.core.context_memory import ContextShape
from llamasup.core.errors import UsageInvalid
from llamasup.core.flags import ByHand
from llamasup.core.model_facts import ModelClass, ModelFacts
from llamasup.core.profiles import Preferences
from llamasup.core.settings import Settings

__all__ = ["Context", "decide_context"]

_OWN_SLOTS = 4  # llama-server's choice at --parallel -1
_OWN_CONTEXT = 4096  # of a model that names none
_MOST_SLOTS = 256  # LLAMA_MAX_SEQ: "n_seq_max must be <= 256" (b11434 [run])
# A context of one token, or a batch of fewer tokens than slots, aborts in llama-server's own warm-up
# ("get_sub_batch: failed to add token", b11434 [run]).
_LEAST_TOKENS = 2
_MOST_TOKENS = 2**31 - 1  # llama-server reads --ctx-size as a C int

# Classes whose whole input must be in one micro-batch.
_WHOLE_INPUT = frozenset({ModelClass.ENCODER, ModelClass.RERANKER, ModelClass.ENCODER_DECODER})


@dataclass(frozen=True, slots=True)
class Context:
    per_request: int  # tokens that one request may use
    parallel: int
    total: int  # as llama-server's --ctx-size
    batch: int
    ubatch: int
    unified: bool
    why_total: str
    why_parallel: str
    why_batch: str


def decide_context(
    model: ModelFacts,
    serves: ModelClass,
    settings: Settings,
    by_hand: ByHand,
    prefers: Preferences,
    bounds: Bounds,
    *,
    can_share: bool,
) -> Context:
    """Slots, and tokens for each; ``can_share``: the build knows ``--kv-unified``.

    Raises UsageInvalid for numbers that cannot be meant.
    """
    parallel, auto, why_parallel = _parallel(serves, settings, by_hand, prefers, bounds)
    shares = prefers.shared_cells and can_share and serves is ModelClass.DECODER and parallel > 1
    if by_hand.has("--kv-unified"):
        shares = by_hand.switch("--kv-unified")
    unified = shares or auto
    total = by_hand.number("--ctx-size")
    if total is not None:
        total = model.context_length if total == 0 else total
        if total < _LEAST_TOKENS * parallel:
            least = f"{_LEAST_TOKENS * parallel} or more, since {parallel} slots share it"
            raise _bad("--ctx-size", total, f"{least}, or 0 for the model's own")
        per_request = total if unified else total // parallel
        why_total = "set by hand"
    else:
        per_request, why = _per_request(model, settings, prefers, bounds)
        total = per_request * parallel
        why_total = f"{per_request} tokens for each of {parallel} slots: {why}"
        if unified:
            per_request = total
            why_total += "; a request may take what the others leave"
    if total > _MOST_TOKENS:
        raise _bad("--ctx-size times --parallel", total, f"at most {_MOST_TOKENS}")
    cells = ContextShape(total, parallel, ubatch=1, unified=unified).cells_per_stream
    batch, ubatch, why_batch = _batches(serves, cells, parallel, by_hand, prefers)
    return Context(per_request, parallel, total, batch, ubatch, unified, why_total, why_parallel, why_batch)


def _parallel(
    serves: ModelClass, settings: Settings, by_hand: ByHand, prefers: Preferences, bounds: Bounds
) -> tuple[int, bool, str]:
    passed = by_hand.number("--parallel")
    if passed == -1:
        return (
            _OWN_SLOTS,
            True,
            f"set by hand: as many as llama-server likes, which is {_OWN_SLOTS} with one KV cache",
        )
    for asked in (passed, settings.parallel):
        if asked is not None and not 1 <= asked <= _MOST_SLOTS:
            raise _bad("--parallel", asked, f"1 to {_MOST_SLOTS}")
    if passed is not None:
        return passed, False, "set by hand"
    if settings.parallel is not None:
        return settings.parallel, False, "asked for with --parallel"
    if prefers.own_choice:
        return _OWN_SLOTS, True, "left to llama-server"
    if serves is ModelClass.ENCODER_DECODER:
        return 1, False, "llama.cpp runs an encoder-decoder for one sequence at a time"
    if bounds.parallel is not None and bounds.parallel < prefers.parallel:
        return bounds.parallel, False, f"instead of {prefers.parallel}: {bounds.why}"
    if prefers.parallel == 1:
        return 1, False, "one request at a time, with all of the machine to itself"
    return prefers.parallel, False, f"{prefers.parallel} requests at a time, each with a slot of its own"


def _per_request(
    model: ModelFacts, settings: Settings, prefers: Preferences, bounds: Bounds
) -> tuple[int, str]:
    own = model.context_length
    asked = settings.ctx_size
    if asked is None and prefers.own_choice:
        return -(-(own or _OWN_CONTEXT) // _OWN_SLOTS), "left to llama-server"
    if asked is None:
        preferred = min(own, prefers.ctx_size) if own else prefers.ctx_size
        if bounds.ctx_size is not None and bounds.ctx_size < preferred:
            return bounds.ctx_size, f"instead of {preferred}: {bounds.why}"
        if preferred == own:
            return own, "all that the model was trained for"
        return preferred, f"the default; the model was trained for {own}" if own else "the default"
    if asked < _LEAST_TOKENS:
        least = f"{_LEAST_TOKENS} tokens or more for each request"
        raise _bad("--ctx-size", asked, f"{least}; leave it out for the default")
    if 0 < own < asked:
        return asked, f"asked for with --ctx-size, beyond the {own} that the model was trained for"
    return asked, "asked for with --ctx-size"


def _batches(
    serves: ModelClass, cells: int, parallel: int, by_hand: ByHand, prefers: Preferences
) -> tuple[int, int, str]:
    batch, ubatch = prefers.batch, prefers.ubatch
    why = "fast prompts in a small compute buffer"
    if serves in _WHOLE_INPUT:
        # Else: "input is too large to process. increase the physical batch size".
        # A slot has more cells than were asked for (256 at least), and an input may fill them all.
        batch = ubatch = max(cells, parallel)
        why = "the whole input of a request must fit in one micro-batch"
    passed = {name: by_hand.number(name) for name in ("--batch-size", "--ubatch-size")}
    least = {"--batch-size": max(parallel, _LEAST_TOKENS), "--ubatch-size": 1}
    for name, value in passed.items():
        if value is not None and value < least[name]:
            raise _bad(name, value, f"{least[name]} or more")
    batch = passed["--batch-size"] or batch
    return batch, min(passed["--ubatch-size"] or ubatch, batch), why


def _bad(flag: str, value: int, allowed: str) -> UsageInvalid:
    return UsageInvalid(f"{flag} {value} is out of range", remedy=f"give {allowed}")
