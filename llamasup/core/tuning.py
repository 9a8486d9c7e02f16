"""The numbers of a plan: context and slots, KV cache, threads, locked memory, prompt cache.

Each decision is a function of the facts, what the user set (``Settings``) and what the user passes straight
to llama-server (``ByHand``, which wins), and returns the values with the sentence that explains them.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamasup.core.capabilities import Capabilities, Option
from llamasup.core.context_memory import CACHE_TYPES, ContextShape, has_kv_cache
from llamasup.core.errors import UsageInvalid
from llamasup.core.flags import ByHand
from llamasup.core.hardware import Hardware
from llamasup.core.memory import MemoryEstimate
from llamasup.core.model_facts import ModelClass, ModelFacts
from llamasup.core.settings import Settings

__all__ = [
    "Context",
    "KvCache",
    "Threads",
    "cache_ram_mib",
    "decide_context",
    "decide_kv_cache",
    "decide_threads",
    "why_no_lock",
    "why_no_priority",
]

DEFAULT_CTX_SIZE = 8192  # tokens per request
DEFAULT_PARALLEL = 4  # as llama-server's own "auto" has it
_MOST_SLOTS = 256  # LLAMA_MAX_SEQ: "n_seq_max must be <= 256" (b11434 [run])
# A context of one token, or a batch of fewer tokens than slots, aborts in llama-server's own warm-up
# ("get_sub_batch: failed to add token", b11434 [run]).
_LEAST_TOKENS = 2
_MOST_TOKENS = 2**31 - 1  # llama-server reads --ctx-size as a C int
_MIB = 1 << 20

# Classes whose whole input must be in one micro-batch.
_WHOLE_INPUT = frozenset({ModelClass.ENCODER, ModelClass.RERANKER, ModelClass.ENCODER_DECODER})


# --- context and slots ---------------------------------------------------------------------------


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


def decide_context(model: ModelFacts, serves: ModelClass, settings: Settings, by_hand: ByHand) -> Context:
    """Slots, and tokens for each. Raises UsageInvalid for numbers that cannot be meant."""
    parallel, auto, why_parallel = _parallel(serves, settings, by_hand)
    unified = by_hand.switch("--kv-unified") or auto
    total = by_hand.number("--ctx-size")
    if total is not None:
        total = model.context_length if total == 0 else total
        if total < _LEAST_TOKENS * parallel:
            least = f"{_LEAST_TOKENS * parallel} or more, since {parallel} slots share it"
            raise _bad("--ctx-size", total, f"{least}, or 0 for the model's own")
        per_request = total if unified else total // parallel
        why_total = "set by hand"
    else:
        per_request, why = _per_request(model, settings)
        total = per_request * parallel
        why_total = f"{per_request} tokens for each of {parallel} slots: {why}"
        if unified:
            per_request = total
    if total > _MOST_TOKENS:
        raise _bad("--ctx-size times --parallel", total, f"at most {_MOST_TOKENS}")
    cells = ContextShape(total, parallel, ubatch=1, unified=unified).cells_per_stream
    batch, ubatch, why_batch = _batches(serves, cells, parallel, by_hand)
    return Context(per_request, parallel, total, batch, ubatch, unified, why_total, why_parallel, why_batch)


def _parallel(serves: ModelClass, settings: Settings, by_hand: ByHand) -> tuple[int, bool, str]:
    passed = by_hand.number("--parallel")
    if passed == -1:
        return (
            DEFAULT_PARALLEL,
            True,
            "set by hand: as many as llama-server likes, which is 4 with one KV cache",
        )
    for asked in (passed, settings.parallel):
        if asked is not None and not 1 <= asked <= _MOST_SLOTS:
            raise _bad("--parallel", asked, f"1 to {_MOST_SLOTS}")
    if passed is not None:
        return passed, False, "set by hand"
    if settings.parallel is not None:
        return settings.parallel, False, "asked for with --parallel"
    if serves is ModelClass.ENCODER_DECODER:
        return 1, False, "llama.cpp runs an encoder-decoder for one sequence at a time"
    return DEFAULT_PARALLEL, False, f"{DEFAULT_PARALLEL} requests at a time, each with a slot of its own"


def _per_request(model: ModelFacts, settings: Settings) -> tuple[int, str]:
    own = model.context_length
    asked = settings.ctx_size
    if asked is None:
        if 0 < own <= DEFAULT_CTX_SIZE:
            return own, "all that the model was trained for"
        return DEFAULT_CTX_SIZE, f"the default; the model was trained for {own}" if own else "the default"
    if asked < _LEAST_TOKENS:
        least = f"{_LEAST_TOKENS} tokens or more for each request"
        raise _bad("--ctx-size", asked, f"{least}; leave it out for the default")
    if 0 < own < asked:
        return asked, f"asked for with --ctx-size, beyond the {own} that the model was trained for"
    return asked, "asked for with --ctx-size"


def _batches(serves: ModelClass, cells: int, parallel: int, by_hand: ByHand) -> tuple[int, int, str]:
    batch, ubatch = 2048, 512
    why = "llama.cpp's own sizes: fast prompts in a small compute buffer"
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


# --- KV cache and flash attention ----------------------------------------------------------------

# llama-server's other words for the same (common/arg.cpp: is_truthy, is_falsey).
_FLASH_WORDS = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off"}


@dataclass(frozen=True, slots=True)
class KvCache:
    """What will be stored, and how. ``flash`` is None where the build has no such flag."""

    flash: str | None  # on, off, auto
    k_type: str
    v_type: str
    why_flash: str
    why_k: str
    why_v: str

    @property
    def name(self) -> str:
        """As people say it: one type, or K's and V's."""
        return self.k_type if self.k_type == self.v_type else f"{self.k_type}/{self.v_type}"


def decide_kv_cache(
    capabilities: Capabilities, model: ModelFacts, serves: ModelClass, settings: Settings, by_hand: ByHand
) -> KvCache:
    """Cache types and flash attention together, since a quantised V needs it. Raises UsageInvalid."""
    flash, why_flash = _flash(capabilities, model, settings, by_hand)
    flash_works = flash in ("on", "auto")
    asked = {}
    for flag in ("--cache-type-k", "--cache-type-v"):
        passed = by_hand.value(flag)
        asked[flag] = passed or settings.kv_type
        _check_type(capabilities, flag, asked[flag], flag if passed else "--kv-type")
    if not has_kv_cache(model):
        why = f"a {model.architecture} model keeps no keys and values"
        return KvCache(flash, "f16", "f16", why_flash, why, why)
    k_type, why_k = _cache_type(capabilities, "--cache-type-k", asked["--cache-type-k"], model, serves)
    v_type, why_v = _cache_type(capabilities, "--cache-type-v", asked["--cache-type-v"], model, serves)
    if _block(v_type) > 1 and not flash_works:
        why_v = "a quantised V needs flash attention, which " + (
            "was switched off" if flash == "off" else "this build does not have"
        )
        if asked["--cache-type-v"] is not None:
            raise UsageInvalid(
                f"the KV cache type {v_type} cannot be honoured: {why_v}",
                remedy="use --kv-type f16, or leave out --flash-attn off",
            )
        v_type = "f16"
    if flash == "auto" and _block(v_type) > 1 and settings.flash_attn is None and not by_hand.has("-fa"):
        flash, why_flash = "on", f"the {v_type} V cache needs it"
    return KvCache(flash, k_type, v_type, why_flash, why_k, why_v)


def _flash(
    capabilities: Capabilities, model: ModelFacts, settings: Settings, by_hand: ByHand
) -> tuple[str | None, str]:
    option = _accepted(capabilities, "--flash-attn")
    if option is None:
        return None, ""
    bare = option.argument is None
    if by_hand.has("--flash-attn"):
        value = by_hand.value("--flash-attn") or "on"
        return _FLASH_WORDS.get(value, value), "set by hand"
    if settings.flash_attn in ("on", "off"):
        return settings.flash_attn, f"asked for with --flash-attn {settings.flash_attn}"
    if bare and not has_kv_cache(model):
        return "off", "this model has no KV cache"
    if bare:
        return "on", "attention in less memory, and a quantised V cache needs it"
    return "auto", "on wherever the device can"


def _cache_type(
    capabilities: Capabilities, flag: str, asked: str | None, model: ModelFacts, serves: ModelClass
) -> tuple[str, str]:
    keys = flag == "--cache-type-k"
    lengths = (
        {model.key_length, model.key_length_swa} if keys else {model.value_length, model.value_length_swa}
    )
    if asked is not None:
        odd = [length for length in lengths if length % _block(asked)]
        if odd:
            raise UsageInvalid(
                f"the KV cache type {asked} packs {_block(asked)} values together, which does not divide "
                f"this model's heads of {max(odd)}",
                remedy="use --kv-type f16",
            )
        return asked, "asked for by hand"
    option = _accepted(capabilities, flag)
    if option is None or (option.allowed and "q8_0" not in option.allowed):
        return "f16", "this build has no q8_0 cache"
    if serves is not ModelClass.DECODER:
        return "f16", f"the cache of {serves} models is small and short-lived"
    if any(length % _block("q8_0") for length in lengths):
        return "f16", f"q8_0 packs 32 values together, which does not divide heads of {max(lengths)}"
    return "q8_0", "half the memory of f16, for nearly the same answers"


def _check_type(capabilities: Capabilities, flag: str, asked: str | None, given_as: str) -> None:
    option = _accepted(capabilities, flag)
    allowed = (option.allowed if option else ()) or tuple(CACHE_TYPES)
    if asked is not None and asked not in allowed:
        raise UsageInvalid(
            f"{given_as} {asked!r} is no KV cache type", remedy=f"use one of {', '.join(allowed)}"
        )


def _block(cache_type: str) -> int:
    # A type newer than this table: assume that it packs, so that nothing is promised that may fail.
    return CACHE_TYPES[cache_type].block if cache_type in CACHE_TYPES else 32


def _accepted(capabilities: Capabilities, spelling: str) -> Option | None:
    return capabilities.find(spelling) if capabilities.knows(spelling) else None


# --- threads and priority ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Threads:
    generation: int
    batch: int
    why: str


def decide_threads(hardware: Hardware, settings: Settings, by_hand: ByHand) -> Threads:
    """Never more than the CPUs allowed: llama.cpp's threads spin at barriers and would hang (#10397)."""
    allowed = hardware.cpus_allowed
    passed = {name: by_hand.number(name) for name in ("--threads", "--threads-batch")}
    for name, value in (*passed.items(), ("--threads", settings.threads)):
        if value is not None and not 1 <= value <= allowed:
            many = f"1 to {allowed}, the CPUs that this process may use" if allowed > 1 else "1, the only CPU"
            raise _bad(name, value, many)
    generation, why = _own_threads(hardware)
    if settings.threads is not None:
        generation, why = settings.threads, "asked for with --threads"
    generation = passed["--threads"] or generation
    return Threads(generation, passed["--threads-batch"] or generation, why)


