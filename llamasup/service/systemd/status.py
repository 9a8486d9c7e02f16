"""What systemd is told of the service: what happened in, the assignments of sd_notify(3) out.

Decides words and moments; sends nothing. READY=1 is said once a real token has come, and again at the end of
a reload. Between the two the model may crash and come back: for systemd the service stays active, since
llamasup itself lives and requests wait; STATUS= is where a person sees it. A service of many models serves
whether they are loaded or not: what becomes of each is told beside that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.supervision.states import State

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


_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What systemd has been told so far. ``of_many``: the service is of many models, and stays ready whatever
    becomes of one of them.
    """

    of_many: bool = False
    url: str = ""
    """Where requests are served; known from the first READY=1 on."""
    models: tuple[str, ...] = ()
    """What is served there."""
    going_on: Mapping[str, str] = field(default_factory=dict[str, str])
    """By model: what it does instead of serving. Of many, those that just are not loaded do nothing."""
    troubles: Mapping[str, str] = field(default_factory=dict[str, str])
    """By model: why it is being started again; told until it serves."""
    refused: str = ""
    """Why the config that was read last is not taken."""
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
        text, trouble = step.format(model=model), status.troubles.get(model)
        doing = _doing(status, model, f"{trouble}: {text}" if trouble else text)
        return doing, _told(doing)
    if state not in (State.READY, State.STOPPED):
        return status, ()
    after = _done(status, model)
    if status.of_many:
        return after, _told(after)
    if not status.url:
        return status, ()
    if state is State.STOPPED:
        after = _doing(after, model, f"{model} is not loaded")
    ready = ("READY=1",) if status.is_reloading else ()
    return replace(after, is_reloading=False), (*ready, *_told(after, slots))


def serving(
    status: ServiceStatus, models: Sequence[str], url: str, *, slots: int | None
) -> tuple[ServiceStatus, Messages]:
    """What is to be there from the start has given a real token: now, and not before, the service is up."""
    served = replace(status, url=url, models=tuple(models), is_reloading=False)
    if not status.of_many:
        served = replace(served, going_on={}, troubles={})
    return served, ("READY=1", *_told(served, slots))


def exited(
    status: ServiceStatus,
    model: str,
    diagnosis: Diagnosis,
    *,
    restarts: bool,
    crashes: int | None,
    most_crashes: int,
) -> tuple[ServiceStatus, Messages]:
    """The model's server ended unasked. ``crashes``: how many still count, of ``most_crashes`` allowed; None:
    not known.
    """
    cause = _IN_WORDS.get(diagnosis.cause) or diagnosis.cause.replace("_", " ")
    if not restarts:
        after = _doing(status, model, f"gave up on {model}: {diagnosis.message} {diagnosis.remedy}")
        return after, _told(after)
    if diagnosis.adjustment is not None:
        trouble = f"starting {model} smaller after {cause}"
    else:
        trouble = f"restarting {model} after {cause}"
        trouble += "" if crashes is None else f" ({crashes} of {most_crashes})"
    after = _doing(replace(status, troubles={**status.troubles, model: trouble}), model, trouble)
    return after, _told(after)


def reloading(
    status: ServiceStatus, model: str | None, *, monotonic_us: int
) -> tuple[ServiceStatus, Messages]:
    """A restart of the model is asked for; None: to take over what has changed in the config of many.

    While the first start still goes on, it is only begun anew. MONOTONIC_USEC= is what Type=notify-reload
    waits for (systemd 253); older ones pass over it.
    """
    if not status.url or status.is_stopping:
        return status, ()
    after = replace(status, is_reloading=True)
    if model is None:
        text = "reading the config again"
    else:
        text = f"restarting {model} as asked: requests in flight may finish"
        after = replace(after, troubles={model: "reloading"})
    return after, ("RELOADING=1", f"MONOTONIC_USEC={monotonic_us}", _status(text))


def reloaded(
    status: ServiceStatus, models: Sequence[str] | None, problem: str = "", *, gone: Iterable[str] = ()
) -> tuple[ServiceStatus, Messages]:
    """The config of many ``models`` is read again; of those that are ``gone``, or begin anew, nothing is told
    any more. None: it is not taken, because of ``problem``.
    """
    if not status.url or status.is_stopping:
        return status, ()
    after = replace(status, is_reloading=False, refused=problem)
    if models is not None:
        after = replace(after, models=tuple(models))
    for model in gone:
        after = _done(after, model)
    return after, (*(("READY=1",) if status.is_reloading else ()), *_told(after))


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


def _doing(status: ServiceStatus, model: str, what: str) -> ServiceStatus:
    """The newest is told first: of many that load, most have been told before."""
    return replace(status, going_on={model: what, **_without(status.going_on, model)})


def _done(status: ServiceStatus, model: str) -> ServiceStatus:
    return replace(
        status, going_on=_without(status.going_on, model), troubles=_without(status.troubles, model)
    )


def _without(told: Mapping[str, str], model: str) -> Mapping[str, str]:
    return {each: text for each, text in told.items() if each != model}


def _told(status: ServiceStatus, slots: int | None = None) -> Messages:
    """STATUS=: what is served, if all is well; of many, in any case."""
    doing = [*status.going_on.values()]
    said = doing[:_MAX_NAMED]
    if len(doing) > _MAX_NAMED:
        said.append(f"{len(doing) - _MAX_NAMED} more")
    if status.url and (status.of_many or not said):
        said.insert(0, _serving_text(status.models, status.url, slots))
    if status.refused:
        said.append(f"its config is not taken: {status.refused}")
    return (_status("; ".join(said)),) if said else ()


def _serving_text(models: Sequence[str], url: str, slots: int | None) -> str:
    named = ", ".join(models) if 0 < len(models) <= _MAX_NAMED else f"{len(models)} models"
    text = f"serving {named} at {url}"
    return text if slots is None else f"{text}, {slots} slot{'' if slots == 1 else 's'}"


def _status(text: str) -> str:
    """One line: a line feed would begin another assignment."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f"STATUS={line}"


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"
