"""Where the output of llama-servers is kept: a file for each model of each llamasup that runs.

Two llamasups of one user may serve a model of the same name. The first has ``logs/NAME.log``, the second
``logs/2/NAME.log`` and so on; the next one that starts takes the first that is free.
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
# That serve a model of one name at one time, each with 30 MB of log.
MOST_LLAMASUPS = 8

_log = logging.getLogger(__name__)


class LogFiles:
    """The log files of one llamasup. Each is its own from the first question on, until ``close``."""

    def __init__(self) -> None:
        self._paths: dict[str, Path | None] = {}
        self._locks: list[int] = []

    def path_of(self, model: str) -> Path | None:
        """None where there is no place for it: the model is served all the same.

        No two names have one file: ``a/b`` and ``a_b`` are two models, and one may be asked for its log.
        """
        if model not in self._paths:
            try:
                self._paths[model] = self._claimed(_name_of(model))
            except FolderUnusable as error:
                _log.warning("llama-server's output is not kept: %s", error.message)
                self._paths[model] = None
        return self._paths[model]

    def close(self) -> None:
        """Let other llamasups have the files. Nothing may write to them any more. May be repeated."""
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
            except OSError:  # whether the log can be written is found out when it is
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
