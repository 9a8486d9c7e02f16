"""Collects the texts of licenses for a bundle, and remembers whose text is missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["LicenseTexts", "refusal"]

_CANNOT = 77  # scripts/test then skips the tests of the bundle

_OF_DEBIAN = Path("/usr/share/doc")
_COMMON = Path("/usr/share/common-licenses")
_REFERENCE = re.compile(r"/usr/share/common-licenses/([\w.+-]*\w)")


class LicenseTexts:
    """Writes into ``folder``. ``given`` may have NAME.txt for what has no text on this machine."""

    def __init__(self, folder: Path, given: Path | None, common: Path = _COMMON) -> None:
        self.folder = folder
        self.missing: list[str] = []
        self._given = given
        self._common = common
        folder.mkdir()

    def add(self, name: str, candidates: Iterable[Path]) -> None:
        """Copy the first that exists to ``name``.txt, with the files of Debian that it refers to."""
        given = [] if self._given is None else [self._given / f"{name}.txt"]
        source = next((path for path in (*given, *candidates) if path.exists()), None)
        if source is None:
            self.missing.append(name)
            return
        target = self.folder / f"{name}.txt"
        shutil.copy(source, target)
        for reference in sorted(set(_REFERENCE.findall(target.read_text("utf-8", "replace")))):
            if (text := self._common / reference).exists():
                into = self.folder / "common-licenses"
                into.mkdir(exist_ok=True)
                shutil.copy(text, into / reference)
            else:
                self.missing.append(f"{name} ({text})")

    def add_debian_package(self, library: str, package: str | None) -> None:
        """``package``: the name of the Debian package of ``library``, if it has one."""
        self.add(package or library, [_OF_DEBIAN / package / "copyright"] if package else [])


def refusal(missing: Sequence[str], given: Path | None) -> tuple[str, int]:
    """Why no bundle is made if these texts are missing, and the exit code."""
    reason = f"The texts of these licenses were not found: {', '.join(missing)}. "
    remedy = "Put NAME.txt for each into a folder, and give it with --licenses FOLDER."
    if given is None and shutil.which("dpkg-query") is None:
        reason += "This system has no dpkg-query, which says to which package a library belongs. "
        return reason + remedy, _CANNOT
    return reason + remedy, 1
