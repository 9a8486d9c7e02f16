"""Estimates what is in the prompt cache of a process from its earlier requests; never asks llama-server."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from llamasup.pool.replicas.conversation import Conversation

__all__ = ["MAX_MARKS", "PromptMarks"]

MAX_MARKS: Final = 4096
"""Marks of one process, in half a megabyte: two hundred conversations of twenty messages. That is more than
its caches hold (8 GiB by default, b11434: a GiB for 8,192 tokens of a model of 7 billion parameters).
"""


class PromptMarks:
    """The marks of one process, least recently used first. ``turn``: the number of its last request."""

    __slots__ = ("_marks", "turn")

    def __init__(self) -> None:
        self._marks: OrderedDict[int, None] = OrderedDict()
        self.turn = 0

    def __len__(self) -> int:
        return len(self._marks)

    def fit(self, conversation: Conversation | None) -> float:
        """The part of it, 0 to 1, that an earlier conversation began with."""
        if conversation is None or not self._marks:
            return 0.0
        for mark, size in zip(reversed(conversation.marks), reversed(conversation.sizes), strict=True):
            if mark in self._marks:
                return size / conversation.size
        return 0.0

    def add(self, conversation: Conversation | None, turn: int) -> None:
        self.turn = turn
        if conversation is None:
            return
        for mark in conversation.marks:
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > MAX_MARKS:
            self._marks.popitem(last=False)
