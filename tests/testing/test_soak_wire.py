"""How the soak judges answers (tests/real/soak_wire.py)."""

from __future__ import annotations

import pytest

from tests.real.soak_wire import Answer, Outcome, complete_text, outcome_of

EVENT = b'data: {"choices":[{"delta":{"content":"some"}}]}\n\n'
ERROR = b'data: {"error":{"message":"it died"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "whole", "outcome"),
    [
        (EVENT + DONE, True, Outcome.RIGHT),
        (EVENT, True, Outcome.LOST),  # it ends as a whole one does, and is none
        (EVENT, False, Outcome.LOST),  # broken off without a word
        (EVENT + ERROR, False, Outcome.CUT),
        (EVENT + ERROR, True, Outcome.LOST),
    ],
)
def test_a_stream_is_whole_or_tells_that_it_is_not(body: bytes, whole: bool, outcome: Outcome) -> None:
    answer = Answer(200, {"content-type": "text/event-stream"}, bytearray(body), whole)
    assert outcome_of(answer, complete_text(answer) == "some") is outcome


def test_answer_of_another_client_counts_as_lost() -> None:
    answer = Answer(200, {}, bytearray(b'{"content":"another"}'), whole=True)
    assert outcome_of(answer, complete_text(answer) == "some") is Outcome.LOST
