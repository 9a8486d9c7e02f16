"""The kept results of ``llamasup tune``: the changes of a plan that were measured as better, and by how much.

A result applies only to what was measured: the same files, build and machine, the same settings of the user
that decide how the model computes, and the same default plan. With anything else the proof does not hold, so
the plan is made as if there were no result. :mod:`llamasup.core.planning.measured.stores` keeps the
results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from hashlib import sha256

import msgspec
from msgspec import Struct

from llamasup.core.settings.model import Profile, Settings
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware

# Users have a few profiles, settings and builds of one model.
_MAX_RESULTS = 16
# A change of a variable that no candidate has comes from a damaged or foreign file.
_VARIABLES = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
_FLAG = re.compile(r"--?[a-z][a-z0-9-]{0,63}")


class Changes(Struct, frozen=True):
    """Changes of a plan: flags of llama-server (with None as the value of a switch) and variables."""

    flags: tuple[tuple[str, str | None], ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The flags as written on a command line."""
        return tuple(word for pair in self.flags for word in pair if word is not None)

    @property
    def as_json(self) -> dict[str, str | None]:
        return {**dict(self.env), **dict(self.flags)}

    def __str__(self) -> str:
        return " ".join((*(f"{name}={value}" for name, value in self.env), *self.words))

    def __add__(self, other: Changes) -> Changes:
        return Changes(self.flags + other.flags, self.env + other.env)


NO_CHANGES = Changes()


class Measured(Struct, frozen=True):
    """Changes for one plan, with the reason of each of its flags."""

    changes: Changes
    why: str


class Conditions(Struct, frozen=True):
    """Everything but the model file that a measurement depends on, as digests."""

    runtime: str
    machine: str
    asked: str  # the user's own settings
    files: str  # draft, projector, adapters
    defaults: str  # the plan without the result


class Kept(Struct, frozen=True):
    """The result of one tuning. ``changes`` is empty if nothing was better than the plan.

    ``gain`` with its bounds (95 %) is a ratio: 1.2 is 20 % better. ``date``: an ISO date.
    ``lossy``: it can alter answers. ``unchecked``: by how much was not measured.
    """

    conditions: Conditions
    purpose: str
    profile: Profile | None
    changes: Changes
    gain: float
    lower: float
    upper: float
    date: str
    trials: int
    minutes: float
    lossy: bool = False
    unchecked: bool = False

    @property
    def measured(self) -> Measured:
        bounds = f"{self.gain:.2f} ×, 95 % {self.lower:.2f} to {self.upper:.2f}"
        return Measured(self.changes, f"measured here on {self.date}: {bounds}{self._about_answers}")

    @property
    def _about_answers(self) -> str:
        if self.unchecked:
            return "; its answers were not compared with those of the default (--allow-lossy)"
        return "; its answers may differ slightly from those of the default" if self.lossy else ""


class KeptResults(msgspec.Struct, frozen=True):
    """The results of one model file, the newest last."""

    results: tuple[Kept, ...] = ()


def add_result(kept: KeptResults, result: Kept) -> KeptResults:
    """Add ``result``. It replaces one for the same purpose under the same conditions."""
    of_result = (result.conditions, result.purpose)
    others = (one for one in kept.results if (one.conditions, one.purpose) != of_result)
    return KeptResults((*others, result)[-_MAX_RESULTS:])


def remove_result(kept: KeptResults, result: Kept) -> KeptResults:
    return KeptResults(tuple(one for one in kept.results if one != result))


def result_for(kept: KeptResults, conditions: Conditions) -> Kept | None:
    """The result under these conditions, if it has changes."""
    for result in reversed(kept.results):
        if result.conditions == conditions:
            return result if result.changes != NO_CHANGES and is_plausible(result) else None
    return None


def why_not(result: Kept, now: Conditions) -> str:
    """Say why ``result`` does not apply under the current conditions. Empty: it applies."""
    measured = result.conditions
    for is_same, why in (
        (measured.runtime == now.runtime, "it was measured with another build of llama-server"),
        (measured.machine == now.machine, "it was measured on another machine, or with other CPUs"),
        (measured.asked == now.asked, "it was measured with other settings"),
        (measured.files == now.files, "a draft, projector or adapter file has changed"),
        (measured.defaults == now.defaults, "the plan without it has changed since"),
        (result.changes == NO_CHANGES or is_plausible(result), "it is damaged"),
    ):
        if not is_same:
            return why
    return ""


def is_plausible(result: Kept) -> bool:
    """Whether ``tune`` can have written it: a file on disk can contain anything."""
    if not 1.0 < result.lower <= result.gain <= result.upper < float("inf"):
        return False
    try:
        date.fromisoformat(result.date)
    except ValueError:
        return False
    changes = result.changes
    return all(name in _VARIABLES for name, _ in changes.env) and all(
        _FLAG.fullmatch(flag) for flag, _ in changes.flags
    )


# --- to what a result applies --------------------------------------------------------------------

# Settings that decide how the model computes. The length of the context is not one of them: it decides how
# much memory is reserved, and the plan with the result is still compared with the free memory.
_ASKED = (
    *("profile", "parallel", "gpu_layers", "threads", "kv_type", "flash_attn", "draft_model", "mmproj"),
    *("adapters", "extra", "nice"),
)
# Flags and variables of the default plan that decide its speed, without sizes that follow the free memory.
_OF_DEFAULT = frozenset(
    {
        *("--threads", "--threads-batch", "--prio", "--poll", "--numa", "--batch-size", "--ubatch-size"),
        *("--flash-attn", "--cache-type-k", "--cache-type-v", "--parallel", "--kv-unified"),
        *("--no-kv-unified", "--no-repack", "--spec-type", "--spec-draft-n-max", "--draft-max"),
    }
)


def asked_key(settings: Settings, environ: Mapping[str, str]) -> str:
    """Digest the user's own settings that a measurement depends on."""
    asked = [getattr(settings, name) for name in _ASKED]
    if settings.rpc:  # results of models without workers keep their key
        asked.append(settings.rpc)
    return _digest(repr((asked, environment_of_threads(environ))))


def files_key(files: Iterable[object]) -> str:
    """Digest the states of the draft, the projector and the adapters."""
    return _digest(repr(tuple(files)))


def defaults_key(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Digest the parts of the plan without a result that decide its speed."""
    flags = [words for words in zip(argv, (*argv, "")[1:], strict=True) if words[0] in _OF_DEFAULT]
    variables = sorted(item for item in env.items() if item[0] in _VARIABLES)
    return _digest(repr((flags, variables)))


def environment_of_threads(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The user's own variables of OpenMP and ggml, which the child inherits."""
    return tuple(
        sorted(item for item in environ.items() if item[0].startswith(("OMP_", "GOMP_", "KMP_", "GGML_")))
    )


def machine_key(machine: Hardware, devices: tuple[Device, ...], *, cpu: str) -> str:
    """Digest the parts of the machine that decide speeds. ``cpu`` is the name of the processor."""
    named = [(device.name, device.description) for device in devices]
    cpus = (cpu, machine.cpus_allowed, machine.physical_cores, machine.cpu_quota, machine.cpu_sharers)
    return _digest(repr((machine.platform, cpus, machine.numa_nodes, named)))


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]
