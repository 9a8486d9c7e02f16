"""The facts that the checks of ``llamasup doctor`` look at, and the result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from llamasup.core.control.selection import Running
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import RuntimeKind, StaleRun
from llamasup.errors import LlamasupError


class Check(Struct, frozen=True):
    name: str
    ok: bool
    found: str
    remedy: str = ""  # with ok: advice


class RuntimeFact(Struct, frozen=True):
    origin: str  # where it was found, for people
    answer: Capabilities | LlamasupError
    path: str = ""
    kind: RuntimeKind = "binary"

    @property
    def capabilities(self) -> Capabilities | None:
        return self.answer if isinstance(self.answer, Capabilities) else None


class NvmlFact(Struct, frozen=True):
    """The state of NVML. ``error`` is NVML's name, "not installed" without the package, or empty without an
    error.
    """

    gpus: int = 0
    error: str = ""
    problem: str = ""


class ModelFact(Struct, frozen=True):
    """A model that was checked. ``plan`` is the plan as JSON, if one could be made."""

    name: str
    found: str = ""
    problem: LlamasupError | None = None
    plan: Mapping[str, Any] | None = None


class FolderFact(Struct, frozen=True):
    name: str  # run, cache, state
    path: str = ""
    problem: LlamasupError | None = None
    note: str = ""


class CertificateFact(Struct, frozen=True):
    """A certificate. ``problem`` is the read error or a problem with its dates, as the end of a sentence."""

    path: str
    problem: str = ""
    is_current: bool = True
    ends: str = ""


class ConfigFile(Struct, frozen=True):
    """A configuration file of llama-server, with the names of its options."""

    path: str
    settings: tuple[str, ...]
    is_ignored: bool  # the child does not read it


class Facts(Struct, frozen=True):
    hardware: Hardware
    runtimes: tuple[RuntimeFact, ...]  # at least one; llamasup uses the first
    environ: Mapping[str, str]
    port: int
    devices: tuple[Device, ...] = ()
    nvml: NvmlFact | None = None  # None without an NVIDIA GPU
    folders: tuple[FolderFact, ...] = ()
    left_folders: tuple[StaleRun, ...] = ()
    port_problem: LlamasupError | None = None
    running: Running | None = None  # the llamasup that uses the port
    config_files: tuple[ConfigFile, ...] = ()
    certificate: CertificateFact | None = None
    model: ModelFact | None = None
