"""The facts of ``llamasup inspect``: what a model is, the memory it needs, and whether it fits here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from llamasup.core.gguf.facts import PURPOSES, ModelFacts, is_served
from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities, parse_help
from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.inputs import PlanInputs
from llamasup.core.planning.ladder import admit
from llamasup.core.planning.memory.kv_cache import ContextShape, kv_bytes
from llamasup.core.planning.projectors import pairings_of
from llamasup.core.planning.sizes import PlanSizes, choose_sizes
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.facts import Hardware
from llamasup.errors import LlamasupError

# Longer than every sliding window, so the KV cache grows linearly. A multiple of llama.cpp's 256 cells.
_LONG_CONTEXT = 1 << 20
# All options that the sizes of a plan depend on, as in b11434 and later: inspect runs no llama-server.
_CURRENT_BUILD = Capabilities(
    "current",
    parse_help(
        """
-c,    --ctx-size N              (default: 0)
-np,   --parallel N              (default: -1)
-fa,   --flash-attn [on|off|auto]  (default: 'auto')
-ctk,  --cache-type-k TYPE       allowed values: f16, q8_0
-ctv,  --cache-type-v TYPE       allowed values: f16, q8_0
--spec-type none,draft-simple,draft-mtp  (default: none)
--swa-full                       all cells for sliding layers
--fit [on|off]                   (default: 'on')
--load-mode MODE                 (default: auto)
"""
    ),
    devices=(),
)


# --- memory --------------------------------------------------------------------------------------


class KvGrowth(Struct, frozen=True):
    """The memory of one request's context: ``slot_bytes``, plus ``bytes_per_1000_tokens`` for its tokens.

    The fields are those of the JSON.
    """

    bytes_per_1000_tokens: int
    slot_bytes: int  # sliding windows and recurrent states, of the same size for every long context


def kv_growths(facts: ModelFacts) -> dict[str, KvGrowth]:
    """Return the growth of one slot's KV cache with its context, by the types that the model can use."""
    types = ("f16", "q8_0") if facts.quantized_kv_fits else ("f16",)
    return {cache_type: _kv_growth(facts, cache_type) for cache_type in types}


def _kv_growth(facts: ModelFacts, cache_type: str) -> KvGrowth:

    def size(tokens: int) -> int:
        return kv_bytes(
            facts, ContextShape(tokens, parallel=1, ubatch=512, k_type=cache_type, v_type=cache_type)
        )

    once, twice = size(_LONG_CONTEXT), size(2 * _LONG_CONTEXT)
    return KvGrowth((twice - once) * 1000 // _LONG_CONTEXT, max(0, 2 * once - twice))


class Fit(Struct, frozen=True):
    """Whether a model fits into the memory here, and the sizes that were chosen for it.

    The fields are those of the JSON.
    """

    fits: bool
    needed_bytes: int
    available_bytes: int
    ctx_size: int  # tokens per request
    parallel: int
    kv_type: str
    reduced: bool  # fewer slots, a smaller context or a smaller KV type than the plan's defaults
    foreign_byte_order: bool  # the file has the other byte order, which llama-server refuses (b11434 [run])


def fits_here(facts: ModelFacts, hardware: Hardware, byte_order: str = "little") -> Fit | None:
    """Return the sizes of a ``plan`` without user settings; None for a file that is not served by itself.

    If even the smallest plan is too large, the sizes of the default plan. ``byte_order`` is the machine's
    ``sys.byteorder``. GPU memory does not count, since only a runtime can list the devices.
    """
    if not is_served(facts):
        return None

    def candidate(bounds: PlanLimits) -> PlanSizes:
        return choose_sizes(PlanInputs(_CURRENT_BUILD, facts, hardware, Settings(), ExtraArgs(), bounds))

    admission = admit(candidate, PlanLimits())
    foreign = facts.big_endian != (byte_order == "big")
    sizes = admission.preferred if foreign else admission.plan
    return Fit(
        fits=sizes.memory.fits and not foreign,
        needed_bytes=sizes.memory.total_bytes,
        available_bytes=sizes.memory.available_bytes,
        ctx_size=sizes.ctx_size_of_slot,
        parallel=sizes.parallel,
        kv_type=sizes.kv_type,
        reduced=sizes is not admission.preferred,
        foreign_byte_order=foreign,
    )


# --- projectors ----------------------------------------------------------------------------------


def projectors_of(models: Mapping[str, ModelFacts], broken: Iterable[str] = ()) -> dict[str, str]:
    """Return the path of each model's projector, by the model's path."""
    pairs = pairings_of(models, broken)
    return {model: pair.projector.path for model, pair in pairs.items() if pair.projector is not None}


# --- as JSON -------------------------------------------------------------------------------------


def model_as_json(
    path: str, facts: ModelFacts, fit: Fit | None, projector: str | None = None
) -> dict[str, Any]:
    """Return the ``inspect`` object of the contract (docs/design.md), with more fields after it.

    ``projector`` is the path of the projector that would be loaded with the model.
    """
    return {
        "path": path,
        "file_bytes": facts.file_bytes,
        "expected_bytes": facts.expected_bytes,
        "architecture": facts.architecture,
        "class": facts.model_class.value,
        "name": facts.name,
        "parameters": facts.parameters,
        "quantization": facts.quantization,
        "layers": facts.layers,
        "context_length": facts.context_length,
        "embedding_length": facts.embedding_length,
        "head_count": max(facts.head_counts, default=0),
        "head_count_kv": max(facts.head_counts_kv, default=0),
        "vocab_size": facts.vocab_size,
        "chat_template": asdict(facts.chat_template),
        "purpose": PURPOSES[facts.model_class],
        "files": facts.split.count,
        "key_length": facts.key_length,
        "value_length": facts.value_length,
        "feed_forward_length": max(facts.feed_forward_lengths, default=0),
        "sliding_window": facts.sliding_window,
        "sliding_layers": sum(facts.sliding_layers),
        "mla": facts.mla,
        "recurrent_layers": sum(facts.recurrent_layers),
        "experts": _of(facts.experts, "count", "used", "shared") if facts.experts.count else None,
        "mtp_layers": facts.mtp_layers,
        "pooling": facts.pooling,
        "causal": facts.causal,
        "fill_in_middle": facts.fim.usable,
        "tokenizer": _of(facts.vocabulary, "model", "pre", "bos", "eos"),
        "weights": {
            "total_bytes": facts.weights_bytes,
            "layers_bytes": sum(facts.layer_bytes),
            "largest_layer_bytes": max(facts.layer_bytes, default=0),
            "experts_bytes": sum(facts.expert_bytes),
            "input_bytes": facts.input_bytes,
            "output_bytes": facts.output_bytes,
            "tied_output": facts.tied_output,
        },
        "kv_cache": {kv_type: asdict(growth) for kv_type, growth in kv_growths(facts).items()}
        if is_served(facts)
        else None,
        "fits_here": None if fit is None else asdict(fit),
        "projector": projector,
        "gguf_version": facts.version,
        "big_endian": facts.big_endian,
    }


def _of(facts: object, *names: str) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in names}


def broken_as_json(path: str, error: LlamasupError) -> dict[str, Any]:
    """Return the entry of a folder's list for an invalid file."""
    return {"path": path, "error": _of(error, "cause", "message", "remedy")}
