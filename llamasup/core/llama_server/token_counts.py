"""Reads the token counts that llama-server reports, at the end of an answer or while it passes, and whether
the context ended it.

llama-server puts ``usage`` and ``timings`` last in most plain answers and in the last events of a stream,
and ``usage`` first in answers of embeddings and reranking. ``usage`` is the count of OpenAI or Anthropic;
``timings`` is llama-server's own, with the speed. Chunk framing can split the numbers and is removed first.

``read_token_counts`` reads the counts once, at the end. ``TokenMeter`` reads them at any position and for
every item: for requests of several items and for keys with ``tpm``. llama-server (b11434) reports counts for
each item of a stream and of a plain answer of ``/completion``, but only for the first item of a plain answer
of the OpenAI APIs.

``context_end`` detects answers that ended because of the context size: refused, cut short, or shifted.
llama-server reports only refusals clearly (b11434, both runtimes). Only ``/completion`` has
``"truncated":true``; answers of the other APIs end as if they had reached ``max_tokens``. Such an answer was
cut if prompt and answer together fill the slot. With a draft, it ends up to a draft's length before that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from llamasup.core.http.sse import FRAMING, NAMED_EVENTS
from llamasup.core.llama_server.answers import ContextWindow, Failed, Timings

TAIL_BYTES = (
    8192  # the last event of a chat with timings is below 1 KiB, of /completion about 3 KiB plus the prompt
)


class TokenCounts(msgspec.Struct, frozen=True):
    """The tokens that a response reports; None if it does not. ``prompt`` includes cached tokens."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    tokens_per_s: float | None = None


_read_timings = msgspec.json.Decoder(Timings).decode
_USAGE = b'"usage":'
_TIMINGS = b'"timings":'
_MAX_COUNT = 1e15  # more than any count; 1e999 would not be a whole number
_NUMBER = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|input_tokens|output_tokens|cache_read_input_tokens'
    rb'|prompt_n|cache_n|predicted_n|predicted_per_second)"\s*:\s*([0-9][0-9.eE+-]*)'
)


def read_token_counts(tail: bytes, opening: bytes = b"") -> TokenCounts | None:
    """Return the counts in the last bytes of a response, in any of llama-server's shapes.

    Returns None if there are none.

    ``opening``: the first bytes, with the prompt count of a ``/v1/messages`` stream, and with all counts of
    embeddings. A quote inside a model's text is escaped, so ``"usage":`` can only be the key itself.
    """
    at = tail.rfind(_TIMINGS)
    if at >= 0:
        try:
            exact = _read_timings(tail[at + len(_TIMINGS) : tail.find(b"}", at) + 1])
        except msgspec.DecodeError:
            pass  # of another build, or with a chunk's framing in it
        else:
            cached = exact.cache_n
            return TokenCounts(cached + exact.prompt_n, cached, exact.predicted_n, exact.predicted_per_second)
    if b"\r\n" in tail:
        tail = FRAMING.sub(b"", tail)
    usage, timings = tail.rfind(_USAGE), tail.rfind(_TIMINGS)
    found = _numbers(tail, min(usage, timings) if min(usage, timings) >= 0 else max(usage, timings))
    if opening and b"input_tokens" not in found:
        found = _numbers(opening, opening.find(_USAGE)) | found
    counts = _counts_of(found)
    return None if counts.prompt is None and counts.completion is None else counts


def counts_in(counts: bytes) -> TokenCounts:
    """Return the counts in one complete object ``usage`` or ``timings``."""
    return _counts_of(_numbers(counts, 0))


def _counts_of(found: dict[bytes, float]) -> TokenCounts:
    cached_n = _first(found, b"cache_n", b"cached_tokens", b"cache_read_input_tokens")
    prompt = _first(found, b"prompt_tokens", b"input_tokens")
    if prompt is None and (evaluated := _first(found, b"prompt_n")) is not None:
        prompt = evaluated + (cached_n or 0)  # prompt_n counts only what was evaluated
    elif prompt is not None and b"cache_read_input_tokens" in found:
        prompt += cached_n or 0  # Anthropic's input_tokens do not include cached tokens
    completion = _first(found, b"predicted_n", b"completion_tokens", b"output_tokens")
    return TokenCounts(prompt, cached_n, completion, found.get(b"predicted_per_second"))


