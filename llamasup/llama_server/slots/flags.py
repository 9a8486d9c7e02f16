"""Whether a server is told to let its slots be saved, and what it takes for all of them to hold something."""

from __future__ import annotations

from dataclasses import dataclass

from llamasup.gguf.facts import ModelClass
from llamasup.llama_server.flags import CommandLine
from llamasup.llama_server.settings import Settings
from llamasup.llama_server.slots.policy import FileState, KeptSlots, slot_key

__all__ = ["SlotHome", "give_slot_folder", "kept_slots"]


@dataclass(frozen=True, slots=True)
class SlotHome:
    """The folder for saved slots, and the files that the server will be started from, as they are."""

    folder: str
    files: tuple[FileState, ...]


def give_slot_folder(
    line: CommandLine,
    settings: Settings,
    serves: ModelClass,
    home: SlotHome | None,
    *,
    unified: bool,
    adapts: bool = False,
) -> bool:
    """Whether its slots are kept while it is not loaded. Asked for or not at all: they are conversations.

    ``adapts``: requests choose among its LoRA adapters.
    """
    if not settings.keep_slots:
        return False
    if adapts:
        why = "what a slot holds was computed with the adapters of its last request, and nothing says which"
        line.leave_out("--slot-save-path", why)
        return False
    if serves is not ModelClass.DECODER:
        line.leave_out("--slot-save-path", f"{serves} models have no conversations to keep")
        return False
    if home is None:
        line.leave_out("--slot-save-path", "there is no cache folder that conversations could be kept in")
        return False
    passed = line.give(
        "--slot-save-path",
        home.folder,
        "conversations are kept on disk while the model is not loaded",
        otherwise="this build cannot save what its slots hold",
        essential=True,
    )
    if passed and unified:
        # b11434 moves them to its prompt cache in memory and clears them: one of four was there to be saved.
        why = "slots that share their cells keep their conversations, so that all of them can be saved"
        line.give(
            "--no-cache-idle-slots", None, why, otherwise="this build leaves them there", essential=True
        )
    return passed


def kept_slots(line: CommandLine, home: SlotHome, runtime: str, count: int) -> KeptSlots:
    """For the whole command line."""
    return KeptSlots(home.folder, slot_key(runtime, home.files, line.reasons), count, home.files)
