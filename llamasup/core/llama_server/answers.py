"""Reads what a llama-server answers about itself: health, progress, tokens, slots and context.

``read_progress`` only reads; ``supervision/liveness.py`` decides what the numbers mean. Every field is
optional, since builds differ:

- ``is_processing`` is a number called ``state`` until September 2024 (0: idle);
- ``next_token`` is an object or a list of one;
- ``n_prompt_tokens_processed`` is missing until autumn 2025; it moves once per batch (2,048
  tokens by default), not per token (b11434), and so does ``llamacpp:n_decode_total``;
- builds before #27041 answer neither while a batch is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Struct, field

from llamasup.core.http.finish_reason import ContextWindow
from llamasup.core.system.text import INVALID_JSON


class NoAnswer(Exception):
    """The server gave no answer. The text says why."""


class Health(Enum):
    """The result of ``/health``."""

    OK = "ok"
    LOADING = "loading"
    SILENT = "silent"  # no connection, or no valid answer in time


class TokenProbe(Struct, frozen=True):
    """The result of a request for one token. ``problem``: why it failed; None if it did not."""

    problem: str | None


class SlotAnswer(Struct, frozen=True):
    """The answer to ``/slots/N?action=…``. ``problem``: why it failed; empty if it did not."""

    tokens: int = 0
    problem: str = ""


def read_slot_answer(status: int, body: bytes, counted: str) -> SlotAnswer:
    """Read the answer to ``/slots/N?action=…``.

    ``counted``: ``n_saved`` or ``n_restored``, the field with the number of tokens.
    """
    try:
        answer = json.loads(body)
        if status == 200:
            return SlotAnswer(tokens=int(answer[counted]))
        return SlotAnswer(problem=str(answer["error"]["message"]))
    except (KeyError, TypeError, *INVALID_JSON):
        return SlotAnswer(problem=f"it answered {status}: {body[:200].decode(errors='replace')}")


_TOTAL = re.compile(rb"^llamacpp:\w+_total(?:\{[^}]*\})? +(\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE)
_NOTHING: Mapping[str, int] = MappingProxyType({})
_Count = Annotated[int, msgspec.Meta(ge=0)]
# The longest draft by default is 48 tokens (ngram-simple, b11434); 3 with a draft model.
_LONGEST_DRAFT = 48


class ServerProgress(Struct, frozen=True):
    """The progress of all requests.

    ``tokens``: the prompt and answer tokens so far of each request in a slot, by slot and task.

    ``prefilling``: whether a request is still at its prompt (None: unknown). ``total``: the sum of the
    server's counters, which only grow.
    """

    tokens: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    prefilling: bool | None = None
    total: float | None = None


class SlotProgress(Struct, frozen=True):
    """A busy slot. ``prompt``: the tokens of its prompt, of which ``done`` are in the context.

    None: this build does not say. ``decoded``: the tokens of its answer so far.
    """

    task: int
    prompt: int | None
    done: int | None
    decoded: int


class _NextToken(msgspec.Struct):
    n_decoded: _Count = 0


class _Slot(msgspec.Struct):
    id: int = 0
    id_task: int = 0
    state: int = 0
    is_processing: bool | None = None
    n_prompt_tokens: _Count | None = None
    n_prompt_tokens_processed: _Count = 0
    n_prompt_tokens_cache: _Count | None = None
    next_token: list[_NextToken] | _NextToken = msgspec.field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return self.state != 0 if self.is_processing is None else self.is_processing

    @property
    def decoded(self) -> int:
        tokens = self.next_token if isinstance(self.next_token, list) else [self.next_token]
        return sum(token.n_decoded for token in tokens)


def read_progress(slots: bytes | None, metrics: bytes | None) -> ServerProgress:
    """Read the bodies of ``/slots`` and ``/metrics``, which may be None or invalid."""
    tokens: Mapping[str, int] = _NOTHING
    prefilling: bool | None = None
    busy = _busy_slots(slots)
    if busy is not None:
        tokens = {f"{slot.id}/{slot.id_task}": slot.n_prompt_tokens_processed + slot.decoded for slot in busy}
        prefilling = any(slot.decoded == 0 for slot in busy)
    totals = _TOTAL.findall(metrics or b"")
    return ServerProgress(tokens, prefilling, sum(map(float, totals)) if totals else None)


def read_slots(slots: bytes | None) -> tuple[SlotProgress, ...] | None:
    """Return the busy slots, in the order in which they got their requests; None: no valid answer."""
    busy = _busy_slots(slots)
    if busy is None:
        return None
    return tuple(map(_progress, sorted(busy, key=lambda slot: slot.id_task)))


def _busy_slots(slots: bytes | None) -> list[_Slot] | None:
    try:
        return [slot for slot in msgspec.json.decode(slots or b"", type=list[_Slot]) if slot.is_busy]
    except (msgspec.DecodeError, RecursionError):  # RecursionError: deeply nested brackets
        return None


def _progress(slot: _Slot) -> SlotProgress:
    if slot.n_prompt_tokens is None or slot.n_prompt_tokens_cache is None:
        return SlotProgress(slot.id_task, None, None, slot.decoded)
    # b11434 counts the tokens of the answer in ``n_prompt_tokens``, too.
    prompt = max(0, slot.n_prompt_tokens - slot.decoded)
    done = min(prompt, slot.n_prompt_tokens_cache + slot.n_prompt_tokens_processed)
    return SlotProgress(slot.id_task, prompt, done, slot.decoded)


class _Window(msgspec.Struct):
    n_ctx: int
    speculative: bool = False


def read_window(slots: bytes | None) -> ContextWindow | None:
    """Return the window from an answer of ``/slots``; None if it has none."""
    try:
        slot = msgspec.json.decode(slots or b"", type=list[_Window])[0]
    except (msgspec.DecodeError, RecursionError, IndexError):
        return None
    if slot.n_ctx < 1:
        return None
    return ContextWindow(slot.n_ctx, slot.n_ctx - _LONGEST_DRAFT * slot.speculative)


class _Tokenized(msgspec.Struct):
    tokens: list[msgspec.Raw]


def read_token_count(body: bytes) -> int | None:
    """Return the number of tokens in an answer of ``/tokenize``; None if it has none."""
    try:
        return len(msgspec.json.decode(body, type=_Tokenized).tokens)
    except msgspec.MsgspecError:
        return None
