"""The verdicts of the soak about answers (tests/extended/soak/soak_wire.py)."""

from __future__ import annotations

import pytest

from tests.extended.soak.soak_wire import Answer, Outcome, complete_text, outcome_of

EVENT = b'data: {"choices":[{"delta":{"content":"some"}}]}\n\n'
ERROR = b'data: {"error":{"message":"it died"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "whole", "outcome"),
    [
        (EVENT + DONE, True, Outcome.RIGHT),
        (EVENT, True, Outcome.LOST),  # ends like a complete stream, but is incomplete
        (EVENT, False, Outcome.LOST),  # cut without an error event
        (EVENT + ERROR, False, Outcome.CUT),
        (EVENT + ERROR, True, Outcome.LOST),
    ],
)
def test_stream_must_be_complete_or_end_with_an_error_event(
    body: bytes, whole: bool, outcome: Outcome
) -> None:
    answer = Answer(200, {"content-type": "text/event-stream"}, bytearray(body), whole)
    assert outcome_of(answer, complete_text(answer) == "some") is outcome


def test_answer_of_another_client_counts_as_lost() -> None:
    answer = Answer(200, {}, bytearray(b'{"content":"another"}'), whole=True)
    assert outcome_of(answer, complete_text(answer) == "some") is Outcome.LOST
