"""The permits of a request where all slots share one context."""

from __future__ import annotations

import pytest

from llamasup.core.queueing.shared_context import permits_for, prompt_tokens

SHARE = 8192  # tokens for each slot


@pytest.mark.parametrize(
    ("body_bytes", "answer_bytes", "permits"),
    [
        (0, 0, 1),
        (1000, 0, 1),
        (3 * SHARE, 0, 1),  # three quarters of the share, and a quarter for the answer
        (3 * SHARE + 4, 0, 2),
        (100_000, 0, 4),  # the first prompt of an agent: 25,000 tokens
        (1000, 200 * SHARE - 200_000, 1),
        (1000, 200 * SHARE, 2),  # its answer has become as long as the share
        (0, 200 * SHARE * 3, 3),
        (2 * SHARE, 200 * SHARE // 2, 1),
        (2 * SHARE, 200 * SHARE // 2 + 200, 2),  # half of the share is the prompt
    ],
)
def test_long_request_takes_the_permits_of_several_slots(
    body_bytes: int, answer_bytes: int, permits: int
) -> None:
    assert permits_for(prompt_tokens(b"x" * body_bytes), answer_bytes, SHARE) == permits


def test_image_takes_few_tokens_for_its_bytes() -> None:
    image = b'{"url":"data:image/png;base64,' + b"A" * 1_000_000 + b'"}'
    assert prompt_tokens(image) == 0
    assert prompt_tokens(image.replace(b";base64,", b"")) > 4 * SHARE