def _numbers(piece: bytes, start: int) -> dict[bytes, float]:
    found: dict[bytes, float] = {}
    if start >= 0:
        for name, digits in _NUMBER.findall(piece, start):
            with suppress(ValueError):
                if (number := float(digits)) < _MAX_COUNT:
                    found[name] = number
    return found


def _first(found: dict[bytes, float], *names: bytes) -> int | None:
    for name in names:
        if name in found:
            return int(found[name])
    return None


def tail_of(pieces: Sequence[bytes]) -> bytes:
    """Return the last ``TAIL_BYTES`` of a response that ends with ``pieces``."""
    tail = b""
    for piece in reversed(pieces):
        if len(tail) >= TAIL_BYTES:
            break
        tail = piece[-TAIL_BYTES:] + tail
    return tail[-TAIL_BYTES:]


# --- while an answer passes ----------------------------------------------------------------------

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


class _Item(msgspec.Struct):
    """The counts of one item. ``prompt`` includes cached tokens."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


class TokenMeter(msgspec.Struct, eq=False):
    """Counts the tokens of one answer.

    ``label``: of the route. ``streams``: the answer is a stream; ``events`` counts its events, about one
    per token.
    """

    label: str
    streams: bool
    events: int = 0
    tokens_per_s: float | None = None
    _adds_up: bool = False  # ``index`` is that of a block, not of an item
    _items: dict[int, _Item] = {}
    _seen: int = 1  # items, by their indices
    _at: int = 0
    _awaits_index: bool = True
    _before: bytes = b""  # the last events without counts: their index applies to the counts that follow
    _rest: bytes = b""

    def __post_init__(self) -> None:
        self._adds_up = self.label.encode() in NAMED_EVENTS

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


# --- the end by the context ------------------------------------------------------------------------


class ContextEnd(msgspec.Struct, frozen=True):
    """The end of an answer by its context.

    ``kind``: ``exceeded`` (refused: the prompt alone is too long), ``cut`` (the answer ends where the
    context ends), ``shifted`` (with ``--context-shift`` it went on, and the beginning was dropped).
    """

    kind: str
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


# The message if all requests together have filled a shared cache (--kv-unified).
SHARED_FULL: Final = "Context size has been exceeded."
_SHARED_FULL_KEY = b'"message":"' + SHARED_FULL.encode() + b'"'


def is_shared_full(body: bytes) -> bool:
    """Return whether this is the error of requests that have filled a shared context together."""
    return _SHARED_FULL_KEY in body


def context_refusal(body: bytes) -> ContextEnd | None:
    """Return the refusal in the complete ``body`` of an error response.

    Returns None if it is not about the context.
    """
    if b"xceed" not in body:  # nearly every refusal is about something else
        return None
    try:
        error = msgspec.json.decode(body, type=Failed).error
    except (msgspec.DecodeError, RecursionError):
        return None
    if error.type == "exceed_context_size_error":
        return ContextEnd("exceeded", error.n_prompt_tokens, error.n_ctx)
    return ContextEnd("exceeded") if error.message == SHARED_FULL else None


# A quote inside a model's text is escaped, so these can only be the keys themselves.
_ENDED_BY_ITSELF = re.compile(
    rb'"(?:finish_reason|stop_type|stop_reason)":"(?!length|limit|max_tokens)[a-z_]+"'
)
_TRUNCATED = b'"truncated":true'


def context_end(tail: bytes, counts: TokenCounts | None, window: ContextWindow | None) -> ContextEnd | None:
    """Return how the context ended an answer with these last bytes.

    None for nearly all, after one comparison.
    """
    if counts is None:
        return ContextEnd("cut") if _SHARED_FULL_KEY in tail else None
    if window is None:
        return ContextEnd("cut") if _TRUNCATED in tail else None
    if counts.prompt is None or counts.completion is None:
        return None
    total = counts.prompt + counts.completion
    if total < window.full_from:
        return None
    if total > window.n_ctx:
        return ContextEnd("shifted", counts.prompt, window.n_ctx)
    if _ENDED_BY_ITSELF.search(tail):
        return None
    return ContextEnd("cut", counts.prompt, window.n_ctx)
