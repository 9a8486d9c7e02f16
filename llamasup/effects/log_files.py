"""Log files for the output of llama-server: one for each model of each running llamasup instance.

Two instances of one user may serve a model of the same name. The first writes ``logs/NAME.log``, the second
``logs/2/NAME.log``, and so on. An instance that starts takes the first free file.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from llamasup.core.errors import FolderUnusable
from llamasup.effects.files import Claimed, claim_file, private_folder, state_folder

__all__ = ["MOST_LLAMASUPS", "LogFiles"]

# Of the 255 bytes that file systems take, where each is one of UTF-8's longest; a digest and numbers follow.
_MOST_LETTERS = 48
# Instances that serve a model of the same name at the same time; each has 30 MB of log.
MOST_LLAMASUPS = 8

_log = logging.getLogger(__name__)


class LogFiles:
    """The log files of one instance, which holds each from the first ``path_of`` until ``close``."""

    def __init__(self) -> None:
        self._paths: dict[str, Path | None] = {}
        self._locks: list[int] = []

    def path_of(self, model: str) -> Path | None:
        """The log file of ``model``; None if no file can be used. The model is served in any case.

        Different names have different files: ``a/b`` and ``a_b`` are two models.
        """
        if model not in self._paths:
            try:
                self._paths[model] = self._claimed(_name_of(model))
            except FolderUnusable as error:
                _log.warning("llama-server's output is not kept: %s", error.message)
                self._paths[model] = None
        return self._paths[model]

    def close(self) -> None:
        """Release the files for other instances. Call it after the last write. May be repeated."""
        self._paths.clear()
        while self._locks:
            os.close(self._locks.pop())

    def _claimed(self, name: str) -> Path | None:
        folder = private_folder(state_folder() / "logs")
        for number in range(1, MOST_LLAMASUPS + 1):
            place = folder if number == 1 else private_folder(folder / str(number))
            try:
                lock = claim_file(place / f"{name}.lock")
            except Claimed:
                continue
            except OSError:  # errors of the log itself are reported when it is written
                lock = None
            if lock is not None:
                self._locks.append(lock)
            return place / f"{name}.log"
        _log.warning(
            "llama-server's output is not kept: %d running llamasup instances already write %s.log",
            MOST_LLAMASUPS,
            name,
        )
        return None


def _name_of(model: str) -> str:
    name = "".join(letter if letter.isalnum() or letter in "._-~" else "_" for letter in model)
    if name != model or len(name) > _MOST_LETTERS:
        digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[:_MOST_LETTERS]}-{digest}"
    return name
