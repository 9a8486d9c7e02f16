"""What llamasup tells the world: one value per happening, and the bus that carries it.

The JSON shapes are the public contract (docs/design.md, Events); fields may be added, never renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llamasup.errors import LlamasupError
from llamasup.http.address import Address, TcpAddress
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.plan_limits import Adjustment
from llamasup.models.diff import Changes
from llamasup.supervision.states import State
from llamasup.system.process.exit import Exit

__all__ = [
    "Bus",
    "ConfigRejected",
    "Downloading",
    "LoadFailed",
    "ModelUnloading",
    "ModelsChanged",
    "PublishedEvent",
    "Ready",
    "ServerExited",
    "ServerWarned",
    "StateChanged",
    "Stopped",
    "as_json",
]

PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class StateChanged:
    model: str
    state: State
    generation: int


@dataclass(frozen=True, slots=True)
class ServerExited:
    """A child ended unasked. ``exit`` is None where it was ended for being of no use (hung, no token)."""

    model: str
    generation: int
    exit: Exit | None
    diagnosis: Diagnosis
    restart_in_s: float | None


@dataclass(frozen=True, slots=True)
class ServerWarned:
    """A child will serve, but not as it was asked to."""

    model: str
    generation: int
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ModelUnloading:
    """A model is unloaded. ``reason``: ``memory``, ``group`` or ``count`` (for ``for_model``), ``ttl``,
    ``asked``, ``changed``, ``removed``.
    """

    model: str
    reason: str
    for_model: str = ""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A model that was asked for cannot be started: no server of it ever was, else ``ServerExited`` tells."""

    model: str
    error: LlamasupError


@dataclass(frozen=True, slots=True)
class Downloading:
    """A model that was asked for is on its way here; told some times a second.

    ``total_bytes`` None: not known.
    """

    model: str
    done_bytes: int
    total_bytes: int | None
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """The config was read again, or the folders have changed, and with them what is served: ``models``."""

    changes: Changes
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfigRejected:
    """The config was read again and is not taken; all is as it was."""

    error: LlamasupError


@dataclass(frozen=True, slots=True)
class Ready:
    """Every model that was asked for at the start serves requests."""

    address: Address
    pid: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    pass


PublishedEvent = (
    StateChanged
    | ServerExited
    | ServerWarned
    | ModelUnloading
    | LoadFailed
    | Downloading
    | ModelsChanged
    | ConfigRejected
    | Ready
    | Stopped
)


def as_json(notice: PublishedEvent) -> Mapping[str, Any]:
    """The public object of a happening."""
    match notice:
        case StateChanged(model, state, generation):
            return _object("state", model=model, state=state.value, generation=generation)
        case ServerExited(model, generation, exit_, diagnosis, restart_in_s):
            return _object(
                "exit",
                model=model,
                code=exit_.code if exit_ else None,
                signal=exit_.signal if exit_ else None,
                cause=diagnosis.cause,
                message=diagnosis.message,
                remedy=diagnosis.remedy,
                restart_in_s=restart_in_s,
                generation=generation,
                **({} if diagnosis.adjustment is None else {"adjustment": _adjustment(diagnosis.adjustment)}),
            )
        case ServerWarned(model, generation, message, remedy):
            return _object("warning", model=model, generation=generation, message=message, remedy=remedy)
        case ModelUnloading(model, reason, for_model):
            return _object("unload", model=model, reason=reason, **({"for": for_model} if for_model else {}))
        case LoadFailed(model, error):
            return _object(
                "failed", model=model, cause=error.cause, message=error.message, remedy=error.remedy
            )
        case Downloading(model, done, total, speed):
            return _object("download", model=model, done_bytes=done, total_bytes=total, bytes_per_s=speed)
        case ModelsChanged(changes, _):
            return _object("models", **{name: list(ids) for name, ids in asdict(changes).items()})
        case ConfigRejected(error):
            details = list(error.details)
            return _object("config", ok=False, message=error.message, remedy=error.remedy, details=details)
        case Ready(address, pid, models):
            return _object("ready", url=address.url, **_place(address), pid=pid, models=list(models))
        case Stopped():  # pragma: no branch - the last kind
            return _object("stopped")


def _place(address: Address) -> Mapping[str, Any]:
    """Of a Unix socket the path is what llama-server calls the host; the port has no meaning there."""
    if isinstance(address, TcpAddress):
        return {"host": address.host, "port": address.port}
    return {"host": address.path, "port": None}


def _adjustment(adjustment: Adjustment) -> Mapping[str, Any]:
    return {
        "step": adjustment.step,
        "most_steps": adjustment.most_steps,
        "changes": [
            {"setting": change.setting, "before": change.before, "after": change.after}
            for change in adjustment.changes
        ],
    }


def _object(event: str, **fields: Any) -> Mapping[str, Any]:
    return {"event": event, "protocol": PROTOCOL, **fields}


@dataclass(slots=True)
class Bus:
    """Hands every happening to every listener, in order, at once."""

    _listeners: list[Callable[[PublishedEvent], None]] = field(default_factory=list)

    def listen(self, listener: Callable[[PublishedEvent], None]) -> None:
        self._listeners.append(listener)

    def forget(self, listener: Callable[[PublishedEvent], None]) -> None:
        self._listeners.remove(listener)

    def publish(self, notice: PublishedEvent) -> None:
        for listener in tuple(self._listeners):  # one may come or go while it is told
            listener(notice)
