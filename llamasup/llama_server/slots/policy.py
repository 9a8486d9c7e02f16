"""Slots kept on disk while their model is not loaded: what fits which plan, and which go first (pure).

A saved slot is a conversation as llama-server holds it: its tokens, and what the model made of them. Between
two loads it is good for exactly one thing: the same model, started the same way. llama-server (b11434, and
the embedded runtime of October 2026) refuses most of what does not fit, and takes the rest: another model of
the same shape, or a file with wrong bytes in it, answers nonsense; a file that was cut off ends the server
(SIGABRT). So what may be restored is decided here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llamasup.llama_server.flags import Reason

__all__ = [
    "MAX_BYTES",
    "MIN_TOKENS",
    "STRAY_AFTER_S",
    "FileState",
    "KeptSlots",
    "SavedSet",
    "SavedSlot",
    "file_name",
    "is_current",
    "is_ours",
    "list_name",
    "slot_key",
    "to_drop",
]

FileState = tuple[str, int, int]
"""Path, size in bytes, time of modification in nanoseconds."""

MAX_BYTES: Final = 10 << 30
"""Of all saved slots together, unless something else is asked for: ten conversations of 8,192 tokens with a
model of 8 billion parameters (128 KiB a token in f16).
"""
# A folder of tiny ones is bounded too: each is looked at before the next is saved.
_MAX_SETS = 256
MIN_TOKENS: Final = 32
"""Fewer are read again in less time than a file takes; the prompt of a warm-up is none to keep."""
STRAY_AFTER_S: Final = 600.0
"""A file that no list names belongs to a save or a restore that still runs, for so long at most."""

# What changes from start to start, or only how fast it goes: not what a slot holds.
_NO_MATTER = frozenset(
    {"--host", "--port", "--api-key-file", "--alias", "--metrics", "--slots", "--slot-save-path"}
    | {"--verbosity", "--threads", "--threads-batch", "--prio", "--cache-ram", "--load-mode", "--mlock"}
)


@dataclass(frozen=True, slots=True)
class KeptSlots:
    """Where the slots of one plan are kept, and which saved ones it may take up.

    ``count`` is how many there are. ``files`` are those that the server is started from, as they were then.
    """

    folder: str
    key: str
    count: int
    files: tuple[FileState, ...]


@dataclass(frozen=True, slots=True)
class SavedSlot:
    number: int
    name: str
    tokens: int
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class SavedSet:
    """What one server left behind when it ended: its list on the disk, and the files that are named there."""

    key: str
    token: str
    saved_ns: int
    files: tuple[FileState, ...]
    slots: tuple[SavedSlot, ...]

    @property
    def size_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.slots)

    @property
    def tokens(self) -> int:
        return sum(slot.tokens for slot in self.slots)


def slot_key(runtime: str, files: Iterable[FileState], reasons: Iterable[Reason]) -> str:
    """What has to be the same for a saved slot to mean the same: build, files, and the flags that count.

    The context's size is among them although llama-server would take slots over into a larger one: models
    with long-context factors turn their keys by it.
    """
    flags = sorted(
        (each.flag, each.value or "") for each in reasons if each.passed and each.flag not in _NO_MATTER
    )
    said = json.dumps([runtime, sorted(files), flags], ensure_ascii=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def file_name(key: str, token: str, number: int) -> str:
    return f"{key}-{token}-{number}.kv"


def list_name(key: str, token: str) -> str:
    return f"{key}-{token}.json"


_OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}(?:-\d{1,4}\.kv|\.json)")


def is_ours(name: str) -> bool:
    """Whether a file of this name in the folder may be removed: nothing else there is touched."""
    return _OURS.fullmatch(name) is not None


def is_current(saved: SavedSet, state_of: Callable[[str], FileState | None]) -> bool:
    """Whether the files of its model are still those that it was made with. ``None``: there is none."""
    return all(state_of(path) == (path, size, mtime) for path, size, mtime in saved.files)


def to_drop(sets: Sequence[SavedSet], most_bytes: int) -> tuple[SavedSet, ...]:
    """Those that have to go for the rest to fit: the longest unused first."""
    newest_first = sorted(sets, key=lambda each: each.saved_ns, reverse=True)
    left, kept = most_bytes, 0
    for each in newest_first:
        left -= each.size_bytes
        if left < 0 or kept == _MAX_SETS:
            break
        kept += 1
    return tuple(newest_first[kept:])
