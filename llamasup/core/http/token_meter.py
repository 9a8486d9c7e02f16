"""Reads the token counts of an answer while it passes, at any position and for every item.

For requests of several items and for keys with ``tpm``. For all others, ``http.sse`` reads the counts once,
at the end. llama-server (b11434) reports counts for each item of a stream and of a plain answer of
``/completion``, but only for the first item of a plain answer of the OpenAI APIs.
"""

from __future__ import annotations

import re
from typing import Final

from llamasup.core.http.sse import FRAMING, NAMED_EVENTS, TokenCounts, counts_in

_CARRIED_BYTES: Final = 2048  # from one read to the next: more than the longest object of counts
_MAX_ITEMS: Final = 4096  # with separate counts; all further items share one

# A quote inside a string is escaped, so this matches only keys.
_REPORTED = re.compile(
    rb'"(?:index"\s*:\s*(?P<index>\d{1,9})[,}\s]'
    rb'|(?P<usage>usage|timings)"\s*:\s*(?P<counts>\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})'
    rb'|tokens_(?P<which>evaluated|predicted)"\s*:\s*(?P<number>\d{1,15})[,}\s])'
)
_EVENT = b"data: {"
_EVENT_ENDS = (b"\n\n\r\n", b"\n\n")


class _Item:
    """The counts of one item. ``prompt`` includes cached tokens."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.cached: int | None = None
        self.completion: int | None = None


class TokenMeter:
    """Counts the tokens of one answer.

    ``label``: of the route. ``streams``: the answer is a stream; ``events`` counts its events, about one
    per token.
    """

    __slots__ = (
        "_adds_up",
        "_at",
        "_awaits_index",
        "_before",
        "_items",
        "_rest",
        "_seen",
        "events",
        "streams",
        "tokens_per_s",
    )

    def __init__(self, label: str, *, streams: bool) -> None:
        self.streams = streams
        self._adds_up = label.encode() in NAMED_EVENTS  # there, ``index`` is that of a block, not of an item
        self._items: dict[int, _Item] = {}
        self._seen = 1  # items, by their indices
        self._at = 0
        self._awaits_index = True
        self._before = b""  # the last events without counts: their index applies to the counts that follow
        self._rest = b""
        self.events = 0
        self.tokens_per_s: float | None = None

    def read(self, piece: bytes) -> None:
        """Read the next bytes of the answer, with their chunk framing."""
        if (
            self.streams
            and not self._rest
            and piece.endswith(_EVENT_ENDS)
            and not (b'"usage"' in piece or b'"timings"' in piece or b'"tokens_' in piece)
        ):
            self.events += piece.count(_EVENT)
            self._before = piece
            return
        if self._before:
            before, self._before = self._before, b""
            self._read_events(before)
        answer = self._rest + piece
        if b"\r\n" in answer:
            answer = FRAMING.sub(b"", answer)
        if self.streams:
            self.events += answer.count(_EVENT)
        end = self._read_events(answer)
        self._rest = b"" if answer.endswith(b"\n\n") else answer[max(end, len(answer) - _CARRIED_BYTES) :]

    @property
    def items(self) -> int:
        return max(self._seen, len(self._items))

    @property
    def prompts_reported(self) -> int:
        """The number of items that have reported their prompt tokens."""
        return sum(item.prompt is not None for item in self._items.values())

    @property
    def items_reported(self) -> int:
        """The number of items that have reported their completion tokens."""
        return sum(item.completion is not None for item in self._items.values())

    def counts(self) -> TokenCounts | None:
        """Return the counts reported so far, summed over all items."""
        items = self._items.values()
        prompts = [item.prompt for item in items if item.prompt is not None]
        completions = [item.completion for item in items if item.completion is not None]
        if not prompts and not completions:
            return None
        cached = [item.cached for item in items if item.cached is not None]
        return TokenCounts(
            sum(prompts) if prompts else None,
            sum(cached) if cached else None,
            sum(completions) if completions else None,
            self.tokens_per_s,
        )

    def _read_events(self, answer: bytes) -> int:
        """Read counts and indices; returns the position behind the last of them."""
        begin = end = 0
        while begin >= 0:
            after = answer.find(_EVENT, begin) if self.streams else -1
            for found in _REPORTED.finditer(answer, begin, len(answer) if after < 0 else after):
                end = found.end()
                self._take(found)
            if after >= 0:
                self._awaits_index = True
                end = after + len(_EVENT)
                begin = end
            else:
                begin = -1
        return end

    def _take(self, found: re.Match[bytes]) -> None:
        kind = found.lastgroup
        if kind == "index":
            # The first index of an event is that of the item; a later one may be that of a tool call.
            if self._adds_up or (self.streams and not self._awaits_index):
                return
            self._awaits_index = False
            self._at = min(int(found["index"]), _MAX_ITEMS)
            self._seen = max(self._seen, self._at + 1)
        elif kind == "number":
            item = self._items.setdefault(self._at, _Item())
            if found["which"] == b"evaluated":
                item.prompt = int(found["number"])
            else:
                item.completion = int(found["number"])
        else:
            self._take_counts(found["usage"], found["counts"])

    def _take_counts(self, kind: bytes, counts: bytes) -> None:
        found = counts_in(counts)
        prompt, cached, completion = found.prompt, found.cached, found.completion
        item = self._items.setdefault(self._at, _Item())
        if kind == b"timings":
            self.tokens_per_s = self.tokens_per_s if found.tokens_per_s is None else found.tokens_per_s
            if not self._adds_up and completion is not None and prompt is not None:
                item.prompt, item.cached, item.completion = prompt, cached or 0, completion
        elif self._adds_up:
            item.prompt = _sum(item.prompt, prompt)
            item.cached = _sum(item.cached, cached)
            item.completion = _sum(item.completion, completion)
        else:
            item.prompt = item.prompt if prompt is None else prompt
            item.cached = item.cached if cached is None else cached
            item.completion = item.completion if completion is None else completion


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else (one or 0) + other
