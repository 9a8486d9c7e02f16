"""What the machine allows: threads, priority, locked memory, and memory for prompts already read.

Each decision is a function of the facts and of what the user asked for, and returns the sentence that
explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamasup.errors import UsageInvalid
from llamasup.gguf.facts import ModelClass, ModelFacts
from llamasup.llama_server.capabilities import Capabilities
from llamasup.llama_server.flags import CommandLine, ExtraArgs, asked_with
from llamasup.llama_server.settings import Settings
from llamasup.planning.memory.estimate import MemoryEstimate
from llamasup.planning.profiles import Preferences
from llamasup.system.hardware.facts import Hardware

__all__ = [
    "WHY_SPIN",
    "Threads",
    "decide_prompt_cache",
    "decide_threads",
    "give_lock",
    "give_priority",
    "give_threads",
    "spin_settings",
    "why_no_lock",
    "why_no_priority",
    "why_no_repack",
]

_MIB = 1 << 20
# Quantised types, which b11434 rewrites for the CPU as it loads them: 329 of 339 MB locked were not used.
_REPACKED = ("Q", "IQ", "MXFP")


@dataclass(frozen=True, slots=True)
class Threads:
    generation: int
    batch: int
    why: str


def decide_threads(hardware: Hardware, settings: Settings, extra_args: ExtraArgs) -> Threads:
    """Never more than the CPUs allowed: llama.cpp's threads spin at barriers and would hang (#10397)."""
    allowed = hardware.cpus_allowed
    passed = {name: extra_args.number(name) for name in ("--threads", "--threads-batch")}
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
    if (sharers := hardware.cpu_sharers) > 1:
        # Threads that spin for each other's cores: two processes on two cores, with two threads each, made
        # a twentieth of the tokens that they made with one each (b11434, tiny model).
        part = int(min(cores, hardware.cpu_quota or cores)) // sharers
        return max(1, part), f"its part of {cores} cores, on which {sharers} processes of the model compute"
    if hardware.cpu_quota is not None and hardware.cpu_quota < cores:
        # Rounded down: a thread that the quota puts to sleep keeps all others waiting at the next barrier.
        return max(1, int(hardware.cpu_quota)), f"the cgroup allows the time of {hardware.cpu_quota:g} CPUs"
    if cores < hardware.cpus_allowed:
        return cores, f"one for each of the {cores} cores; a second thread on a core would slow both"
    return cores, f"one for each of the {cores} CPUs allowed"


def give_threads(line: CommandLine, settings: Settings, threads: Threads) -> None:
    line.give("--threads", threads.generation, threads.why, asked=asked_with("--threads", settings.threads))
    line.give("--threads-batch", threads.batch, "as many as for generation: both wait on the same cores")


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


def give_priority(line: CommandLine, why_not: str | None) -> None:
    if why_not is not None:
        line.leave_out("--prio", why_not, value="2")
    else:
        line.give("--prio", 2, "compute threads go before everything else; a CPU stays free for the rest")


WHY_SPIN = "a thread that waits for others sleeps soon: one that spins takes the CPU that they wait for"


def spin_settings(env: Mapping[str, str], prefers: Preferences) -> Mapping[str, str]:
    """Variables for the OpenMP of the child, unless the user set any of that kind.

    GNU's spins 300,000 rounds at each barrier; where another program has the CPU, that time is lost for all:
    2.9 tokens/s with one busy CPU of two, 7.7 with 3,000 rounds and 17 with 1,000; idle 79, 77 and 71
    (b11434).
    LLVM's and Microsoft's read no such variable.
    """
    if prefers.spin_count is None or any(name.startswith(("OMP_WAIT", "GOMP_SPIN")) for name in env):
        return {}
    return {"GOMP_SPINCOUNT": str(prefers.spin_count)}


# --- memory --------------------------------------------------------------------------------------


