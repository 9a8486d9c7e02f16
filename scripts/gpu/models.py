"""The model files of the measurements: random weights, as fast and as large as those of real models."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from tests.kit.models import write_large_decoder

__all__ = ["NAMES", "Models"]

NAMES = ("small", "middle", "large")
_WIDTHS = dict(zip(NAMES, (2048, 4096, 6144), strict=True))


class Models:
    """Writes the files in a thread, the smallest first, because the largest takes as long as some checks."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._written = {name: threading.Event() for name in sizes}
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        for name, size in self._sizes.items():
            large = size > 500_000_000
            write_large_decoder(
                self._folder / f"{name}.gguf",
                size,
                width=_WIDTHS[name] if large else 1024,
                head=128 if large else 64,
                head_count_kv=8,
            )
            self._written[name].set()

    def wait_for(self, name: str) -> Path:
        """The file, once it is whole."""
        if not self._written[name].wait(300):
            raise RuntimeError(f"the {name} model was not written within 300 s")
        return self._folder / f"{name}.gguf"
