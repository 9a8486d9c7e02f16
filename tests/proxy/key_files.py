"""API keys for a proxy, with what is said of them."""

from __future__ import annotations

import os
from pathlib import Path

from llamasup.auth.key_source import KeyFile

__all__ = ["keys_of"]


def keys_of(text: str) -> KeyFile:
    """From a pipe, as ``--api-key-file <(command)`` gives them: they stay as they are."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    try:
        return KeyFile(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
