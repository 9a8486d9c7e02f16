"""Reads the kernel's text files, /proc and /sys, of which any may be absent or closed to us."""

from __future__ import annotations

from pathlib import Path

__all__ = ["system_text"]


def system_text(path: Path) -> str:
    """The file's text; empty where it is absent or closed to us, which is usual in containers."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
