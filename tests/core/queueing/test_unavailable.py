"""What a refused client reads about the wait."""

from __future__ import annotations

import pytest

from llamasup.core.queueing.unavailable import Unavailable


@pytest.mark.parametrize(
    ("percent", "eta_s", "message"),
    [
        (43.2, 12.3, "Loading model; 43 % loaded, about 12 s left"),
        (None, 12.3, "Loading model"),
        (43.2, None, "Loading model"),
    ],
)
def test_message_says_how_far_a_load_is(percent: float | None, eta_s: float | None, message: str) -> None:
    why = Unavailable(503, "Loading model", cause="loading", percent=percent, eta_s=eta_s)
    assert why.as_error().message == message
    assert (why.as_error().percent, why.as_error().eta_s) == (percent, eta_s)


def test_health_check_gets_the_message_of_llama_server() -> None:
    why = Unavailable(503, "Loading model", cause="loading", percent=43.2, eta_s=12.3)
    assert why.as_health().message == "Loading model"
    assert (why.as_health().percent, why.as_health().eta_s) == (43.2, 12.3)
