"""Which log lines a bug report may contain: a log of b11434 with two requests, of which one is quoted."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.shareable_lines import shareable_lines
from tests.kit.paths import FIXTURES

FIXTURE = FIXTURES / "logs" / "requests-b11434.log"
LINES = FIXTURE.read_text().splitlines()
READY = next(number for number, line in enumerate(LINES) if line.endswith("model loaded"))
WORK = "0.09.000.000 I slot print_timing: id  0 | task 7 |    graphs reused =         31"
QUOTED = ("parse: error parsing grammar: expecting ::= at four", "", "root ::= secret three ", " and four")


def test_start_and_work_are_kept() -> None:
    text = "\n".join(shareable_lines(LINES, 1000))
    assert "build 0 (unknown) with GNU" in text
    assert "CPU compute buffer size =     9.58 MiB" in text
    assert "prompt eval time =       3.63 ms /    36 tokens" in text
    assert "stop processing: n_tokens = 40, truncated = 0" in text


def test_request_and_metadata_of_the_model_are_left_out() -> None:
    assert "root ::= secret three " in LINES
    text = "\n".join(shareable_lines(LINES, 1000))
    assert "secret" not in text
    assert "four" not in text
    assert "chat_template" not in text
    assert "How are you?" not in text  # the example of the chat template has no time stamps


def test_log_that_begins_in_the_middle_shows_only_work() -> None:
    lines = [*LINES[READY - 5 : READY], *QUOTED, "0.08.000.000 I srv  any: text of a request", WORK]
    assert shareable_lines(lines, 1000) == [WORK]


def test_next_process_starts_again() -> None:
    first = ["0.09.000.000 I srv  any: text of a request", WORK]
    assert shareable_lines([*first, *LINES[:3]], 1000) == [WORK, *LINES[:3]]
    assert shareable_lines(["no time stamp", *LINES[:1]], 9) == LINES[:1]


def test_quoted_request_ends_the_start() -> None:
    """Only ``wrap`` forwards requests to a server that loads."""
    quoted = "0.00.009.000 W srv  init: (CORS) skip secret origin"
    lines = [LINES[0], quoted, "0.00.009.500 I srv  any: another secret", WORK]
    assert shareable_lines(lines, 1000) == [LINES[0], WORK]


def test_trusted_error_at_the_end_is_kept() -> None:
    error = "0.09.500.000 E ggml: CUDA error: out of memory"
    assert shareable_lines([WORK, error], 1000) == [WORK, "ggml: CUDA error: out of memory"]


@pytest.mark.parametrize("most", [1, 7])
def test_only_the_last_lines_are_kept(most: int) -> None:
    everything = shareable_lines(LINES, 1000)
    assert shareable_lines(LINES, most) == everything[-most:]


def test_line_about_keys_is_left_out() -> None:
    keys = "0.00.002.700 I srv          init: api_keys: ****ame1"
    assert shareable_lines([LINES[0], keys, LINES[1]], 10) == LINES[:2]


def test_empty_log() -> None:
    assert shareable_lines([], 10) == []
