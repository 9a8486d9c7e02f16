"""Results on standard output: in whatever encoding it has, and without a word when nobody reads on."""

from __future__ import annotations

import os
import sys
from typing import Any

from llamasup.core.errors import OutputFailed
from llamasup.core.json_text import json_text

__all__ = ["write_json", "write_result"]


def write_result(text: str) -> None:
    """Write ``text`` and a newline. Raises OutputFailed, for a full disk for example."""
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.buffer.write((text + "\n").encode(encoding, "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - or the interpreter complains at its end
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - what is left in its buffer fails again
        raise OutputFailed(f"The result cannot be written: {error.strerror}.") from None


def write_json(value: Any) -> None:
    """Write ``value`` as JSON to be read by people as well."""
    write_result(json_text(value, indent=2))
