"""Writes results to standard output in its encoding. A closed pipe is not an error."""

from __future__ import annotations

import os
import sys
from typing import Any

from llamasup.core.system.text import json_text
from llamasup.errors import OutputFailed


def write_result(text: str) -> None:
    """Write ``text`` and a newline. Raises OutputFailed, for a full disk for example."""
    encoding = sys.stdout.encoding or "utf-8"
    write_bytes((text + "\n").encode(encoding, "backslashreplace"))


def write_bytes(text: bytes) -> bool:
    """Write a piece of the result unchanged; False if the pipe is closed. Raises OutputFailed."""
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - or the interpreter reports an error at its exit
        return False
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - flushing its buffer would fail again
        raise OutputFailed(f"Cannot write the result to standard output: {error.strerror}.") from None
    return True


def write_json(value: Any) -> None:
    """Write ``value`` as indented JSON."""
    write_result(json_text(value, indent=2))


def write_shown(value: Any, text: str, *, json: bool) -> None:
    """Write ``value`` as JSON, or ``text``, which says the same to people."""
    write_result(json_text(value, indent=2) if json else text)
