"""What ``llamasup doctor`` is told, and what a check says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamasup.control.selection import RunningFact
from llamasup.llama_server.capabilities import Capabilities
from llamasup.system.hardware.devices import Device
from llamasup.system.hardware.facts import Hardware
from llamasup.system.process.environment import RuntimeKind
from llamasup.system.process.exit import StaleRun

__all__ = [
    "CertificateFact",
    "Check",
    "ConfigFile",
    "Facts",
    "FolderFact",
    "ModelFact",
    "NvmlFact",
    "Problem",
    "RuntimeFact",
]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str
    remedy: str = ""  # with ok: advice


@dataclass(frozen=True, slots=True)
class Problem:
    """What an error says."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class RuntimeFact:
    origin: str  # where it was found, for people
    answer: Capabilities | Problem
    path: str = ""
    kind: RuntimeKind = "binary"

    @property
    def capabilities(self) -> Capabilities | None:
        return self.answer if isinstance(self.answer, Capabilities) else None


@dataclass(frozen=True, slots=True)
class NvmlFact:
    """``error`` is NVML's name for it, "not installed" without the package, empty if all is well."""

    gpus: int = 0
    error: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelFact:
    name: str
    found: str = ""
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class FolderFact:
    name: str  # run, cache, state
    path: str = ""
    problem: Problem | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class CertificateFact:
    """``problem``: the read error or the problem with the dates, as the end of a sentence."""

    path: str
    problem: str = ""
    is_current: bool = True
    ends: str = ""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that llama-server reads options from, with their names."""

    path: str
    settings: tuple[str, ...]
    shut_out: bool  # the child never sees it


@dataclass(frozen=True, slots=True)
class Facts:
    hardware: Hardware
    runtimes: tuple[RuntimeFact, ...]  # the one that is used first; never empty
    environ: Mapping[str, str]
    port: int
    devices: tuple[Device, ...] = ()
    gpu_drivers: frozenset[str] = frozenset()  # "NVIDIA", "AMD": of a card that is there
    nvml: NvmlFact | None = None  # None where there is nothing to ask about
    folders: tuple[FolderFact, ...] = ()
    left: tuple[StaleRun, ...] = ()
    port_problem: Problem | None = None
    running: RunningFact | None = None  # who has the port, where it is one of us
    config_files: tuple[ConfigFile, ...] = ()
    certificate: CertificateFact | None = None
    model: ModelFact | None = None
