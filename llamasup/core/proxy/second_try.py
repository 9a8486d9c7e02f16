"""The one second attempt of a request whose answer is not usable, with another seed (``repair/answers.py``).

The exchange keeps its lease and its permit, so the second attempt does not wait in the queue. It never goes
to another llama-server: whatever ends it, the client gets the first answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from llamasup.core.http.chunks import Dechunker
from llamasup.core.http.sse import TAIL_BYTES, TokenCounts, read_token_counts
from llamasup.features.repair.answers import MAX_HELD, Checks, Fault, with_another_seed

_log = logging.getLogger("llamasup.proxy")


class AnswerHead(Protocol):
    """The answer that begins: of an upstream connection, or one that was held."""

    @property
    def status(self) -> int: ...

    @property
    def lines(self) -> bytes:
        """The header lines for the client."""
        ...

    @property
    def streams_events(self) -> bool: ...

    @property
    def complete(self) -> bool: ...

    def pause(self) -> None: ...

    def disable_keepalive(self) -> None: ...

    def abort(self) -> None: ...


class HeldAnswer(Struct):
    """An ``AnswerHead`` that has no connection any more once it is complete. ``body``: as framed."""

    status: int
    lines: bytes
    streams_events: bool
    framing: bytes | None
    body: bytes = b""
    complete: bool = True

    def content(self) -> bytes | None:
        """Its body without its framing; None: it is compressed."""
        if b"\r\ncontent-encoding:" in b"\r\n" + self.lines.lower():
            return None
        if self.framing is None or not self.framing.startswith(b"Transfer"):
            return self.body
        pieces: list[bytes] = []
        Dechunker(pieces.append).write(self.body)
        return b"".join(pieces)

    def pause(self) -> None:
        """Nothing more arrives."""

    def disable_keepalive(self) -> None:
        """It has no connection."""

    def abort(self) -> None:
        """It has no connection."""


class SecondTry:
    """What is known of the attempts of one request. ``held``: the answer that is held while it arrives.
    ``first``: the first answer, from the second attempt on. ``lost``: the token counts of the answer that the
    client does not get. ``is_over``: the answer of the client is chosen.
    """

    __slots__ = ("_checks", "_fault", "first", "held", "is_over", "lost")

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._fault: Fault | None = None  # of the first answer
        self.first: HeldAnswer | None = None
        self.held: HeldAnswer | None = None
        self.lost: TokenCounts | None = None
        self.is_over = False

    def __repr__(self) -> str:
        return f"<SecondTry of {self._checks.route}, fault {self._fault}, over: {self.is_over}>"

    @property
    def runs(self) -> bool:
        """Whether the request was sent again, and no byte of its second answer has gone to the client."""
        return self.first is not None and not self.is_over

    @property
    def what(self) -> str:
        """The fault, as metrics and the header name it."""
        assert self._fault is not None
        return self._fault.value

    def hold(self, head: AnswerHead, framing: bytes | None, beginning: bytes) -> bool:
        """Whether the answer that begins is held until its end."""
        if self.is_over:
            return False
        holds = self._checks.holds(head.status, beginning, is_stream=head.streams_events)
        if self.first is not None:
            # After an error, every other answer is better. Only JSON is checked a second time.
            is_error = head.status != 200 or (holds and head.streams_events)
            holds = is_error or self._fault is Fault.JSON
        if holds:
            self.held = HeldAnswer(head.status, head.lines, head.streams_events, framing)
        return holds

    def is_too_large(self, size: int) -> bool:
        """Whether an answer of which ``size`` bytes have arrived is held no longer."""
        return self.held is not None and size > MAX_HELD

    def complete(self, pieces: Sequence[bytes]) -> HeldAnswer:
        """The held answer has arrived; ``pieces``: its body."""
        held, self.held = self.held, None
        assert held is not None
        held.body = b"".join(pieces)
        return held

    def fault_of(self, held: HeldAnswer) -> Fault | None:
        """What is wrong with a complete answer."""
        try:
            content = held.content()
            if content is None:
                return None
            return self._checks.fault(held.status, content, is_stream=held.streams_events)
        except Exception:  # without this, the client would get no answer
            _log.exception("the check of an answer has failed; it is forwarded unchecked")
            return None

    def again(self, held: HeldAnswer, fault: Fault, body: bytes, request_id: bytes) -> bytes | None:
        """Begin the second attempt; returns its body. None: the body cannot be read."""
        second = with_another_seed(body, request_id)
        if second is not None:
            self.first, self._fault, self.lost = held, fault, _counts_of(held)
        return second

    def give_up(self, held: HeldAnswer) -> None:
        """The client gets neither this answer nor a second one."""
        self.is_over, self.lost = True, _counts_of(held)

    def is_good(self, held: HeldAnswer) -> bool:
        """Whether the client gets this second answer."""
        if self._fault is not Fault.JSON or held.status != 200:
            return False  # it is an error
        try:
            content = held.content()
            return content is not None and self._checks.is_right(content)
        except Exception:
            _log.exception("the check of a second answer has failed; the first one is forwarded")
            return False

    def give_first(self, second: HeldAnswer | None = None) -> HeldAnswer:
        """Choose the first answer, because the ``second`` one is no better, or did not arrive."""
        first, self.held, self.is_over = self.first, None, True
        assert first is not None
        self.lost = None if second is None else _counts_of(second)
        return first

    def total(self, counts: TokenCounts | None) -> TokenCounts | None:
        """The token counts of all attempts; ``counts``: those of the client's answer."""
        lost = self.lost
        if lost is None or counts is None:
            return counts if lost is None else lost
        return TokenCounts(
            _sum(counts.prompt, lost.prompt),
            _sum(counts.cached, lost.cached),
            _sum(counts.completion, lost.completion),
            counts.tokens_per_s,
        )


def _counts_of(answer: HeldAnswer) -> TokenCounts | None:
    # /completion writes the counts before the probabilities of n_probs (b11434).
    content = answer.content() or b""
    return read_token_counts(content[-TAIL_BYTES:]) or read_token_counts(content)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one + (other or 0)
