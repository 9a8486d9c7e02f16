"""Chooses what depends on the machine: threads, priority, locked memory, prompt cache, checkpoints.

Each decision is a function of the facts and the user's settings, and returns its reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.llama_server.argv_builder import CommandLine, asked_with
from llamasup.core.planning.inputs import PlanInputs, Preferences, out_of_range
from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.planning.memory.kv_cache import ContextShape, checkpoint_bytes
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.text import memory_text

_MIB = 1 << 20
# Quantised types, which b11434 repacks for the CPU: 329 of 339 MB of locked memory were not used.
_REPACKED = ("Q", "IQ", "MXFP")


class Threads(Struct, frozen=True):
    generation: int
    batch: int
    why: str


def decide_threads(inputs: PlanInputs) -> Threads:
    """Choose at most as many threads as CPUs are allowed.

    More threads would hang as they spin at barriers (#10397).
    """
    hardware, settings, extra_args = inputs.hardware, inputs.settings, inputs.extra_args
    allowed = hardware.cpus_allowed
    passed = {name: extra_args.number(name) for name in ("--threads", "--threads-batch")}
    for name, value in (*passed.items(), ("--threads", settings.threads)):
        if value is not None and not 1 <= value <= allowed:
            many = f"1 to {allowed}, the CPUs that this process may use" if allowed > 1 else "1, the only CPU"
            raise out_of_range(name, value, many)
    generation, why = _own_threads(hardware)
    if settings.threads is not None:
        generation, why = settings.threads, "set with --threads"
    generation = passed["--threads"] or generation
    return Threads(generation, passed["--threads-batch"] or generation, why)


def _own_threads(hardware: Hardware) -> tuple[int, str]:
    cores = min(hardware.physical_cores, hardware.cpus_allowed)
    if (sharers := hardware.cpu_sharers) > 1:
        # Two processes on two cores generated 20 times as many tokens with one thread each as with two
        # threads each (b11434, tiny model).
        part = int(min(cores, hardware.cpu_quota or cores)) // sharers
        return max(
            1, part
        ), f"this process's share of {cores} cores, which {sharers} processes of the model use"
    if hardware.cpu_quota is not None and hardware.cpu_quota < cores:
        # Rounded down, because all threads wait at the next barrier for one that the quota has stopped.
        cpus = "CPU" if hardware.cpu_quota == 1 else "CPUs"
        return max(1, int(hardware.cpu_quota)), f"the cgroup has a quota of {hardware.cpu_quota:g} {cpus}"
    if cores < hardware.cpus_allowed:
        each = "the only core" if cores == 1 else f"each of the {cores} cores"
        return cores, f"one thread for {each}; a second one on a core would slow both"
    each = "the only CPU" if cores == 1 else f"each of the {cores} CPUs"
    return cores, f"one thread for {each} that this process may use"


def give_threads(line: CommandLine, settings: Settings, threads: Threads) -> None:
    line.give("--threads", threads.generation, threads.why, asked=asked_with("--threads", settings.threads))
    line.give("--threads-batch", threads.batch, "as many as for generation, because both use the same cores")


def _why_no_priority(hardware: Hardware, threads: Threads, *, draft: bool) -> str | None:
    """Say why ``--prio 2`` must not be passed. None: it may be passed.

    The flag makes every compute thread SCHED_FIFO at priority 80, and they spin (b11434, measured). With one
    on every CPU, all other programs and the proxy stopped for 950 ms at a time (until the kernel's real-time
    throttling), and generation was no faster; with one free CPU nothing was delayed.
    """
    if not hardware.may_raise_priority:
        return "this process may not raise priorities (no CAP_SYS_NICE); llama-server would only warn"
    if hardware.cpu_quota is not None:
        return "real-time threads conflict with the CPU quota of the cgroup"
    if draft:
        return "the draft model's threads also spin, and would leave no CPU to other programs"
    if max(threads.generation, threads.batch) >= hardware.cpus_allowed:
        return "real-time compute threads on every CPU would stop the proxy"
    return None


def give_priority(line: CommandLine, hardware: Hardware, threads: Threads, *, draft: bool) -> None:
    why_not = _why_no_priority(hardware, threads, draft=draft)
    if why_not is not None:
        line.leave_out("--prio", why_not, value="2")
    else:
        line.give("--prio", 2, "compute threads run before other programs; one CPU stays free for those")


WHY_SPIN = "waiting threads sleep soon, because spinning ones take the CPU that the others need"


def spin_settings(env: Mapping[str, str], prefers: Preferences) -> Mapping[str, str]:
    """Choose variables for the child's GNU OpenMP (docs/planning.md), unless the user set such a variable."""
    if prefers.spin_count is None or any(name.startswith(("OMP_WAIT", "GOMP_SPIN")) for name in env):
        return {}
    return {"GOMP_SPINCOUNT": str(prefers.spin_count)}


# --- memory --------------------------------------------------------------------------------------


def why_no_repack(inputs: PlanInputs, memory: MemoryEstimate, *, budget_bytes: int) -> str | None:
    """Say why weights must not be repacked for this CPU, which is faster. None: they may be repacked.

    ``budget_bytes`` is the size of the prompt cache.

    The mapped copy is dropped when memory is needed, but keeps its address space: with ``ulimit -v`` a Q4_K_M
    of 483 MiB took 874 (b11434).
    """
    extra_args = inputs.extra_args
    if not inputs.prefers.repack:
        return "weights that are repacked for the CPU would be a second copy"
    if extra_args.has("--no-repack") and not extra_args.switch("--repack"):
        return "set after --"
    if inputs.hardware.address_space_limit_bytes is None or not _is_packed(inputs.model):
        return None
    on_host = sum(part.host_bytes for part in memory.parts if part.kind == "weights")
    if memory.host_bytes + on_host + budget_bytes > memory.free.host_bytes:
        return "a repacked copy of the weights would exceed the address space (ulimit -v)"
    return None


def _is_packed(model: ModelFacts) -> bool:
    return model.quantization.startswith(_REPACKED)


def _why_no_lock(inputs: PlanInputs, memory: MemoryEstimate, *, on_device: bool, repacks: bool) -> str | None:
    """Say why the weights must not be locked in memory. None: they may be locked."""
    limit = inputs.hardware.memlock_limit_bytes
    if not inputs.prefers.lock:
        return "this profile lets the system drop weights from memory and read them again"
    if inputs.hardware.platform == "win32":
        return "Windows locks memory only within a working-set size, which llamasup does not set"
    if on_device:
        return "the weights are on the device"
    if repacks and _is_packed(inputs.model):
        return "llama.cpp repacks these weights, and would lock the copy that it does not use"
    if limit is not None and limit < memory.weights_bytes:
        return (
            f"only {_mib(limit)} MiB may be locked, and the weights take {_mib(memory.weights_bytes)} MiB: "
            "raise the limit with ulimit -l, or with LimitMEMLOCK= in systemd"
        )
    if memory.total_bytes * 3 > memory.available_bytes * 2:
        return "the plan takes over two thirds of the free memory; locked pages could push out others"
    return None


_OLD_LOAD_MODES = ("--mlock", "--mmap", "--direct-io")


def give_lock(
    line: CommandLine, inputs: PlanInputs, memory: MemoryEstimate, *, on_device: bool, repacks: bool
) -> None:
    """Add ``--load-mode mmap+mlock``, or ``--mlock`` in builds before July 2026.

    #20834 added the first and deprecated the second, which #28334 removed in September 2026.
    """
    why_not = _why_no_lock(inputs, memory, on_device=on_device, repacks=repacks)
    mode = inputs.capabilities.find("--load-mode")
    flag, value = "--mlock", None
    if mode is not None and "mmap+mlock" in mode.allowed:
        flag, value = "--load-mode", "mmap+mlock"
        chosen = next(
            (given.words[0] for name in _OLD_LOAD_MODES for given in inputs.extra_args.all(name)), None
        )
        if why_not is None and chosen is not None:
            why_not = f"{chosen} after -- sets how the weights are loaded"
    if why_not is not None:
        line.leave_out(flag, why_not, value=value)
    else:
        line.give(flag, value, "the weights stay in memory even if other programs need it")


def decide_prompt_cache(inputs: PlanInputs, memory: MemoryEstimate) -> tuple[int, str]:
    """Choose the budget of the prompt cache in MiB.

    Its default of 8 GiB has killed small hosts (#27725, #20509).

    The cache is always in host memory.
    """
    prefers, asked = inputs.prefers, inputs.extra_args.number("--cache-ram")
    if asked is not None:
        return asked, "set after --"
    if inputs.serves is not ModelClass.DECODER:
        return 0, f"{inputs.serves} models keep no prompts"
    if prefers.server_defaults:
        return inputs.capabilities.default_number("--cache-ram") or 0, "llama-server's own choice"
    if not prefers.prompt_cache:
        return 0, "this profile has no prompt cache"
    spare_bytes = memory.spare_host_bytes
    # In proportion to the model, so that its size does not depend on the other loaded models.
    most_bytes = min(spare_bytes, memory.total_bytes // 4) if inputs.shared else spare_bytes // 4
    budget = min(8192, most_bytes // _MIB)
    if budget < 64:
        return 0, "less than 64 MiB would be left for a prompt cache"
    if inputs.shared:
        return budget, "for the prompt cache: at most a quarter of what the model takes, and 8192 MiB"
    quarter = f"a quarter of the {_mib(spare_bytes)} MiB that stay free on the host"
    return budget, f"for the prompt cache: {quarter}, at most 8192 MiB"


def _mib(size_bytes: int) -> int:
    return size_bytes // _MIB


# --- context checkpoints --------------------------------------------------------------------------


# A recurrent state, or a sliding window, has only the end of a conversation. So llama-server copies it to
# host memory from time to time. Without a copy, a changed last message makes it read the whole prompt again.
# Its 32 copies for each slot are 18.7 GiB for Qwen3.8-27B (unslothai/unsloth#11073).
_CHECKPOINTS = "--ctx-checkpoints"
# Going back 50 tokens needs 4 in b10068, and 8 in builds of autumn 2026 [run].
_ENOUGH = 8


class Checkpoints(Struct, frozen=True):
    """The checkpoints of each slot (``count``; None: llama-server's own number).

    ``size_bytes`` is the most memory that the checkpoints of all slots take.
    """

    count: int | None = None
    size_bytes: int = 0
    why: str = ""


def decide_checkpoints(inputs: PlanInputs, memory: MemoryEstimate, shape: ContextShape) -> Checkpoints:
    """Choose as many checkpoints as a quarter of the spare host memory holds.

    ``memory`` includes neither checkpoints nor the prompt cache.
    """
    capabilities, model, prefers = inputs.capabilities, inputs.model, inputs.prefers
    own = capabilities.default_number(_CHECKPOINTS)
    if own is None and prefers.checkpoints:
        return Checkpoints()  # the build has none
    usual = own or 0
    each = checkpoint_bytes(model, shape) if inputs.serves is ModelClass.DECODER else 0
    asked = inputs.extra_args.number(_CHECKPOINTS)
    if asked is not None:
        return Checkpoints(None, max(0, asked) * each)
    if prefers.server_defaults:
        return Checkpoints(None, usual * each)
    recurs = model.recurrent is not None or not model.known
    if not prefers.checkpoints:
        if not recurs:
            return Checkpoints(0, 0, "this profile saves the memory of context checkpoints")
        usual = min(usual, _ENOUGH)
    spare_bytes = memory.spare_host_bytes
    most_bytes = min(spare_bytes, memory.total_bytes) // 4 if inputs.shared else spare_bytes // 4
    count = min(usual, most_bytes // each) if each else usual
    if count == own:
        return Checkpoints(None, count * each)
    why = "llama-server continues changed prompts from them"
    if each:
        why += f"; all take at most {memory_text(count * each)}"
    return Checkpoints(count, count * each, why)


def give_checkpoints(line: CommandLine, checkpoints: Checkpoints) -> None:
    if checkpoints.count is not None:
        line.give(_CHECKPOINTS, checkpoints.count, checkpoints.why, otherwise="this build has no checkpoints")
