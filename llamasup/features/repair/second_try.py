"""The one second attempt of a request whose answer is not usable, with another seed (``answers.py``).

The exchange keeps its lease and its permit, so the second attempt does not wait in the queue. It never goes
to another llama-server: whatever ends it, the client gets the first answer.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from msgspec import Struct

from llamasup.core.http.chunks import Dechunker, is_chunked
from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import CHATS, RESPONSES
from llamasup.core.llama_server.token_counts import TAIL_BYTES, TokenCounts, read_token_counts
from llamasup.core.observability.counters import Metrics
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead, Attempt, Between
from llamasup.core.settings.model import Repairs
from llamasup.features.repair.answers import MAX_HELD, Checks, Fault, checks_for, with_another_seed
from llamasup.features.repair.history import with_valid_arguments

_log = logging.getLogger("llamasup.proxy")

_CONVERSATIONS: Final = CHATS | RESPONSES  # their bodies may have earlier tool calls
_SCHEMA_IGNORED: Final = HttpError(
    400,
    "llama-server has ignored the JSON schema, because it cannot use it",
    cause="schema_ignored",
    remedy="remove keywords such as not, oneOf and uniqueItems from it, or use /v1/chat/completions",
)
_TOO_LARGE: Final = HttpError(502, "the second answer is too large to check it")  # the client gets the first


def repair(request: Request, repairs: Repairs, metrics: Metrics) -> None:
    """Make the tool calls of a conversation valid, which llama-server would refuse, and decide which checks
    its answer has to pass.
    """
    label = request.head.route.label
    if repairs.tool_calls and label in _CONVERSATIONS:
        body = with_valid_arguments(request.body)
        if body is not None:
            request.body = body
            request.mark_repaired("arguments")
            assert request.model_route is not None
            metrics.count_repaired(request.counted_as or request.model_route.model.id, "arguments")
    # A batch decides itself what it requests a second time. Of several answers, most may be good.
    if request.needs_permit and request.jobs == 1 and not request.is_batch:
        checks = checks_for(repairs, label, request.body)
        request.holder = None if checks is None else SecondTry(checks, request, metrics)


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
        if not is_chunked(self.framing):
            return self.body
        pieces: list[bytes] = []
        Dechunker(pieces.append).write(self.body)
        return b"".join(pieces)


class SecondTry(Between):
    """The stage that holds the answers of one request, and decides which one the client gets."""

    __slots__ = ("_checks", "_fault", "_first", "_held", "_is_over", "_lost", "_metrics", "_request")

    def __init__(self, checks: Checks, request: Request, metrics: Metrics) -> None:
        self._checks = checks
        self._request = request
        self._metrics = metrics
        self._fault: Fault | None = None  # of the first answer
        self._first: HeldAnswer | None = None  # from the second attempt on
        self._held: HeldAnswer | None = None  # the answer that is held while it arrives
        self._lost: TokenCounts | None = None  # of the answer that the client does not get
        self._is_over = False  # the answer of the client is chosen

    def __repr__(self) -> str:
        return f"<SecondTry of {self._checks.route}, fault {self._fault}, over: {self._is_over}>"

    @property
    def _runs(self) -> bool:
        """Whether no byte of the second answer has gone to the client yet."""
        return self._first is not None and not self._is_over

    # --- while an answer arrives

    def holds(self, attempt: Attempt, head: AnswerHead, framing: bytes | None, body: bytes) -> bool:
        """Whether the answer is held. Another node decides that itself."""
        self._held = None  # of a server that has ended
        if attempt.endpoint.node is not None or attempt.is_uploaded:
            return False
        if not self._is_over and self._is_held(head, body):
            self._held = HeldAnswer(head.status, head.lines, head.streams_events, framing)
            attempt.hold(body, partial(self._more, attempt, head))
            return True
        if self._runs:
            self._take_second(attempt)
        return False

    def _is_held(self, head: AnswerHead, beginning: bytes) -> bool:
        holds = self._checks.holds(head.status, beginning, is_stream=head.streams_events)
        if self._first is None:
            return holds
        # After an error, every other answer is better. Only JSON is checked a second time.
        is_error = head.status != 200 or (holds and head.streams_events)
        return is_error or self._fault is Fault.JSON

    def _more(self, attempt: Attempt, head: AnswerHead, _data: bytes) -> None:
        """More of a held answer has arrived. A first one that is too large is forwarded as it comes."""
        if self._held is None or attempt.bytes_out <= MAX_HELD:
            return
        if self._runs:
            attempt.end_soon("upstream_failed", _TOO_LARGE)
            return
        self._is_over = True
        attempt.begin(head, self._held.framing, b"".join(attempt.tail))

    # --- when it is complete

    def release(self, attempt: Attempt) -> bool:
        answer, self._held = self._held, None
        assert answer is not None
        answer.body = b"".join(attempt.tail)
        if self._first is None:
            fault = self._fault_of(answer)
            if fault is not None and not fault.may_change:
                self._refuse_schema(attempt, answer, fault)
                return False
            stops = attempt.endpoint.closed or attempt.is_draining
            if fault is not None and not stops and self._send_again(attempt, answer, fault):
                return False
            self._is_over = True
        elif self._is_good(answer):
            self._take_second(attempt)
        else:
            attempt.endpoint.count_answer(answer.status, infers=True)
            answer = self._take_first(attempt, answer)
        attempt.begin(answer, answer.framing, answer.body)
        return True

    def _fault_of(self, held: HeldAnswer) -> Fault | None:
        """Find what is wrong with a complete answer."""
        try:
            content = held.content()
            if content is None:
                return None
            return self._checks.fault(held.status, content, is_stream=held.streams_events)
        except Exception:  # without this, the client would get no answer
            _log.exception("the check of an answer has failed; it is forwarded unchecked")
            return None

    def _is_good(self, held: HeldAnswer) -> bool:
        """Whether the client gets this second answer."""
        if self._fault is not Fault.JSON or held.status != 200:
            return False  # it is an error
        try:
            content = held.content()
            return content is not None and self._checks.is_right(content)
        except Exception:
            _log.exception("the check of a second answer has failed; the first one is forwarded")
            return False

    def _send_again(self, attempt: Attempt, answer: HeldAnswer, fault: Fault) -> bool:
        """Begin the second attempt. False: the body cannot be read."""
        second = with_another_seed(self._request.body, self._request.id)
        if second is None:
            return False
        self._first, self._fault, self._lost = answer, fault, _counts_of(answer)
        self._request.body = second
        attempt.send_again()
        return True

    def _refuse_schema(self, attempt: Attempt, answer: HeldAnswer, fault: Fault) -> None:
        """The client gets neither this answer nor a second one."""
        attempt.endpoint.count_answer(answer.status, infers=True)
        self._is_over, self._lost = True, _counts_of(answer)
        self._request.mark_unrepaired(fault.value)
        self._metrics.count_repaired(attempt.counted_as, fault.value)
        attempt.fail(_SCHEMA_IGNORED, "upstream_failed")

    # --- which one the client gets

    def _take_second(self, attempt: Attempt) -> None:
        assert self._first is not None
        assert self._fault is not None
        self._is_over = True
        attempt.endpoint.count_answer(self._first.status, infers=True)
        self._request.mark_repaired(self._fault.value)
        self._metrics.count_repaired(attempt.counted_as, self._fault.value)

    def _take_first(self, attempt: Attempt, second: HeldAnswer | None = None) -> HeldAnswer:
        """Choose the first answer, because the ``second`` one is no better, or did not arrive."""
        assert self._first is not None
        assert self._fault is not None
        what = f"{self._fault.value}_failed"
        self._request.mark_unrepaired(what)
        self._metrics.count_repaired(attempt.counted_as, what)
        self._held, self._is_over = None, True
        self._lost = None if second is None else _counts_of(second)
        return self._first

    def rescue(self, attempt: Attempt) -> None:
        first = self._take_first(attempt)
        attempt.begin(first, first.framing, first.body)

    def total(self, counts: TokenCounts | None) -> TokenCounts | None:
        lost = self._lost
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
