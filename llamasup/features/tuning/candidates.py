"""Decides which changes of a plan are worth a measurement, in the order of what the planner expects of them.

A candidate is proposed only if this build has its flags, this machine and model can gain from it, and the
user set none of its flags. Changes that break a promise of the profile are not candidates: the context of a
request stays, and for latency the number of slots does. ``lossy`` candidates can alter answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import ExtraArgs
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.drafting import no_drafts
from llamasup.core.planning.measured.tuned import Changes, environment_of_threads
from llamasup.core.planning.memory.kv_cache import has_kv_cache
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Profile, Settings
from llamasup.core.system.hardware.facts import Hardware

Purpose = Literal["latency", "throughput", "memory"]


class Candidate(Struct, frozen=True):
    """A change to measure. A configuration takes at most one candidate of a ``group``. ``why``: what it may
    gain.
    """

    group: str
    changes: Changes
    why: str
    lossy: bool = False

    @property
    def name(self) -> str:
        return str(self.changes)


class Setup(Struct, frozen=True):
    """The facts that decide which changes are possible. ``plan`` is the default that they change."""

    purpose: Purpose
    capabilities: Capabilities
    plan: LaunchPlan
    model: ModelFacts
    hardware: Hardware
    settings: Settings
    by_user: ExtraArgs
    environ: Mapping[str, str]

    def value(self, flag: str) -> str | None:
        """Return the value of a flag in the plan."""
        argv = self.plan.argv
        return argv[argv.index(flag) + 1] if flag in argv[:-1] else None

    def number(self, flag: str) -> int:
        value = self.value(flag)
        return int(value) if value is not None and value.lstrip("-").isdecimal() else 0

    def may_change(self, *flags: str, setting: object = None) -> bool:
        """Whether the build has these flags, and the user set neither them nor llamasup's own option."""
        known = all(self.capabilities.knows(flag) for flag in flags)
        return known and setting is None and not any(self.by_user.has(flag) for flag in flags)


_UNPACKED = ("f16", "bf16", "f32")

# What each purpose tries first: the planner's own expectation of the gain.
_ORDER: Mapping[Purpose, tuple[str, ...]] = {
    "latency": (
        *("threads", "draft", "placement", "experts", "split", "spin", "micro-batch", "batch-threads"),
        *("flash", "kv", "unified", "repack", "load", "numa", "ngram", "poll", "batch"),
    ),
    "throughput": (
        *("slots", "threads", "placement", "experts", "split", "micro-batch", "unified", "spin", "draft"),
        *("batch-threads", "flash", "kv", "batch", "repack", "load", "numa", "poll"),
    ),
    "memory": ("kv", "micro-batch", "repack", "cache", "flash", "slots", "draft", "unified"),
}


def candidates(setup: Setup) -> tuple[Candidate, ...]:
    """Return the candidates, the most promising first."""
    order = _ORDER[setup.purpose]
    found = [one for propose in _PROPOSALS for one in propose(setup) if one.group in order]
    return tuple(sorted(found, key=lambda one: order.index(one.group)))


def contradict(one: Changes, other: Changes) -> bool:
    """Whether one of them makes the other impossible, or useless."""
    flags = dict(one.flags) | dict(other.flags)
    v_type = flags.get("--cache-type-v") or "f16"
    batch, micro = flags.get("--batch-size"), flags.get("--ubatch-size")
    on_device = {"--cpu-moe", "--n-cpu-moe", "--split-mode"}
    return (
        (flags.get("--flash-attn") == "off" and v_type not in _UNPACKED)
        or (batch is not None and micro is not None and int(micro) > int(batch))
        or (flags.get("--gpu-layers") == "0" and not on_device.isdisjoint(flags))
        or (flags.get("--parallel") == "1" and not {"--kv-unified", "--no-kv-unified"}.isdisjoint(flags))
    )


def purpose_of(asked: Purpose | None, profile: Profile | None) -> Purpose:
    """Return the purpose of ``--for``; by default the purpose of the profile. The default profile is tuned
    for latency.
    """
    if asked is not None:
        return asked
    return profile if profile in ("throughput", "memory") else "latency"


def default_profile(purpose: Purpose) -> Profile | None:
    """Return the profile that is tuned for a purpose, if the user names none."""
    return None if purpose == "latency" else purpose


# --- the CPU -------------------------------------------------------------------------------------