def why_no_repack(
    hardware: Hardware,
    model: ModelFacts,
    memory: MemoryEstimate,
    extra_args: ExtraArgs,
    prefers: Preferences,
    *,
    budget_bytes: int,
) -> str | None:
    """None if weights may be rewritten for this CPU, which is faster. ``budget_bytes`` is the prompt cache's.

    What was mapped before is dropped when memory is asked for, and takes address space all the same: with
    ``ulimit -v`` a Q4_K_M of 483 MiB took 874 (b11434).
    """
    if not prefers.repack:
        return "weights that are rewritten for the CPU are a second copy of them"
    if extra_args.has("--no-repack") and not extra_args.switch("--repack"):
        return "set by hand after --"
    if hardware.address_space_limit_bytes is None or not _is_packed(model):
        return None
    on_host = sum(part.host_bytes for part in memory.parts if part.kind == "weights")
    if memory.host_bytes + on_host + budget_bytes > memory.room.host_bytes:
        return "a second copy of the weights, rewritten for the CPU, exceeds the address space (ulimit -v)"
    return None


def _is_packed(model: ModelFacts) -> bool:
    return model.quantization.startswith(_REPACKED)


def why_no_lock(
    hardware: Hardware,
    model: ModelFacts,
    memory: MemoryEstimate,
    prefers: Preferences,
    *,
    on_device: bool,
    repacks: bool,
) -> str | None:
    """None if the weights may be locked in memory."""
    limit = hardware.memlock_limit_bytes
    if not prefers.lock:
        return "weights that are not locked can be dropped from memory and read again"
    if hardware.platform == "win32":
        return "Windows locks memory only within a working-set size that llamasup does not set"
    if on_device:
        return "the weights go to the device"
    if repacks and _is_packed(model):
        return "llama.cpp repacks these weights into memory of its own: the copy that it maps would be locked"
    if limit is not None and limit < memory.weights_bytes:
        return (
            f"only {_mib(limit)} MiB may be locked and the weights have {_mib(memory.weights_bytes)}: "
            "raise it with ulimit -l, or LimitMEMLOCK= in systemd"
        )
    if memory.total_bytes * 3 > memory.available_bytes * 2:
        return "memory is not ample: locked pages could push everything else out"
    return None


def give_lock(line: CommandLine, capabilities: Capabilities, why_not: str | None) -> None:
    """``--mlock`` until September 2026 (#28334), ``--load-mode mmap+mlock`` since July 2026 (#20834)."""
    mode = capabilities.find("--load-mode")
    flag, value = "--mlock", None
    if not capabilities.knows("--mlock") and mode is not None and "mmap+mlock" in mode.allowed:
        flag, value = "--load-mode", "mmap+mlock"
    if why_not is not None:
        line.leave_out(flag, why_not, value=value)
    else:
        line.give(flag, value, "the weights stay in memory, whatever else runs")


def decide_prompt_cache(
    capabilities: Capabilities,
    memory: MemoryEstimate,
    serves: ModelClass,
    extra_args: ExtraArgs,
    prefers: Preferences,
    *,
    shared: bool = False,
) -> tuple[int, str]:
    """Budget of the prompt cache in MiB. Its default of 8 GiB has killed small hosts (#27725, #20509).

    It is in the host's memory, wherever the model is. ``shared``: other models want what is spare.
    """
    asked = extra_args.number("--cache-ram")
    if asked is not None:
        return asked, "set by hand"
    if serves is not ModelClass.DECODER:
        return 0, f"{serves} models have no prompts to keep"
    if prefers.own_choice:
        return capabilities.default_number("--cache-ram") or 0, "left to llama-server"
    if not prefers.prompt_cache:
        return 0, "this profile keeps no prompts in memory"
    spare_bytes = memory.spare_host_bytes
    # In proportion to the model: what it takes must not depend on which others happen to be loaded.
    most_bytes = min(spare_bytes, memory.total_bytes // 4) if shared else spare_bytes // 4
    budget = min(8192, most_bytes // _MIB)
    if budget < 64:
        return 0, "no memory to spare for prompts already read"
    if shared:
        return budget, "a quarter of what the model takes, 8192 at most, for prompts already read"
    of = f"a quarter of the {_mib(spare_bytes)} MiB that the host keeps free, 8192 at most"
    return budget, f"{of}, for prompts already read"


def _mib(size_bytes: int) -> int:
    return size_bytes // _MIB


def _bad(flag: str, value: int, allowed: str) -> UsageInvalid:
    return UsageInvalid(f"{flag} {value} is out of range", remedy=f"give {allowed}")
