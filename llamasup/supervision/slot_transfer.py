"""Has a server save what its slots hold before it ends, and take it up again before it serves.

Neither may cost more than its time: what cannot be saved is computed again, what cannot be restored as well.
The one thing that is never let pass is a server that took up a part of a slot.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from time import monotonic

from llamasup.errors import FolderUnusable
from llamasup.http.httpx_import import httpx
from llamasup.llama_server.client import Prober
from llamasup.llama_server.health import SlotAnswer
from llamasup.llama_server.slots.policy import MIN_TOKENS, KeptSlots, SavedSet, file_name
from llamasup.llama_server.slots.store import SlotStore
from llamasup.llama_server.warmup import use_of_slot

__all__ = ["restore_slots", "save_slots"]

_log = logging.getLogger(__name__)


async def save_slots(prober: Prober, kept: KeptSlots, *, most_bytes: int, model: str) -> str | None:
    """Save all slots of an idle server that hold a conversation. What was in the way, or None.

    What has been saved when this is cancelled counts: the server may have ended by then.
    """
    store, began_s = SlotStore(Path(kept.folder), most_bytes), monotonic()
    try:
        saved = await asyncio.to_thread(store.new_set, kept)
    except FolderUnusable as error:
        return error.message
    number, problem = 0, None
    try:
        for number in range(kept.count):
            answer = await prober.move_slot("save", number, file_name(saved.key, saved.token, number))
            saved, problem = await asyncio.to_thread(_added, store, saved, number, answer)
            if problem is not None:
                break
    except httpx.HTTPError as error:
        problem = _words_of(error)
    except asyncio.CancelledError:
        _finish(store, saved, number)
        raise
    problem = await asyncio.to_thread(_finish, store, saved, number) or problem
    if saved.slots:
        _tell("%s: %d slots with %d tokens (%d bytes) were saved in %.3f s.", model, saved, began_s)
    return problem


def _added(store: SlotStore, saved: SavedSet, number: int, answer: SlotAnswer) -> tuple[SavedSet, str | None]:
    if answer.problem or answer.tokens < MIN_TOKENS:
        store.remove_unfinished(saved, number)
        return saved, answer.problem or None
    try:
        more = store.added(saved, number, answer.tokens)
    except (OSError, ValueError) as error:
        return saved, _words_of(error)
    if more is None:
        return saved, "together they take more than may be kept on the disk"
    return more, None


def _finish(store: SlotStore, saved: SavedSet, last: int) -> str | None:
    """Make it count. ``last``: the slot that was tried last, of which there may be a part."""
    if all(slot.number != last for slot in saved.slots):
        store.remove_unfinished(saved, last)
    if not saved.slots:
        return None
    try:
        store.keep(saved)
    except OSError as error:
        return _words_of(error)
    return None


async def restore_slots(
    prober: Prober, kept: KeptSlots, *, most_bytes: int, model: str
) -> tuple[bool, str | None]:
    """Give a server that serves nobody yet what an earlier one of the same plan held: once, and never again.

    Whether it can be used after that, and what was in the way, or None.
    """
    store, began_s = SlotStore(Path(kept.folder), most_bytes), monotonic()
    taken = await asyncio.to_thread(store.take, kept.key)
    if taken is None:
        return True, None
    saved = taken.saved
    try:
        if 0 < len(saved.slots) < kept.count:
            await _use(prober, saved)
        problem = await _restored(prober, saved)
    except asyncio.CancelledError:
        store.discard(saved)
        raise
    await asyncio.to_thread(store.discard, saved)
    if problem is not None:
        return False, problem
    if saved.slots:
        _tell("%s: %d slots with %d tokens (%d bytes) were restored in %.3f s.", model, saved, began_s)
    were = "was" if taken.damaged == 1 else "were"
    return True, f"{taken.damaged} of them {were} damaged" if taken.damaged else None


async def _use(prober: Prober, saved: SavedSet) -> None:
    """Or the first new conversation would get a restored slot, and not an empty one: llama-server (b11434)
    takes the one whose last use is longest ago, and a restore is none. All at once: one batch.
    """
    await asyncio.gather(*(prober.prove(use_of_slot(slot.number)) for slot in saved.slots))


async def _restored(prober: Prober, saved: SavedSet) -> str | None:
    try:
        for slot in saved.slots:
            answer = await prober.move_slot("restore", slot.number, slot.name)
            if answer.problem:
                return answer.problem
    except httpx.HTTPError as error:
        return _words_of(error)
    return None


def _tell(text: str, model: str, saved: SavedSet, began_s: float) -> None:
    _log.info(text, model, len(saved.slots), saved.tokens, saved.size_bytes, monotonic() - began_s)


def _words_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
