"""Slots saved on disk while their model is not loaded: which plan may restore them, and which go first.

A saved slot contains the tokens of a conversation and their KV cache. Only the same model, started with the
same flags, can use it. llama-server (b11434, and the embedded runtime of October 2026) does not reject all
other files. With the files of a model of the same shape, or with wrong bytes, it answers nonsense. A
truncated file crashes it (SIGABRT). So this module decides what may be restored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.argv_builder import CommandLine, Reason
from llamasup.core.settings.model import Settings

FileState = tuple[str, int, int]
"""Path, size in bytes, time of modification in nanoseconds."""

# Each save reads the lists of all sets, so their number is also limited.
_MAX_SETS = 256
MIN_TOKENS: Final = 32
"""Shorter prompts, such as the warm-up's, are computed again faster than a file is read."""
STRAY_AFTER_S: Final = 600.0
"""A younger file that is in no list may belong to a save or a restore that still runs."""

# Flags that do not change the content of a slot.
_IRRELEVANT_FLAGS = frozenset(
    {"--host", "--port", "--api-key-file", "--alias", "--metrics", "--slots", "--slot-save-path"}
    | {"--verbosity", "--threads", "--threads-batch", "--prio", "--cache-ram", "--load-mode", "--mlock"}
    | {"--ctx-checkpoints"}  # as many as memory holds
)


class SlotHome(Struct, frozen=True):
    """The folder for saved slots, and the current state of the files that the server is started from."""

    folder: str
    files: tuple[FileState, ...]


class KeptSlots(Struct, frozen=True):
    """The place where the slots of one plan are saved, and which saved ones it may restore.

    ``count``: the number of slots. ``files``: the state of the files that the server was started from.
    """

    folder: str
    key: str
    count: int
    files: tuple[FileState, ...]


class SavedSlot(Struct, frozen=True):
    number: int
    name: str
    tokens: int
    size_bytes: int
    crc32: int


class SavedSet(Struct, frozen=True):
    """The slots that one server saved when it ended, as listed in a file on the disk."""

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


def give_slot_folder(
    line: CommandLine,
    settings: Settings,
    serves: ModelClass,
    home: SlotHome | None,
    *,
    unified: bool,
    adapts: bool = False,
) -> bool:
    """Pass the flags and return True if the slots are to be saved. Only if the user wants it: slots contain
    conversations. ``adapts``: requests choose among LoRA adapters.
    """
    if not settings.keep_slots:
        return False
    if adapts or serves is not ModelClass.DECODER or home is None:
        why = "there is no usable cache folder for conversations"
        if adapts:
            why = "a slot depends on the adapters of its last request, which llama-server does not report"
        elif serves is not ModelClass.DECODER:
            why = f"{serves} models have no conversations to save"
        line.leave_out("--slot-save-path", why)
        return False
    passed = line.give(
        "--slot-save-path",
        home.folder,
        "conversations are saved on disk while the model is not loaded",
        otherwise="this build cannot save slots",
        essential=True,
    )
    if passed and unified and "--no-cache-idle-slots" not in line.argv:
        # b11434 moves idle slots to its prompt cache in memory and clears them: one of four could be saved.
        why = "idle slots that share their cells keep their conversations, so that all of them can be saved"
        otherwise = "this build does not clear idle slots"
        line.give("--no-cache-idle-slots", None, why, otherwise=otherwise, essential=True)
    return passed


def kept_slots(line: CommandLine, home: SlotHome, runtime: str, count: int) -> KeptSlots:
    """Return where the slots of this command line are saved. Call it after the last flag."""
    return KeptSlots(home.folder, slot_key(runtime, home.files, line.reasons), count, home.files)


def slot_key(runtime: str, files: Iterable[FileState], reasons: Iterable[Reason]) -> str:
    """Return a digest of all that a saved slot depends on: build, files and flags.

    The context size is among them, although llama-server accepts slots in a larger context: in models with
    long-context factors, the keys depend on it.
    """
    flags = sorted(
        (reason.flag, reason.value or "")
        for reason in reasons
        if reason.passed and reason.flag not in _IRRELEVANT_FLAGS
    )
    identity = json.dumps([runtime, sorted(files), flags], ensure_ascii=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def file_name(key: str, token: str, number: int) -> str:
    return f"{key}-{token}-{number}.kv"


def list_name(key: str, token: str) -> str:
    return f"{key}-{token}.json"


_FILE_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}(?:-\d{1,4}\.kv|\.json)")


def is_slot_file(name: str) -> bool:
    """Return whether this is the name of a saved slot or list.

    Other files in the folder are never removed.
    """
    return _FILE_NAME.fullmatch(name) is not None


def is_current(saved: SavedSet, state_of: Callable[[str], FileState | None]) -> bool:
    """Return whether the model's files have not changed since.

    ``state_of`` returns None for a missing file.
    """
    return all(state_of(path) == (path, size, mtime) for path, size, mtime in saved.files)


def sets_to_remove(sets: Sequence[SavedSet], most_bytes: int) -> tuple[SavedSet, ...]:
    """Return the oldest sets that must be removed so that the rest fits."""
    newest_first = sorted(sets, key=lambda saved: saved.saved_ns, reverse=True)
    free_bytes, count = most_bytes, 0
    for saved in newest_first:
        free_bytes -= saved.size_bytes
        if free_bytes < 0 or count == _MAX_SETS:
            break
        count += 1
    return tuple(newest_first[count:])
