"""The pages of the documentation: the page of each command, and where this installation has the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]
_FOLDERS: Final = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In a wheel, and in a checkout. The bundle has no pages."""

_PAGES: Final[Mapping[str, str]] = {
    "api-keys": "key",
    "batch": "batch",
    "chat": "chat",
    "configuration": "config",
    "connect": "connect launch",
    "console": "ui",
    "control": "status top ps why load unload restart reload stop logs",
    "downloads": "pull rm",
    "get-started": "run",
    "models": "list inspect",
    "planning": "plan",
    "ray": "fleet",
    "rpc": "rpc-worker",
    "runtimes": "runtime",
    "serve": "serve",
    "systemd": "service",
    "troubleshooting": "doctor",
    "tuning": "tune",
    "upgrade": "upgrade",
    "usage": "usage",
    "wrap": "wrap",
}
_OTHERS: Final = "commands"


def page_of(command: str) -> str:
    """Return the page that describes a command."""
    return next((page for page, names in _PAGES.items() if command in names.split()), _OTHERS)


def pointer(command: str) -> str:
    """Return the last line of the help of a command, which names its page."""
    page = page_of(command)
    return f"Described in docs/{page}.md: llamasup help {page}.md"


def pages() -> Sequence[Path]:
    """Return the files of all pages, by name; nothing if this installation has none."""
    return next((found for folder in _FOLDERS if (found := sorted(folder.glob("*.md")))), ())
