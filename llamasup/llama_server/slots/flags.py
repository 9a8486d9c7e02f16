"""The flags with which llama-server can save its slots."""

from __future__ import annotations

from dataclasses import dataclass

from llamasup.gguf.facts import ModelClass
from llamasup.llama_server.flags import CommandLine
from llamasup.llama_server.settings import Settings
from llamasup.llama_server.slots.policy import FileState, KeptSlots, slot_key

__all__ = ["SlotHome", "give_slot_folder", "kept_slots"]


@dataclass(frozen=True, slots=True)
class SlotHome:
    """The folder for saved slots, and the current state of the files that the server is started from."""

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
    """Pass the flags and return True if the slots are to be saved. Only if the user wants it: slots contain
    conversations. ``adapts``: requests choose among LoRA adapters.
    """
    if not settings.keep_slots:
        return False
    if adapts:
        why = "a slot depends on the adapters of its last request, which llama-server does not report"
        line.leave_out("--slot-save-path", why)
        return False
    if serves is not ModelClass.DECODER:
        line.leave_out("--slot-save-path", f"{serves} models have no conversations to save")
        return False
    if home is None:
        line.leave_out("--slot-save-path", "there is no usable cache folder for conversations")
        return False
    passed = line.give(
        "--slot-save-path",
        home.folder,
        "conversations are saved on disk while the model is not loaded",
        otherwise="this build cannot save slots",
        essential=True,
    )
    if passed and unified:
        # b11434 moves idle slots to its prompt cache in memory and clears them: one of four could be saved.
        why = "idle slots that share their cells keep their conversations, so that all of them can be saved"
        line.give(
            "--no-cache-idle-slots",
            None,
            why,
            otherwise="this build does not clear idle slots",
            essential=True,
        )
    return passed


def kept_slots(line: CommandLine, home: SlotHome, runtime: str, count: int) -> KeptSlots:
    """Where the slots of this command line are saved. Call it after the last flag."""
    return KeptSlots(home.folder, slot_key(runtime, home.files, line.reasons), count, home.files)
