from __future__ import annotations

import pytest

from llamasup.features.batch.progress import Progress


@pytest.mark.parametrize(
    ("ended_here", "taken_s", "rates"),
    [(0, 2.0, (50.0, None)), (5, 2.0, (50.0, 6.0)), (5, 0.0, (100_000.0, 0.003))],
)
def test_rates_are_those_of_this_run(
    ended_here: int, taken_s: float, rates: tuple[float, float | None]
) -> None:
    progress = Progress(total=20, done=4, failed=1, ended_here=ended_here, tokens_completion=100, began_s=7.0)
    assert progress.left == 15
    assert progress.rates(7.0 + taken_s) == pytest.approx(rates)
