"""List the pure modules: all that are not on the list of effects in pyproject.toml.

The list names modules, and packages with all their modules. import_contracts.py holds the modules to it.
This module is also a plugin of coverage.py, which measures the pure modules alone: with the others, the quick
tests would take a quarter more time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coverage import CoveragePlugin

if TYPE_CHECKING:
    from coverage.plugin_support import Plugins
    from coverage.types import TConfigurable

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["is_listed", "listed_effects", "pure_files"]

# The process of the embedded runtime has tests of its own.
_NOT_COVERED = ("llamasup.embedded",)


def is_listed(module: str, listed: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in listed)


def listed_effects(root: Path = ROOT) -> Sequence[str]:
    config = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    (effects,) = (contract["effects"] for contract in contracts if contract["type"] == "purity")
    return list(effects)


def pure_files(root: Path = ROOT) -> list[str]:
    """The files of the pure modules, relative to ``root``."""
    return _files(root, pure=True)


def _files(root: Path, *, pure: bool) -> list[str]:
    listed = (*listed_effects(root), *_NOT_COVERED)
    names = (file.relative_to(root) for file in sorted((root / "llamasup").rglob("*.py")))
    return [str(name) for name in names if is_listed(_module(name), listed) is not pure]


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class PureModules(CoveragePlugin):
    def configure(self, config: TConfigurable) -> None:
        others = [str(ROOT / name) for name in _files(ROOT, pure=False)]
        config.set_option("run:omit", others)
        config.set_option("report:omit", others)


def coverage_init(reg: Plugins, options: dict[str, Any]) -> None:
    reg.add_configurer(PureModules())
