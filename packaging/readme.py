"""The README as PyPI shows it. A hook of hatchling, named in pyproject.toml.

Links of the repository are relative. PyPI needs absolute ones, made with the address of the repository
(``Repository`` in ``[project.urls]``). Without an address, the text of a link stays; a picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")


def for_pypi(text: str, repository: str | None, version: str) -> str:
    """Return the README with absolute links, or without links if ``repository`` is None."""
    if repository is None:
        return re.sub(r"\n{3,}", "\n\n", _LINK.sub(r"\1", _PICTURE.sub("", text)))
    files = f"{repository.rstrip('/')}/{{}}/v{version}"
    text = _PICTURE.sub(rf"![\1]({files.format('raw')}/\2)", text)
    return _LINK.sub(rf"[\1]({files.format('blob')}/\2)", text)


class ReadmeHook(MetadataHookInterface):
    """Sets ``readme`` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        version = re.search(r'__version__ = "(.+)"', (root / "llamasup" / "_version.py").read_text("utf-8"))
        assert version is not None
        text = for_pypi(
            (root / "README.md").read_text("utf-8"), metadata.get("urls", {}).get("Repository"), version[1]
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