def _threads(setup: Setup) -> Iterator[Candidate]:
    if setup.settings.threads is not None:
        return
    machine = setup.hardware
    now, batch = setup.number("--threads"), setup.number("--threads-batch")
    cores, cpus = machine.physical_cores, machine.cpus_allowed
    if machine.cpu_quota is not None:  # at a barrier, all threads wait for one that the quota has stopped
        most = max(1, int(machine.cpu_quota))
        cores, cpus = min(cores, most), min(cpus, most)
    if setup.may_change("--threads"):
        counts = {cores - 1: "one core stays free for llama-server's own work and other programs"}
        counts[cores // 2] = "generation is limited by the memory, which half of the cores may use up"
        counts[cores] = "one thread for each core"
        counts[1] = "threads of a small model wait for each other longer than they compute"
        for count, why in counts.items():
            if 1 <= count <= cpus and count != now:
                yield _flag("threads", "--threads", count, why)
    if setup.may_change("--threads-batch"):
        counts = {cpus: "prompts are limited by computing, where a second thread on a core can help"}
        counts[cores - 1] = "one core stays free for llama-server's own work and other programs"
        for count, why in counts.items():
            if 1 <= count <= cpus and count != batch:
                yield _flag("batch-threads", "--threads-batch", count, why)


def _spinning(setup: Setup) -> Iterator[Candidate]:
    if environment_of_threads(setup.environ) or setup.number("--threads") == 1:
        return
    for count, why in (
        ("100000", "threads that spin longer answer sooner, if no other program needs the CPUs"),
        ("300", "threads that sleep sooner leave the CPUs to others"),
    ):
        yield Candidate("spin", Changes(env=(("GOMP_SPINCOUNT", count),)), why)
    if setup.may_change("--poll"):
        yield _flag("poll", "--poll", 0, "ggml's own threads sleep instead of polling for work")


def _numa(setup: Setup) -> Iterator[Candidate]:
    if setup.hardware.numa_nodes < 2 or not setup.may_change("--numa"):
        return
    yield _flag("numa", "--numa", "distribute", "the weights are spread over the nodes, as the threads are")
    yield _flag("numa", "--numa", "isolate", "the threads stay on one node, near their memory")


# --- batches, attention, KV cache ----------------------------------------------------------------


def _batches(setup: Setup) -> Iterator[Candidate]:
    if setup.plan.model_class is not ModelClass.DECODER:
        return  # the whole input must be in one micro-batch
    micro, batch = setup.number("--ubatch-size"), setup.number("--batch-size")
    if not (micro and batch and setup.may_change("--ubatch-size", "--batch-size")):
        return
    sizes = (64, 32) if setup.purpose == "memory" else (256, 1024, 128, 2048)
    for size in sizes:
        if size != micro and setup.plan.context.image_tokens <= size <= batch:
            less = (
                "takes less memory and fits into the CPU's caches" if size < micro else "reads long prompts"
            )
            yield _flag("micro-batch", "--ubatch-size", size, f"a micro-batch of {size} {less}")
    if setup.purpose != "memory" and micro <= 512 < batch:
        why = "a long prompt is computed in shorter pieces, between which other requests continue"
        yield _flag("batch", "--batch-size", 512, why)


def _flash(setup: Setup) -> Iterator[Candidate]:
    option = setup.capabilities.find("--flash-attn")
    if option is None or option.argument is None or not has_kv_cache(setup.model):
        return
    if not setup.may_change("--flash-attn", setting=setup.settings.flash_attn):
        return
    packed = setup.plan.kv_type.rpartition("/")[2] not in _UNPACKED
    now = setup.plan.kv.flash
    if now != "off" and not packed:
        why = "attention without the fused kernel can be faster on a CPU"
        yield _flag("flash", "--flash-attn", "off", why, lossy=True)
    if now == "off":
        why = "the fused kernel reads the KV cache once"
        yield _flag("flash", "--flash-attn", "on", why, lossy=True)


def _kv_cache(setup: Setup) -> Iterator[Candidate]:
    if setup.plan.model_class is not ModelClass.DECODER or not has_kv_cache(setup.model):
        return
    if not setup.may_change("--cache-type-k", "--cache-type-v", setting=setup.settings.kv_type):
        return
    if setup.plan.kv.flash in (None, "off"):
        return  # a packed V cache needs it
    lengths = (setup.model.key_length, setup.model.value_length)
    kinds = {"q8_0": "half of the KV cache to read and to hold"}
    if setup.purpose == "memory":
        kinds["q4_0"] = "a quarter of the KV cache to hold"
    else:
        kinds["f16"] = "no unpacking of the KV cache"
    for kind, why in kinds.items():
        if kind == setup.plan.kv_type or (kind != "f16" and any(length % 32 for length in lengths)):
            continue
        flags = (("--cache-type-k", kind), ("--cache-type-v", kind))
        yield Candidate("kv", Changes(flags), why, lossy=kind != "f16")


def _slots(setup: Setup) -> Iterator[Candidate]:
    if setup.plan.model_class is not ModelClass.DECODER or setup.purpose == "latency":
        return
    now = setup.plan.parallel
    if setup.may_change("--parallel", setting=setup.settings.parallel):
        counts = {"throughput": (2 * now, now // 2), "memory": (1,)}[setup.purpose]
        for count in counts:
            if count >= 1 and count != now:
                why = "more requests in a batch" if count > now else "fewer requests share the CPUs' caches"
                yield _flag("slots", "--parallel", count, why)
    # Not the other way round: without the shared context, a long request would be refused.
    if now > 1 and setup.may_change("--kv-unified") and not setup.plan.shape.unified:
        yield Candidate("unified", Changes((("--kv-unified", None),)), "one batch for all slots")


def _prompt_cache(setup: Setup) -> Iterator[Candidate]:
    # No candidate for speed: its use depends on prompts that come again, which lengths do not show.
    if setup.number("--cache-ram") > 0 and setup.may_change("--cache-ram"):
        yield _flag("cache", "--cache-ram", 0, "no memory for prompts of earlier requests")


# --- loading -------------------------------------------------------------------------------------


def _weights(setup: Setup) -> Iterator[Candidate]:
    if setup.plan.gpu_layers != 0:
        return
    argv = setup.plan.argv
    if setup.may_change("--no-repack") and setup.model.quantization.startswith(("Q", "IQ", "MXFP")):
        if "--no-repack" not in argv:
            yield _switch("repack", "--no-repack", "the weights are used as they are in the file")
        elif setup.purpose != "memory" and setup.may_change("--repack"):
            yield _switch("repack", "--repack", "the weights are rewritten for this CPU")
    if setup.purpose == "memory" or any(flag in argv for flag in ("--mlock", "--load-mode")):
        return
    why = "the weights are in the process's own memory, where the kernel can use larger pages"
    mode = setup.capabilities.find("--load-mode")
    if mode is not None and setup.may_change("--load-mode") and "none" in mode.allowed:
        yield _flag("load", "--load-mode", "none", why)
    elif mode is None and setup.may_change("--no-mmap"):
        yield _switch("load", "--no-mmap", why)


# --- drafts --------------------------------------------------------------------------------------

_DRAFT_LENGTHS = (2, 3, 4, 6, 8, 12, 16)


def _drafts(setup: Setup) -> Iterator[Candidate]:
    if setup.plan.model_class is not ModelClass.DECODER:
        return
    spec_type = setup.value("--spec-type")
    has_model = any(setup.value(flag) for flag in ("--spec-draft-model", "--model-draft"))
    ahead = setup.capabilities.knows("--spec-draft-n-max", "--draft-max")
    if (spec_type or has_model) and ahead is not None and setup.may_change(ahead):
        now = setup.number(ahead)
        for length in _DRAFT_LENGTHS:
            if length != now:
                why = f"{length} drafted tokens are checked at once"
                yield _flag("draft", ahead, length, why, lossy=True)
    off = no_drafts(setup.capabilities)
    if (spec_type is not None or has_model) and off is not None and setup.may_change(off[0]):
        yield _flag("draft", *off, "drafts that are rejected cost more than they save")
    types = setup.capabilities.find("--spec-type")
    if types is None or not setup.may_change("--spec-type"):
        return
    listed = (types.argument or "") + " ".join(types.allowed)
    if spec_type is None and not has_model and "ngram-simple" in listed:
        why = "repeated text is drafted from the context, without a draft model"
        yield _flag("ngram", "--spec-type", "ngram-simple", why, lossy=True)


# --- devices -------------------------------------------------------------------------------------


def _devices(setup: Setup) -> Iterator[Candidate]:
    names = setup.plan.memory.free.names
    if not names or setup.plan.gpu_layers == 0:
        return
    model, layers = setup.model, setup.plan.memory.gpu_layers
    if model.experts.count and setup.may_change("--n-cpu-moe", "--cpu-moe"):
        half = max(1, model.layers // 2)
        why = "the experts of some layers on the CPU make room for all attention on the device"
        yield _flag("experts", "--n-cpu-moe", half, why)
        yield _switch("experts", "--cpu-moe", "all attention fits on the device without the experts")
    if setup.may_change("--gpu-layers", setting=setup.settings.gpu_layers):
        if layers is not None and 0 < layers <= model.layers:
            for count in (layers + 2, max(0, layers - 2)):
                why = "the estimate of what fits may be too careful" if count > layers else "less swapping"
                yield _flag("placement", "--gpu-layers", min(count, model.layers + 1), why)
        yield _flag("placement", "--gpu-layers", 0, "a small model can be faster without the transfers")
    if len(names) > 1 and setup.may_change("--split-mode"):
        for mode in ("row", "none"):
            why = "all devices compute each layer" if mode == "row" else "no transfers between devices"
            yield _flag("split", "--split-mode", mode, why)


_PROPOSALS = (
    *(_threads, _spinning, _numa, _batches, _flash, _kv_cache, _slots, _prompt_cache, _weights),
    *(_drafts, _devices),
)


def _flag(group: str, flag: str, value: object, why: str, *, lossy: bool = False) -> Candidate:
    return Candidate(group, Changes(((flag, str(value)),)), why, lossy)


def _switch(group: str, flag: str, why: str) -> Candidate:
    return Candidate(group, Changes(((flag, None),)), why)
