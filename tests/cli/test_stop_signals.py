"""Signals that stop llamasup, also before it has anything to stop."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from llamasup.cli import interruptible
from llamasup.cli.stop_signals import Interrupted, StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    hook = sys.unraisablehook
    installed = StopSignals()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook


def test_signal_in_a_callback_reaches_first_listener_without_a_traceback(
    signals: StopSignals, capfd: pytest.CaptureFixture[str]
) -> None:
    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    Deleted()  # Python cannot raise exceptions here, as in the callbacks of imports
    received: list[str] = []
    signals.deliver_to(received.append)
    assert received == ["SIGTERM"]
    assert capfd.readouterr().err == ""


def test_signal_with_swallowed_exception_reaches_first_listener(
    signals: StopSignals,
) -> None:
    with pytest.raises(Interrupted):  # as an import that swallows exceptions
        signal.raise_signal(signal.SIGTERM)
    received: list[str] = []
    signals.deliver_to(received.append)
    assert received == ["SIGTERM"]
    signal.raise_signal(signal.SIGTERM)
    assert received == ["SIGTERM", "SIGTERM"]


def test_signal_without_listener_raises_again(signals: StopSignals) -> None:
    received: list[str] = []
    signals.deliver_to(received.append)
    signals.raise_again()
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)
    assert received == []


def test_listener_receives_stop_reason_until_the_end(signals: StopSignals) -> None:
    received: list[str] = []
    signals.deliver_to(received.append)
    assert received == []
    signals.stop("standard input ended")
    assert received == ["standard input ended"]
    signals.end()
    signal.raise_signal(signal.SIGTERM)
    assert received == ["standard input ended"]


@pytest.mark.parametrize("pauses", [True, False])
def test_signal_within_work_that_cannot_be_interrupted_ends_it_at_its_next_pause(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    monkeypatch.setattr(interruptible, "STOP_SIGNALS", signals)
    done = []
    with pytest.raises(Interrupted) as raised, interruptible.interruptible_at_pauses() as pause:
        pause(0.0)
        signal.raise_signal(signal.SIGTERM)
        done.append("the work")
        if pauses:
            pause(0.0)
            done.append("more")
    assert raised.value.signal_number == signal.SIGTERM
    assert done == ["the work"]
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)


def test_second_signal_within_such_work_ends_the_process(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruptible, "STOP_SIGNALS", signals)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(Interrupted), interruptible.interruptible_at_pauses():
        signal.raise_signal(signal.SIGINT)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
        assert codes == [130]
