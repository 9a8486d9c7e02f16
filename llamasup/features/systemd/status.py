"""Decides the messages to systemd: events in, assignments of sd_notify(3) out. Sends nothing.

READY=1 is sent after the first real token, and again at the end of a reload. If the model crashes and
restarts in between, the service stays active for systemd, as llamasup runs and requests wait; STATUS= shows
the crash. A service of many models is ready whether they are loaded or not; STATUS= lists their changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.supervision.states import State

EXTENSION_S = 60.0
"""The extra time that each heartbeat of a starting service requests. A load may take any time while it makes
progress (S6), and llamasup itself ends a load that does not; systemd only detects a hanging event loop."""

Messages = tuple[str, ...]

_STEPS = {
    State.STARTING: "starting llama-server for {model}",
    State.LOADING: "loading {model}",
    State.WARMING: "waiting for the first token of {model}",
}

_CAUSE_TEXTS = {"out_of_memory_host": "out of memory", "out_of_memory_device": "out of device memory"}
_MAX_NAMED = 5


class ServiceStatus(Struct, frozen=True):
    """The state that systemd knows. ``of_many``: of many models, which stays ready if one fails."""

    of_many: bool = False
    url: str = ""
    """The address; set at the first READY=1."""
    models: tuple[str, ...] = ()
    """The served models."""
    activities: Mapping[str, str] = field(default_factory=dict[str, str])
    """Text per model that loads or has failed; none for models that are simply not loaded."""
    problems: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason per model for its restart, shown until it serves."""
    config_problem: str = ""
    """Why the last config was rejected."""
    is_reloading: bool = False
    is_stopping: bool = False

    @property
    def is_starting(self) -> bool:
        return not self.url and not self.is_stopping


def state_changed(
    status: ServiceStatus, model: str, state: State, *, slots: int | None
) -> tuple[ServiceStatus, Messages]:
    """Note the new state. ``slots`` is the number of slots, if known."""
    if status.is_stopping:
        return status, ()
    if (step := _STEPS.get(state)) is not None:
        text, problem = step.format(model=model), status.problems.get(model)
        after = _with_activity(status, model, f"{problem}: {text}" if problem else text)
        return after, _status_message(after)
    if state not in (State.READY, State.STOPPED):
        return status, ()
    after = _without_activity(status, model)
    if status.of_many:
        return after, _status_message(after)
    if not status.url:
        return status, ()
    if state is State.STOPPED:
        after = _with_activity(after, model, f"{model} is not loaded")
    ready = ("READY=1",) if status.is_reloading else ()
    return replace(after, is_reloading=False), (*ready, *_status_message(after, slots))


def serving(
    status: ServiceStatus, models: Sequence[str], url: str, *, slots: int | None
) -> tuple[ServiceStatus, Messages]:
    """The initial models have produced a real token, so the service is ready."""
    served = replace(status, url=url, models=tuple(models), is_reloading=False)
    if not status.of_many:
        served = replace(served, activities={}, problems={})
    return served, ("READY=1", *_status_message(served, slots))


def exited(
    status: ServiceStatus,
    model: str,
    diagnosis: Diagnosis,
    *,
    restarts: bool,
    crashes: int | None,
    most_crashes: int,
) -> tuple[ServiceStatus, Messages]:
    """The model's server exited unexpectedly. ``crashes``: the number of recent ones, of ``most_crashes``
    allowed; None if unknown.
    """
    cause = _CAUSE_TEXTS.get(diagnosis.cause) or diagnosis.cause.replace("_", " ")
    if not restarts:
        after = _with_activity(status, model, f"gave up on {model}: {diagnosis.message} {diagnosis.remedy}")
        return after, _status_message(after)
    if diagnosis.adjustment is not None:
        problem = f"starting {model} smaller after {cause}"
    else:
        problem = f"restarting {model} after {cause}"
        problem += "" if crashes is None else f" ({crashes} of {most_crashes})"
    after = _with_activity(replace(status, problems={**status.problems, model: problem}), model, problem)
    return after, _status_message(after)


