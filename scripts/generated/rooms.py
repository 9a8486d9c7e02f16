"""The diagram of the rooms, with their floors and imports. ``scripts/count.py --rooms`` lists them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

import grimp

from scripts.pages import ROOT

# The modules of features that are a part of the command line: pyproject.toml excepts them.
_COMMANDS = re.compile(r"llamasup\.features\.(\w+\.command|wrap\.options)")


def floors() -> list[list[str]]:
    """The rooms of each floor, highest first, as the layers contracts list them. ``core`` is its floors."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    layers = {
        container: [layer.split(" | ") for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
        for container in contract["containers"]
    }
    return [
        floor
        for level in layers["llamasup"]
        for floor in (layers["llamasup.core"] if level == ["core"] else [level])
    ]


def arrows() -> Mapping[str, Mapping[str, int]]:
    """Room → the rooms that it imports, with the number of imports. Annotations count, too.

    The features are one room here.
    """
    graph = grimp.build_graph("llamasup", cache_dir=None)
    found: dict[str, dict[str, int]] = {}
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            room, other = _room(module), _room(imported)
            if room and other and room != other:
                imports = found.setdefault(room, {})
                imports[other] = imports.get(other, 0) + 1
    return found


def _room(module: str) -> str:
    if _COMMANDS.fullmatch(module):
        return "cli"
    return module.removeprefix("llamasup").removeprefix(".core").removeprefix(".").partition(".")[0]


def direct(of: Mapping[str, Mapping[str, int]]) -> dict[str, list[str]]:
    """The arrows that the diagram needs: without those to a room that another import also reaches."""

    def reach(room: str) -> set[str]:
        return {far for other in of.get(room, ()) for far in (other, *reach(other))}

    return {
        room: [name for name in others if not any(name in reach(other) for other in others if other != name)]
        for room, others in of.items()
    }


def diagram() -> str:
    """Draw a row for each floor, in Mermaid."""
    levels, of = floors(), arrows()
    lines = ["flowchart TD"]
    for number, rooms in enumerate(levels):
        lines.append(f"    subgraph floor{len(levels) - number}[ ]")
        lines += [f"        {_id(room)}[{room}]" for room in rooms]
        lines.append("    end")
    known = {room for rooms in levels for room in rooms}
    for room, others in direct(of).items():
        lines += [f"    {_id(room)} --> {_id(other)}" for other in others if {room, other} <= known]
    return "\n".join([*lines, ""])


def _id(room: str) -> str:
    return f"room_{room.strip('_')}"


def listing() -> str:
    """List the rooms with their floors, files, lines, and the rooms that they import."""
    levels, of = floors(), arrows()
    lines = []
    for number, rooms in enumerate(levels):
        for room in rooms:
            base = ROOT / "llamasup"
            files = [file for folder in (base / "core", base) for file in (folder / room).rglob("*.py")]
            files = files or [base / f"{room}.py"]
            count = sum(len(file.read_text("utf-8").splitlines()) for file in files)
            imports = ", ".join(f"{other} ({times})" for other, times in sorted(of.get(room, {}).items()))
            lines.append(
                f"{len(levels) - number:2} {room:14} {len(files):3} files {count:6} lines  {imports}"
            )
    return "\n".join(lines)
