"""An import-linter contract of this project's own: modules are pure unless they are on the list of effects.

A pure module decides. It imports no module that does I/O, waits, or reads a clock or random numbers, and no
module on the list.
"""

from __future__ import annotations

import grimp
from importlinter import Contract, ContractCheck, fields, output

from scripts.pure_modules import is_listed

__all__ = ["PurityContract"]


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
        return ContractCheck(kept=not (broken or missing), metadata={"broken": broken, "missing": missing})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported, line in check.metadata["broken"]:
            output.print_error(f"{module} imports {imported} (line {line}), but is not listed in effects")
        for name in check.metadata["missing"]:
            output.print_error(f"{name} is listed in effects, but does not exist")
