"""Signals to stop, before there is anything that could be stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from llamasup.cli.process import Interrupted, StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    installed = StopSignals()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_whose_exception_is_swallowed_is_heard_by_the_first_who_listens(
    signals: StopSignals,
) -> None:
    with pytest.raises(Interrupted):  # as an import that clears whatever came up
        signal.raise_signal(signal.SIGTERM)
    heard: list[str] = []
    signals.deliver_to(heard.append)
    assert heard == ["SIGTERM"]
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["SIGTERM", "SIGTERM"]


def test_when_nobody_listens_any_more_a_signal_raises_again(signals: StopSignals) -> None:
    heard: list[str] = []
    signals.deliver_to(heard.append)
    signals.raise_again()
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)
    assert heard == []


def test_without_a_signal_nobody_hears_of_one(signals: StopSignals) -> None:
    heard: list[str] = []
    signals.deliver_to(heard.append)
    assert heard == []
    signals.stop("standard input ended")
    assert heard == ["standard input ended"]
    signals.end()
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["standard input ended"]