def _own_threads(hardware: Hardware) -> tuple[int, str]:
    cores = min(hardware.physical_cores, hardware.cpus_allowed)
    if hardware.cpu_quota is not None and hardware.cpu_quota < cores:
        # Rounded down: a thread that the quota puts to sleep keeps all others waiting at the next barrier.
        return max(1, int(hardware.cpu_quota)), f"the cgroup allows the time of {hardware.cpu_quota:g} CPUs"
    if cores < hardware.cpus_allowed:
        return cores, f"one for each of the {cores} cores; a second thread on a core would slow both"
    return cores, f"one for each of the {cores} CPUs allowed"


def why_no_priority(hardware: Hardware, threads: Threads, *, draft: bool) -> str | None:
    """None if ``--prio 2`` may be passed.

    It makes every compute thread SCHED_FIFO at priority 80, and they spin (b11434, measured). With as many of
    them as CPUs, everything else, the proxy included, stood still for 950 ms at a time (until the kernel's
    real-time throttling), and generation was no faster; with one CPU left free nothing was delayed.
    """
    if not hardware.may_raise_priority:
        return "this process may not raise priorities (no CAP_SYS_NICE), and llama-server would only warn"
    if hardware.cpu_quota is not None:
        return "real-time threads do not go well with the CPU quota of the cgroup"
    if draft:
        return "the draft model's threads spin too, and would leave no CPU to anything else"
    if max(threads.generation, threads.batch) >= hardware.cpus_allowed:
        return "it makes compute threads real-time, and with one on every CPU they would stop the proxy"
    return None


