"""Where the output of llama-servers is kept."""

from __future__ import annotations

import logging
from pathlib import Path

from llamasup.core.errors import FolderUnusable
from llamasup.effects.files import private_folder, state_folder

__all__ = ["log_path_of"]

_log = logging.getLogger(__name__)


def log_path_of(model: str) -> Path | None:
    """None where there is no place for it: the model is served all the same."""
    # A model's name may hold a slash; the name of its log may not.
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in model)
    try:
        return private_folder(state_folder() / "logs") / f"{name or 'model'}.log"
    except FolderUnusable as error:
        _log.warning("llama-server's output is not kept: %s", error.message)
        return None
