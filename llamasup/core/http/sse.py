"""Reads token counts from the beginning and the end of a response, and writes the error event of a stream.

``proxy/exchange.py`` sends that event when a stream breaks off.

llama-server puts ``usage`` and ``timings`` last in most plain answers and in the last events of a stream,
and ``usage`` first in answers of embeddings and reranking. ``usage`` is the count of OpenAI or Anthropic;
``timings`` is llama-server's own, with the speed. Chunk framing can split the numbers and is removed first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec

TAIL_BYTES = (
    8192  # the last event of a chat with timings is below 1 KiB, of /completion about 3 KiB plus the prompt
)


class TokenCounts(msgspec.Struct, frozen=True):
    """The tokens that a response reports; None if it does not. ``prompt`` includes cached tokens."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    tokens_per_s: float | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class _Timings(msgspec.Struct):
    """The complete timings of llama-server (b11434), read at a third of the cost of the search."""

    cache_n: _Count
    prompt_n: _Count
    predicted_n: _Count
    predicted_per_second: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]


_read_timings = msgspec.json.Decoder(_Timings).decode
_USAGE = b'"usage":'
_TIMINGS = b'"timings":'
FRAMING = re.compile(rb"\r\n(?:[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n)?")  # JSON has no raw CR: this is framing
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


class _Refusal(msgspec.Struct):
    error: dict[str, Any]


_read_refusal = msgspec.json.Decoder(_Refusal).decode


def error_of(status: int, body: bytes) -> bytes:
    """Return llama-server's own error as an error body of one line, for a stream that got an error.

    If ``body`` is not an error, the message names ``status``.
    """
    try:
        error = _read_refusal(body).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        message = f"llama-server answered with status {status} instead of a stream"
        error = {"message": message, "type": "server_error", "code": status}
    return msgspec.json.encode({"error": error})


NAMED_EVENTS = (b"/v1/messages", b"/v1/responses", b"/responses")  # these APIs name their events


def error_event(path: bytes, error: bytes) -> bytes:
    """Return the event that ends a broken stream. ``error`` is an error body, ``{"error":{…}}``."""
    if path in NAMED_EVENTS:
        return b'event: error\ndata: {"type":"error",' + error[1:] + b"\n\n"
    return b"data: " + error + b"\n\n"
