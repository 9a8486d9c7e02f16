"""An import-linter contract of this project's own: modules are pure unless they are on the list of effects.

A pure module decides. It imports no module that does I/O, waits, or reads a clock or random numbers, and no
module on the list. The list is in pyproject.toml; it names modules, and packages with all their modules.

The gate on branch coverage follows the list: ``python scripts/import_contracts.py`` prints the files of the
pure modules, separated by commas, for ``coverage report --include``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    listed = (*listed_effects(root), *_NOT_COVERED)
    names = (file.relative_to(root) for file in sorted((root / "llamasup").rglob("*.py")))
    return [str(name) for name in names if not is_listed(_module(name), listed)]


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.stdout.write(",".join(pure_files()) + "\n")
else:
    import grimp
    from importlinter import Contract, ContractCheck, fields, output

    class PurityContract(Contract):
        """``effects``: modules and packages with effects. ``impure``: modules that only these may import."""

        type_name = "purity"

        effects = fields.ListField(subfield=fields.StringField())
        impure = fields.SetField(subfield=fields.StringField())

        def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
            listed: list[str] = self.effects  # type: ignore[assignment]
            impure: set[str] = self.impure  # type: ignore[assignment]
            missing = [name for name in listed if name not in graph.modules]
            broken = []
            for module in sorted(graph.modules):
                if not module.startswith("llamasup.") or is_listed(module, listed):
                    continue
                for imported in sorted(graph.find_modules_directly_imported_by(module)):
                    if imported in impure or is_listed(imported, listed):
                        details = graph.get_import_details(importer=module, imported=imported)
                        broken.append((module, imported, details[0]["line_number"]))
            return ContractCheck(
                kept=not (broken or missing), metadata={"broken": broken, "missing": missing}
            )

        def render_broken_contract(self, check: ContractCheck) -> None:
            for module, imported, line in check.metadata["broken"]:
                output.print_error(f"{module} imports {imported} (line {line}), but is not listed in effects")
            for name in check.metadata["missing"]:
                output.print_error(f"{name} is listed in effects, but does not exist")
