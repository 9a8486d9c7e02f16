"""Where the output of llama-servers is kept."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from llamasup.core.errors import FolderUnusable
from llamasup.effects.files import private_folder, state_folder

__all__ = ["log_path_of"]

# Of the 255 bytes that file systems take, where each is one of UTF-8's longest; a digest and numbers follow.
_MOST_LETTERS = 48

_log = logging.getLogger(__name__)


def log_path_of(model: str) -> Path | None:
    """None where there is no place for it: the model is served all the same.

    No two names have one file: ``a/b`` and ``a_b`` are two models, and one may be asked for its log.
    """
    name = "".join(letter if letter.isalnum() or letter in "._-~" else "_" for letter in model)
    if name != model or len(name) > _MOST_LETTERS:
        digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[:_MOST_LETTERS]}-{digest}"
    try:
        return private_folder(state_folder() / "logs") / f"{name}.log"
    except FolderUnusable as error:
        _log.warning("llama-server's output is not kept: %s", error.message)
        return None