# --- memory --------------------------------------------------------------------------------------


def why_no_lock(hardware: Hardware, memory: MemoryEstimate, *, on_device: bool) -> str | None:
    """None if the weights may be locked in memory."""
    limit = hardware.memlock_limit_bytes
    if hardware.platform == "win32":
        return "Windows locks memory only within a working-set size that llamasup does not set"
    if on_device:
        return "the weights go to the device"
    if limit is not None and limit < memory.weights_bytes:
        return (
            f"only {_mib(limit)} MiB may be locked and the weights have {_mib(memory.weights_bytes)}: "
            "raise it with ulimit -l, or LimitMEMLOCK= in systemd"
        )
    if memory.total_bytes * 3 > memory.available_bytes * 2:
        return "memory is not ample: locked pages could push everything else out"
    return None


def cache_ram_mib(memory: MemoryEstimate, serves: ModelClass, hardware: Hardware) -> tuple[int, str]:
    """Budget of the prompt cache in MiB. Its default of 8 GiB has killed small hosts (#27725, #20509).

    It is in the host's memory wherever the model is. Of the model, the host has to hold at least what the
    devices' free memory does not.
    """
    if serves is not ModelClass.DECODER:
        return 0, f"{serves} models have no prompts to keep"
    host_bytes = hardware.memory_available_bytes
    devices_bytes = max(0, memory.available_bytes - host_bytes)
    spare = max(0, host_bytes - max(0, memory.total_bytes - devices_bytes))
    budget = min(8192, spare // 4 // _MIB)
    if budget < 64:
        return 0, "no memory to spare for prompts already read"
    of = f"a quarter of the {_mib(spare)} MiB that the host keeps free, 8192 at most"
    return budget, f"{of}, for prompts already read"


def _mib(size_bytes: int) -> int:
    return size_bytes // _MIB


def _bad(flag: str, value: int, allowed: str) -> UsageInvalid:
    return UsageInvalid(f"{flag} {value} is out of range", remedy=f"give {allowed}")
