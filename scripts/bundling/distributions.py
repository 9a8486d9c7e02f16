"""The distributions that a distribution needs, as they are installed here."""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["needed_by"]


def needed_by(name: str, extras: set[str]) -> set[str]:
    """The canonical names of ``name`` and of all that it needs with these extras."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(canonicalize_name(name))
        for line in requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, more) for more in ("", *needed.extras)]
    return found
