"""What systemd is told of the service: what happened in, the assignments of sd_notify(3) out.

Decides words and moments; sends nothing. READY=1 is said once a real token has come, and again at the end of
a reload. Between the two the model may crash and come back: for systemd the service stays active, since
llamasup itself lives and requests wait; STATUS= is where a person sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamasup.core.diagnosis import Diagnosis
from llamasup.core.instance import State

__all__ = [
    "EXTENSION_S",
    "ServiceStatus",
    "beat",
    "exited",
    "reloaded",
    "reloading",
    "serving",
    "state_changed",
    "stopping",
]

EXTENSION_S = 60.0
"""How much time each beat of a starting service asks for. A load takes as long as it takes while it
progresses (S6), and a load that does not is ended by llamasup itself: what systemd bounds is a loop that
stands still."""

Messages = tuple[str, ...]

_STEPS = {
    State.STARTING: "starting llama-server for {model}",
    State.LOADING: "loading {model}",
    State.WARMING: "waiting for the first token of {model}",
}

_IN_WORDS = {"out_of_memory_host": "out of memory", "out_of_memory_device": "out of device memory"}


_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What systemd has been told so far."""

    url: str = ""
    """Where requests are served; known from the first READY=1 on."""
    trouble: str = ""
    """Why the model is being started again; told until it serves."""
    is_reloading: bool = False
    is_stopping: bool = False

    @property
    def is_starting(self) -> bool:
        return not self.url and not self.is_stopping


def state_changed(
    status: ServiceStatus, model: str, state: State, *, slots: int | None
) -> tuple[ServiceStatus, Messages]:
    """``slots``: how many requests it serves at the same time, where that is known."""
    if status.is_stopping:
        return status, ()
    if (step := _STEPS.get(state)) is not None:
        text = step.format(model=model)
        return status, (_status(f"{status.trouble}: {text}" if status.trouble else text),)
    if state in (State.READY, State.STOPPED) and status.url:
        ready = ("READY=1",) if status.is_reloading else ()
        serves = state is State.READY
        text = _serving_text((model,), status.url, slots) if serves else f"{model} is not loaded"
        return replace(status, trouble="", is_reloading=False), (*ready, _status(text))
    return status, ()


def serving(
    status: ServiceStatus, models: Sequence[str], url: str, *, slots: int | None
) -> tuple[ServiceStatus, Messages]:
    """Every model has produced a real token: now, and not before, the service is up."""
    served = replace(status, url=url, trouble="", is_reloading=False)
    return served, ("READY=1", _status(_serving_text(models, url, slots)))


def exited(
    status: ServiceStatus,
    model: str,
    diagnosis: Diagnosis,
    *,
    restarts: bool,
    crashes: int,
    most_crashes: int,
) -> tuple[ServiceStatus, Messages]:
    """The model's server ended unasked. ``crashes``: how many still count, of ``most_crashes`` allowed."""
    cause = _IN_WORDS.get(diagnosis.cause) or diagnosis.cause.replace("_", " ")
    if not restarts:
        return status, (_status(f"gave up on {model}: {diagnosis.message} {diagnosis.remedy}"),)
    if diagnosis.adjustment is not None:
        trouble = f"starting {model} smaller after {cause}"
    else:
        trouble = f"restarting {model} after {cause} ({crashes} of {most_crashes})"
    return replace(status, trouble=trouble), (_status(trouble),)


def reloading(
    status: ServiceStatus, model: str | None, *, monotonic_us: int
) -> tuple[ServiceStatus, Messages]:
    """A restart of the model is asked for; None: to take over what has changed in the config of many.

    While the first start still goes on, it is only begun anew. MONOTONIC_USEC= is what Type=notify-reload
    waits for (systemd 253); older ones pass over it.
    """
    if not status.url or status.is_stopping:
        return status, ()
    text = (
        f"restarting {model} as asked: requests in flight may finish" if model else "reading the config again"
    )
    return (
        replace(status, is_reloading=True, trouble="reloading"),
        ("RELOADING=1", f"MONOTONIC_USEC={monotonic_us}", _status(text)),
    )


def reloaded(
    status: ServiceStatus, models: Sequence[str] | None, problem: str = ""
) -> tuple[ServiceStatus, Messages]:
    """The config of many ``models`` is read again; None: it is not taken, because of ``problem``."""
    if not status.url or status.is_stopping:
        return status, ()
    told = f"serving as before: {problem}" if models is None else _serving_text(models, status.url, None)
    ready = ("READY=1",) if status.is_reloading else ()
    return replace(status, trouble="", is_reloading=False), (*ready, _status(told))


def stopping(status: ServiceStatus, *, in_flight: int, needs_s: float) -> tuple[ServiceStatus, Messages]:
    """``needs_s``: the longest that drain and stop may take."""
    if status.is_stopping:
        return status, ()
    requests = "1 request" if in_flight == 1 else f"{in_flight} requests"
    text = f"stopping: {requests} in flight may finish" if in_flight else "stopping"
    return replace(status, is_stopping=True), ("STOPPING=1", _extension(needs_s), _status(text))


def beat(status: ServiceStatus) -> Messages:
    """Said again and again by the loop that carries the traffic; a loop that hangs says it no more."""
    if status.is_starting or status.is_reloading:
        # While it starts the watchdog does not strike yet.
        return ("WATCHDOG=1", _extension(EXTENSION_S))
    return ("WATCHDOG=1",)


def _serving_text(models: Sequence[str], url: str, slots: int | None) -> str:
    named = ", ".join(models) if len(models) <= _MOST_NAMED else f"{len(models)} models"
    text = f"serving {named} at {url}"
    return text if slots is None else f"{text}, {slots} slot{'' if slots == 1 else 's'}"


def _status(text: str) -> str:
    """One line: a line feed would begin another assignment."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f"STATUS={line}"


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"
