"""Key files for a proxy."""

from __future__ import annotations

import os
from pathlib import Path

from llamasup.core.auth.key_source import KeyFile

__all__ = ["keys_of"]


def keys_of(text: str) -> KeyFile:
    """A key file that is a pipe, as in ``--api-key-file <(command)``: it never changes."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    try:
        return KeyFile(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
