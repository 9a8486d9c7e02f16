"""Gathers the facts that a plan is made from: runtime, model, machine. Starts nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamasup.core.address import Address, TcpAddress, UnixAddress
from llamasup.core.errors import ModelMissing
from llamasup.core.gguf import ModelFacts
from llamasup.core.hardware import Hardware
from llamasup.core.plan import LaunchPlan, plan
from llamasup.core.settings import Settings
from llamasup.effects.files import demo_model_path, free_loopback_port
from llamasup.effects.hardware import probe_hardware
from llamasup.effects.model_file import read_model
from llamasup.effects.runtimes import Runtime, find_runtime

__all__ = ["Launch", "find_model", "prepare"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that is known before the first start of one model."""

    model_id: str
    model_path: Path
    model: ModelFacts
    draft: ModelFacts | None
    runtime: Runtime
    hardware: Hardware
    settings: Settings
    environ: Mapping[str, str]

    def plan(self, folder: Path, generation: int) -> LaunchPlan:
        """The plan of one generation, whose private files are in ``folder``.

        Each generation has an address of its own, so that a child that lingers cannot be mistaken for its
        successor. Raises UsageInvalid or ModelInvalid.
        """
        raise NotImplementedError
