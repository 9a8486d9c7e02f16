"""The kept results of ``llamasup tune``: the changes of a plan that were measured as better, and by how much.

A result applies only to what was measured: the same file, build, machine and profile, and the same settings
of the user that decide how the model computes. With any other setting the proof does not hold, so the plan is
made as if there were no result. :mod:`llamasup.planning.tuned_store` keeps the results of one model file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from hashlib import sha256

import msgspec
from msgspec import Struct

from llamasup.settings.model import Profile, Settings
from llamasup.system.hardware.devices import Device
from llamasup.system.hardware.facts import Hardware

__all__ = [
    "NO_CHANGES",
    "Changes",
    "Kept",
    "KeptResults",
    "Measured",
    "add_result",
    "asked_key",
    "environment_of_threads",
    "is_plausible",
    "machine_key",
    "result_for",
]

# Users have a few profiles and settings of one model.
_MAX_RESULTS = 16
# A change of a variable that no candidate has comes from a damaged or foreign file.
_VARIABLES = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
_FLAG = re.compile(r"--?[a-z][a-z0-9-]{0,63}")


class Changes(Struct, frozen=True):
    """What differs from the plan: flags of llama-server (with None as the value of a switch), variables."""

    flags: tuple[tuple[str, str | None], ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The flags as on a command line."""
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


class Kept(Struct, frozen=True):
    """The result of one tuning. ``changes`` is empty if nothing was better than the plan.

    ``gain`` with its bounds (95 %) is a ratio: 1.2 is 20 % better. ``date``: an ISO date.
    """

    runtime: str
    machine: str
    asked: str
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

    @property
    def measured(self) -> Measured:
        bounds = f"{self.gain:.2f} ×, 95 % {self.lower:.2f} to {self.upper:.2f}"
        return Measured(self.changes, f"measured here on {self.date}: {bounds}")


class KeptResults(msgspec.Struct, frozen=True):
    """The results of one model file, the newest last."""

    results: tuple[Kept, ...] = ()


def add_result(kept: KeptResults, result: Kept) -> KeptResults:
    """Add ``result``. It replaces the one of the same settings, also that of another build or machine."""
    others = (one for one in kept.results if one.asked != result.asked or one.purpose != result.purpose)
    return KeptResults((*others, result)[-_MAX_RESULTS:])


def result_for(kept: KeptResults, *, runtime: str, machine: str, asked: str) -> Kept | None:
    """The result for this build, machine and settings, if it has changes."""
    for result in reversed(kept.results):
        if (result.runtime, result.machine, result.asked) == (runtime, machine, asked):
            return result if result.changes != NO_CHANGES and is_plausible(result) else None
    return None


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
    *("adapters", "extra"),
)


def asked_key(settings: Settings, environ: Mapping[str, str]) -> str:
    """The user's own settings that a measurement depends on."""
    asked = [getattr(settings, name) for name in _ASKED]
    return _digest(repr((asked, environment_of_threads(environ))))


def environment_of_threads(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The user's own variables of OpenMP and ggml, which the child inherits."""
    return tuple(
        sorted(item for item in environ.items() if item[0].startswith(("OMP_", "GOMP_", "KMP_", "GGML_")))
    )


def machine_key(machine: Hardware, devices: tuple[Device, ...], *, cpu: str) -> str:
    """What of the machine decides speeds. ``cpu``: the name of the processor."""
    named = [(device.name, device.description) for device in devices]
    cpus = (cpu, machine.cpus_allowed, machine.physical_cores, machine.cpu_quota, machine.cpu_sharers)
    return _digest(repr((machine.platform, cpus, machine.numa_nodes, named)))


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]
