"""What a llama-server says of its own work, read from ``/slots`` and ``/metrics``.

A fact, not a verdict: ``core.liveness`` decides what it means. Every field is optional, since builds differ:

- ``is_processing`` is a number called ``state`` until September 2024 (0: idle);
- ``next_token`` is an object or a list of one;
- ``n_prompt_tokens_processed`` is missing until autumn 2025; it moves once per batch (2,048
  tokens by default), not per token (b11434), and so does ``llamacpp:n_decode_total``;
- builds before #27041 answer neither while a batch is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

import msgspec

__all__ = ["ServerWork", "read_server_work"]

_TOTAL = re.compile(rb"^llamacpp:\w+_total(?:\{[^}]*\})? +(\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE)
_NOTHING: Mapping[str, int] = MappingProxyType({})
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class ServerWork:
    """``tokens``: what each request in a slot has come to, prompt and answer, by slot and task.

    ``prefilling``: whether one of them is still at its prompt (None: nothing is known of the slots).
    ``total``: the sum of the server's counters, which only grow.
    """

    tokens: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    prefilling: bool | None = None
    total: float | None = None


class _NextToken(msgspec.Struct):
    n_decoded: _Count = 0


class _Slot(msgspec.Struct):
    id: int = 0
    id_task: int = 0
    state: int = 0
    is_processing: bool | None = None
    n_prompt_tokens_processed: _Count = 0
    next_token: list[_NextToken] | _NextToken = msgspec.field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return self.state != 0 if self.is_processing is None else self.is_processing

    @property
    def decoded(self) -> int:
        each = self.next_token if isinstance(self.next_token, list) else [self.next_token]
        return sum(token.n_decoded for token in each)


def read_server_work(slots: bytes | None, metrics: bytes | None) -> ServerWork:
    """The bodies of ``/slots`` and ``/metrics``; None or nonsense where the server gave none."""
    tokens: Mapping[str, int] = _NOTHING
    prefilling: bool | None = None
    try:
        busy = [slot for slot in msgspec.json.decode(slots or b"", type=list[_Slot]) if slot.is_busy]
    except (msgspec.DecodeError, RecursionError):  # the second: brackets in brackets in brackets
        pass
    else:
        tokens = {f"{slot.id}/{slot.id_task}": slot.n_prompt_tokens_processed + slot.decoded for slot in busy}
        prefilling = any(slot.decoded == 0 for slot in busy)
    totals = _TOTAL.findall(metrics or b"")
    return ServerWork(tokens, prefilling, sum(map(float, totals)) if totals else None)
