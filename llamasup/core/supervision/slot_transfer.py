"""Asks a server to save its slots before it ends, and to restore them before it serves.

A slot that cannot be saved or restored is no error: its prompt is computed again. But a server that restored
only a part of a slot must not serve.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from llamasup.core.llama_server.answers import NoAnswer, SlotAnswer
from llamasup.core.llama_server.slots.policy import MIN_TOKENS, KeptSlots, SavedSet, file_name
from llamasup.core.llama_server.slots.store import SlotStore
from llamasup.core.llama_server.warmup import slot_request
from llamasup.errors import FolderUnusable

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober

_log = logging.getLogger(__name__)


async def save_slots(prober: Prober, kept_slots: KeptSlots, *, most_bytes: int, model: str) -> str | None:
    """Save all slots of an idle server that hold a conversation. Returns the problem, or None.

    A cancel keeps the slots that are saved by then: the server may have ended.
    """
    store, began_s = SlotStore(Path(kept_slots.folder), most_bytes), monotonic()
    try:
        saved = await asyncio.to_thread(store.new_set, kept_slots)
    except FolderUnusable as error:
        return error.message
    number, problem = 0, None
    try:
        for number in range(kept_slots.count):
            answer = await prober.transfer_slot("save", number, file_name(saved.key, saved.token, number))
            saved, problem = await asyncio.to_thread(_add, store, saved, number, answer)
            if problem is not None:
                break
    except NoAnswer as error:
        problem = _reason(error)
    except asyncio.CancelledError:
        _finish(store, saved, number)
        raise
    problem = await asyncio.to_thread(_finish, store, saved, number) or problem
    if saved.slots:
        _log_transfer("%s: slots saved: %d (tokens: %d, bytes: %d) in %.3f s.", model, saved, began_s)
    return problem


def _add(store: SlotStore, saved: SavedSet, number: int, answer: SlotAnswer) -> tuple[SavedSet, str | None]:
    if answer.problem or answer.tokens < MIN_TOKENS:
        store.remove_unfinished(saved, number)
        return saved, answer.problem or None
    try:
        more = store.add(saved, number, answer.tokens)
    except (OSError, ValueError) as error:
        return saved, _reason(error)
    if more is None:
        return saved, f"together they exceed the disk limit of {store.most_bytes} bytes"
    return more, None


def _finish(store: SlotStore, saved: SavedSet, last: int) -> str | None:
    """Write the set's list. ``last``: the slot of the last request, whose file may be incomplete."""
    if all(slot.number != last for slot in saved.slots):
        store.remove_unfinished(saved, last)
    if not saved.slots:
        return None
    try:
        store.commit(saved)
    except OSError as error:
        return _reason(error)
    return None


async def restore_slots(
    prober: Prober, kept_slots: KeptSlots, *, most_bytes: int, model: str
) -> tuple[bool, str | None]:
    """Restore the slots of an earlier server with the same plan, once, before the first request.

    Returns whether the server is usable after that, and the problem, or None.
    """
    store, began_s = SlotStore(Path(kept_slots.folder), most_bytes), monotonic()
    taken = await asyncio.to_thread(store.take, kept_slots.key)
    if taken is None:
        return True, None
    saved = taken.saved
    try:
        if 0 < len(saved.slots) < kept_slots.count:
            await _mark_used(prober, saved)
        problem = await _restore(prober, saved)
    except asyncio.CancelledError:
        store.discard(saved)
        raise
    await asyncio.to_thread(store.discard, saved)
    if problem is not None:
        return False, problem
    if saved.slots:
        _log_transfer("%s: slots restored: %d (tokens: %d, bytes: %d) in %.3f s.", model, saved, began_s)
    were = "was" if taken.damaged == 1 else "were"
    return True, f"{taken.damaged} of them {were} damaged" if taken.damaged else None


async def _mark_used(prober: Prober, saved: SavedSet) -> None:
    """Use the slots once, so that the first new conversation gets an empty slot: llama-server (b11434) takes
    the least recently used one, and a restore does not count as use. All at once, in one batch.
    """
    await asyncio.gather(*(prober.probe_token(slot_request(slot.number)) for slot in saved.slots))


async def _restore(prober: Prober, saved: SavedSet) -> str | None:
    try:
        for slot in saved.slots:
            answer = await prober.transfer_slot("restore", slot.number, slot.name)
            if answer.problem:
                return answer.problem
    except NoAnswer as error:
        return _reason(error)
    return None


def _log_transfer(text: str, model: str, saved: SavedSet, began_s: float) -> None:
    _log.info(text, model, len(saved.slots), saved.tokens, saved.size_bytes, monotonic() - began_s)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
