"""The model ``demo`` that is a part of the package."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from llamasup.core.system.process.run_folder import private_runtime_folder
from llamasup.core.system.storage.folders import atomic_write, cache_folder
from llamasup.errors import FolderUnusable

DEMO = "demo"
# Of ``demo_model()``. Reading that file as well, and importing what reads it, would take 10 ms of each start.
DEMO_CRC32 = 0x4298073E


def demo_file() -> Path:
    """The demo model, written once into the cache folder, or for this login if that cannot be used."""
    try:
        return _demo_in(cache_folder())
    except FolderUnusable:
        return _demo_in(private_runtime_folder())


def _demo_in(folder: Path) -> Path:
    path = folder / "demo.gguf"
    try:
        if not path.exists() or crc32(path.read_bytes()) != DEMO_CRC32:
            from llamasup.core.gguf.demo import demo_model

            atomic_write(path, demo_model())
    except OSError as error:
        raise FolderUnusable(
            f"{path}: the demo model cannot be written: {error.strerror}",
            remedy="Free space there, or remove what blocks this path; or use your own model.",
        ) from None
    return path
