"""How a finished request is told to a person."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from llamasup.cli.narrator import Narrator
from llamasup.cli.view import View
from tests.runtime.test_metrics import DONE


class Heard:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, dict[str, Any]]] = []

    def say(self, level: str, event: str, text: str, **fields: Any) -> None:
        self.told.append((level, event, text, fields))


def told(**changes: Any) -> tuple[str, str, str, dict[str, Any]]:
    heard = Heard()
    narrator = Narrator(cast("View", heard), cast("Any", None), 0.0)
    left_out = changes.pop("left_out", None)
    record = msgspec.structs.replace(DONE, **changes)
    if left_out is None:
        narrator.request(record)
    else:
        narrator.slow_request(record, left_out)
    (only,) = heard.told
    return only


def test_a_request_is_one_line_and_all_its_facts_for_machines() -> None:
    level, event, text, fields = told()
    assert (level, event) == ("info", "request")
    assert text == "POST  /completion  200  10+5 tokens  50.0 tok/s  300 ms"
    assert fields == msgspec.structs.asdict(DONE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"status": 400, "context": "exceeded", "n_prompt_tokens": 5012, "n_ctx": 4096},
            "(context exceeded: 5,012 of 4,096 tokens)",
        ),
        ({"status": 400, "context": "exceeded"}, "(context exceeded)"),
        (
            {"context": "cut", "n_prompt_tokens": 12, "n_ctx": 4096},
            "(cut by the context's end at 4,096 tokens)",
        ),
        ({"context": "cut"}, "(cut by the context's end)"),
        ({"context": "shifted"}, "(context shifted: its beginning was forgotten)"),
        ({"outcome": "client_gone", "status": 499}, "(client gone)"),
        ({"replayed": True}, "(sent again)"),
    ],
)
def test_what_was_unusual_is_said_behind_it(changes: dict[str, Any], said: str) -> None:
    level, _, text, _ = told(**changes)
    assert level == "info"
    assert text.endswith(said)


@pytest.mark.parametrize("outcome", ["local", "ok"])
def test_what_llamasup_answered_itself_is_of_no_interest(outcome: str) -> None:
    assert told(model="", route="/metrics", outcome=outcome)[0] == "debug"


def test_a_failure_can_be_found_by_its_request_id() -> None:
    level, _, text, _ = told(status=502, outcome="upstream_failed", request_id="abc-1")
    assert level == "warning"
    assert text.endswith("(upstream failed) [abc-1]")


def test_a_slow_request_says_where_its_time_went() -> None:
    level, event, text, fields = told(
        queue_s=4.0, waited_s=3.9, first_byte_s=12.3, duration_s=45.2, left_out=0
    )
    assert (level, event) == ("warning", "slow_request")
    assert text == (
        "slow: POST /completion: 12.3 s to the first byte, 4.0 s in the queue (3.9 s waiting for the model) "
        "and 8.3 s in llama-server, 45.2 s in all, 10+5 tokens [r]"
    )
    assert fields["first_byte_s"] == 12.3


def test_a_slow_request_without_an_answer_says_so_and_how_many_were_left_out() -> None:
    _, _, text, fields = told(
        queue_s=30.0, first_byte_s=None, duration_s=30.0, tokens_completion=None, left_out=7
    )
    assert text == (
        "slow: POST /completion: no answer in 30.0 s, 30.0 s in the queue [r] "
        "(7 more since the last one told)"
    )
    assert fields["left_out"] == 7