def reloading(
    status: ServiceStatus, model: str | None, *, monotonic_us: int
) -> tuple[ServiceStatus, Messages]:
    """A restart of the model was requested; None: a reload of the config of many models.

    Ignored during the first start, which only begins again. Type=notify-reload waits for MONOTONIC_USEC=
    (systemd 253); older versions ignore it.
    """
    if not status.url or status.is_stopping:
        return status, ()
    after = replace(status, is_reloading=True)
    if model is None:
        text = "reading the config again"
    else:
        text = f"restarting {model} as asked: requests in flight may finish"
        after = replace(after, problems={model: "reloading"})
    return after, ("RELOADING=1", f"MONOTONIC_USEC={monotonic_us}", _status(text))


def reloaded(
    status: ServiceStatus, models: Sequence[str] | None, problem: str = "", *, gone: Iterable[str] = ()
) -> tuple[ServiceStatus, Messages]:
    """The config of many models was reloaded; forget the texts of ``gone`` models. ``models`` None: the
    config was rejected because of ``problem``.
    """
    if not status.url or status.is_stopping:
        return status, ()
    after = replace(status, is_reloading=False, config_problem=problem)
    if models is not None:
        after = replace(after, models=tuple(models))
    for model in gone:
        after = _without_activity(after, model)
    return after, (*(("READY=1",) if status.is_reloading else ()), *_status_message(after))


def stopping(status: ServiceStatus, *, in_flight: int, needs_s: float) -> tuple[ServiceStatus, Messages]:
    """Note the stop. ``needs_s`` is the time limit for drain and stop."""
    if status.is_stopping:
        return status, ()
    requests = "1 request" if in_flight == 1 else f"{in_flight} requests"
    text = f"stopping: {requests} in flight may finish" if in_flight else "stopping"
    return replace(status, is_stopping=True), ("STOPPING=1", _extension(needs_s), _status(text))


def heartbeat(status: ServiceStatus) -> Messages:
    """Return the message of each heartbeat."""
    if status.is_starting or status.is_reloading:
        return ("WATCHDOG=1", _extension(EXTENSION_S))
    return ("WATCHDOG=1",)


def _with_activity(status: ServiceStatus, model: str, what: str) -> ServiceStatus:
    """The newest activity comes first, as the list is cut."""
    return replace(status, activities={model: what, **_without(status.activities, model)})


def _without_activity(status: ServiceStatus, model: str) -> ServiceStatus:
    return replace(
        status, activities=_without(status.activities, model), problems=_without(status.problems, model)
    )


def _without(texts: Mapping[str, str], model: str) -> Mapping[str, str]:
    return {name: text for name, text in texts.items() if name != model}


def _status_message(status: ServiceStatus, slots: int | None = None) -> Messages:
    """STATUS=: the address and models if all serve, or the activities; both for many models."""
    activities = [*status.activities.values()]
    parts = activities[:_MAX_NAMED]
    if len(activities) > _MAX_NAMED:
        parts.append(f"{len(activities) - _MAX_NAMED} more")
    if status.url and (status.of_many or not parts):
        parts.insert(0, _serving_text(status.models, status.url, slots))
    if status.config_problem:
        parts.append(f"config rejected: {status.config_problem}")
    return (_status("; ".join(parts)),) if parts else ()


def _serving_text(models: Sequence[str], url: str, slots: int | None) -> str:
    named = ", ".join(models) if 0 < len(models) <= _MAX_NAMED else f"{len(models)} models"
    text = f"serving {named} at {url}"
    return text if slots is None else f"{text}, {slots} slot{'' if slots == 1 else 's'}"


def _status(text: str) -> str:
    """One line, as a line feed would begin another assignment."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f"STATUS={line}"


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"
